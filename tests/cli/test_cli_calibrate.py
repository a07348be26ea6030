"""`labkit calibrate` as a user types it, on a machine without a card."""

from __future__ import annotations

import dataclasses
import json

import pytest
from typer.testing import CliRunner

from labkit.cli import app
from labkit.engine.step_constants import load_constants
from labkit.errors import OutOfRangeError, StoreError, UnsupportedError
from labkit.experiments import RunStore
from labkit.experiments.virtual_run import VirtualOptions, simulate
from labkit.specs import cpu_gpu, load_gpu, load_model, synthetic_workload
from labkit.specs.engine_config import EngineConfig


def run(*words: str):
    return CliRunner().invoke(app, list(words))


def simulated(engine="labkit", **settings):
    return simulate(
        load_model("Qwen/Qwen3-0.6B"), load_gpu("H200"), synthetic_workload(12, 100, 60, seed=3),
        EngineConfig(max_model_len=2048, max_num_seqs=8), engine=engine, options=VirtualOptions(0, False), **settings,
    )  # fmt: skip


def stored(tmp_path, run_id="a", origin="measured", engine="labkit", **changes):
    """A store with a run of an engine that is slower on the host than the shipped constants say."""
    shipped = load_constants(engine=engine)
    record = simulated(engine, constants=shipped.replace(step_s=16 * shipped.step_s), run_id=run_id)
    path = tmp_path / "runs.sqlite3"
    store = RunStore(path)
    store.save(dataclasses.replace(record, origin=origin, **changes))
    store.close()
    return str(path)


def test_runs_calibrate_and_the_next_simulation_uses_it(tmp_path):
    store = stored(tmp_path)
    before = run("simulate", "--model", "Qwen/Qwen3-0.6B", "--gpu", "H200", "--limit", "3", "--engine", "labkit")
    assert "shipped constants" in before.output.replace("\n", " ")
    result = run("calibrate", "--run", "a", "--store", store, "--json")
    assert result.exit_code == 0
    answer = json.loads(result.stdout)
    assert answer["level"] == "calibrated"
    assert answer["constants"] != answer["before"]
    truth = simulated(constants=load_constants(engine="labkit").replace(step_s=16 * answer["before"]["step_s"]))
    assert simulated().duration_s == pytest.approx(truth.duration_s, rel=0.03)
    assert simulated(constants=load_constants(engine="labkit")).duration_s < 0.6 * truth.duration_s
    after = run("simulate", "--model", "Qwen/Qwen3-0.6B", "--gpu", "H200", "--limit", "3", "--engine", "labkit")
    assert "calibrated constants" in after.output.replace("\n", " ")


def test_the_measured_memory_corrects_the_pool_of_later_simulations(tmp_path):
    planned = simulated().plan
    parts = planned.breakdown.parts()
    grown = 2**30
    measured = dataclasses.replace(
        planned.breakdown, kind="measured", workspace_bytes=parts["workspace"] + grown,
        kv_cache_bytes=parts["kv_cache"] - grown,
    )  # fmt: skip
    assert run("calibrate", "--run", "a", "--store", stored(tmp_path, measured=measured)).exit_code == 0
    lost = (planned.num_gpu_blocks - simulated().plan.num_gpu_blocks) * planned.block_bytes
    assert lost == pytest.approx(grown, abs=2 * planned.block_bytes)


def test_the_table_says_what_changed_and_where_it_is(tmp_path):
    result = run("calibrate", "--run", "a", "--store", stored(tmp_path))
    assert result.exit_code == 0
    assert "host, a step" in result.output
    assert "h200.json" in result.output.replace("\n", "")


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"origin": "simulated"}, OutOfRangeError),
        ({"gpu": cpu_gpu(2.0)}, UnsupportedError),
    ],
)
def test_runs_that_teach_nothing_are_refused(tmp_path, changes, error):
    result = run("calibrate", "--run", "a", "--store", stored(tmp_path, **changes))
    assert isinstance(result.exception, error)


def test_no_such_run_too_many_and_two_engines(tmp_path):
    store = stored(tmp_path)
    assert isinstance(run("calibrate", "--run", "b", "--store", store).exception, StoreError)
    four = [word for _ in range(4) for word in ("--run", "a")]
    assert isinstance(run("calibrate", *four, "--store", store).exception, OutOfRangeError)
    stored(tmp_path, "c", engine="vllm")
    assert isinstance(run("calibrate", "--run", "a", "--run", "c", "--store", store).exception, OutOfRangeError)


def test_without_a_card_and_runs_it_says_what_works(one_thread):
    if one_thread.cuda.is_available():
        pytest.skip("a card is here")
    assert "--run" in str(run("calibrate").exception)
