"""Rows of the sweep on a card: steps packed without loss, the parts of the sweep, metrics by hand."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from labkit.experiments import card_sweep
from labkit.experiments.card_sweep import SweepRun, packed_steps, run_metrics, run_part, unpacked_steps
from labkit.experiments.microbench import thin_model
from labkit.experiments.run import RunOutcome
from labkit.measure.run_record import RequestRow, StepRow


def rows() -> tuple[StepRow, ...]:
    return (
        StepRow(0.001, 0.002, 40, 40, 0, 3, 2, 5, 0, 40),
        StepRow(0.003, 0.0005, 3, 0, 3, 3, 2, 5, 0, 43, num_preemptions=1),
        StepRow(0.5, 0.25, 2, 0, 2, 2, 0, 4, 0, 30, num_swapped_blocks=7),
    )


def test_steps_come_back_as_they_were_packed():
    packed = packed_steps(rows())
    assert packed["num_prefill_tokens"] == "40 0 0"
    assert packed["num_tokens_stored"] == "40 3 -13"
    back = unpacked_steps(json.loads(json.dumps(packed)))
    for before, after in zip(rows(), back, strict=True):
        assert (after.start_s, after.duration_s) == pytest.approx((before.start_s, before.duration_s), abs=1e-6)
        for name in (*card_sweep.STEP_COLUMNS, "num_tokens"):
            assert getattr(after, name) == getattr(before, name)
    assert unpacked_steps(packed_steps(())) == ()


def test_the_grid_is_large_enough_and_has_runs_that_preempt():
    runs = card_sweep.sweep_runs()
    grid = [run for run in runs if run.part == "grid"]
    assert len(grid) == 36
    assert len({tuple(run.knobs.items()) for run in grid}) == 36
    assert {run.config.gpu_memory_utilization for run in grid} == {0.1, 0.025}
    held = [*card_sweep.unseen_runs(), *card_sweep.second_model_runs()]
    held = [run for run in held if "calibrates" not in run.part]
    assert not {run.seed for run in held} & {run.seed for run in grid}
    assert not [run for run in held if {**card_sweep.BASE, **run.knobs} in [dict(other.knobs) for other in grid]]
    assert all(run.config for run in held)


def test_metrics_by_hand():
    requests = (
        RequestRow(0, 0.0, 1.0, 2.0, 10, 3, finish_reason="length", token_times_s=(1.0, 1.25, 2.0)),
        RequestRow(1, 0.0, 2.0, 2.0, 10, 1, num_preemptions=2, finish_reason="length", token_times_s=(2.0,)),
    )
    found = run_metrics(RunOutcome("finished", 4.0, requests, rows(), None))
    assert found["output_tokens_per_s"] == 1.0
    assert found["tpot_mean_s"] == 0.5
    assert found["itl_p50_s"] == 0.5
    assert found["ttft_p50_s"] == 1.5
    assert (found["num_preemptions"], found["num_finished"]) == (2, 2)


def test_a_part_is_run_and_written_after_each_run(monkeypatch, tmp_path, one_thread):
    monkeypatch.setattr(card_sweep, "load_model", lambda name: thin_model(1))
    traffic = {"num_requests": 4, "input_lengths": "uniform:8-30", "output_lengths": "uniform:3-6"}
    monkeypatch.setattr(card_sweep, "TRAFFIC", traffic)
    monkeypatch.setattr(card_sweep, "WARM_UP", {"num_requests": 1, "input_lengths": 4, "output_lengths": 2})
    small = {"max_model_len": 64, "max_num_seqs": 3, "max_num_batched_tokens": 32}
    runs = [SweepRun("grid", small), SweepRun("grid", {**small, "max_model_len": 10**9})]
    monkeypatch.setattr(card_sweep, "sweep_runs", lambda: runs)
    path = tmp_path / "sweep.json"
    run_part("grid", path, 1e6, on_progress=lambda text: None, device="cpu")
    first, failed = json.loads(path.read_text())["rows"]
    assert first["output_tokens"] == sum(request.output_tokens for request in runs[0].workload().requests)
    assert first["num_gpu_blocks"] == first["planned_blocks"] > 0
    assert sum(row.num_prefill_tokens for row in unpacked_steps(first["steps"])) > 0
    assert "no KV block" in failed["error"]
    run_part("grid", path, -1.0, on_progress=lambda text: None, device="cpu")
    assert len(json.loads(path.read_text())["rows"]) == 2


def test_the_file_says_how_far_equal_runs_lie_apart(monkeypatch, tmp_path):
    rates = iter([100.0, 80.0, 95.0])

    class FakeEngine:
        def __init__(self, model, device):
            pass

        def run(self, run):
            row = {"part": run.part, "model": run.model, "knobs": dict(run.knobs), "seed": run.seed, "traffic": {}}
            row |= {"settings": {**card_sweep.BASE, **run.knobs}, "output_tokens_per_s": next(rates)}
            return row

    monkeypatch.setattr(card_sweep, "CardEngine", FakeEngine)
    monkeypatch.setattr(card_sweep, "_line", lambda row, elapsed_s: str(row["knobs"]))
    repeat, other = SweepRun(card_sweep.REPEAT, {}), SweepRun("grid", {"max_num_seqs": 32})
    monkeypatch.setattr(card_sweep, "sweep_runs", lambda: [repeat, other, repeat])
    path, said = tmp_path / "sweep.json", []
    run_part("grid", path, 1e6, on_progress=said.append)
    entry = json.loads(path.read_text())["summary"][card_sweep.SAME]
    # 100 and 95 with the same settings; what has others does not count.
    assert (entry["value"], entry["ok"]) == (5.26, False)
    # The last word is run even when the time is over, alone.
    rates = iter([100.0])
    run_part("grid", path, -1.0, on_progress=said.append)
    stored = json.loads(path.read_text())
    assert [row["part"] for row in stored["rows"]] == [card_sweep.REPEAT]
    assert stored["summary"] == {}
    # What is in the file can be measured again by what it says.
    assert stored["command"] == f"python -m labkit.experiments.card_sweep {path} grid"


def test_several_parts_run_in_processes_of_their_own(monkeypatch, tmp_path):
    started, ran, codes = [], [], iter((0, 3))

    def run(command, check):
        started.append(command[1:])
        return SimpleNamespace(returncode=next(codes))

    monkeypatch.setattr(card_sweep, "check_card", lambda: None)
    monkeypatch.setattr(card_sweep, "run_part", lambda *arguments: ran.append(arguments))
    monkeypatch.setattr(card_sweep.subprocess, "run", run)
    path = tmp_path / "sweep.json"
    monkeypatch.setattr("sys.argv", ["card_sweep", str(path), "microbenchmark=15", "second-model=20"])
    with pytest.raises(SystemExit, match="3"):
        card_sweep.main()
    command = ["-m", "labkit.experiments.card_sweep", str(path)]
    assert started == [[*command, "microbenchmark=15"], [*command, "second-model=20"]]
    monkeypatch.setattr("sys.argv", ["card_sweep", str(path), "second-model"])
    card_sweep.main()
    assert ran == [("second model", path, 120.0)]
