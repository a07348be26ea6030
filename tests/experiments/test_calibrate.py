"""Calibration finds the constants of an engine from its steps, and says how sure it is."""

from __future__ import annotations

import pytest

from labkit.engine.step_constants import load_constants
from labkit.errors import OutOfRangeError
from labkit.experiments.calibrate import calibrate
from labkit.experiments.virtual_run import VirtualOptions, simulate
from labkit.specs import load_gpu, load_model, synthetic_workload
from labkit.specs.engine_config import EngineConfig

OPTIONS = VirtualOptions(arrival_scale=0, has_server=False)


def run(constants, config=None, requests=24, gpu="H200"):
    traffic = synthetic_workload(requests, input_lengths=300, output_lengths=80, seed=2)
    return simulate(
        load_model("Qwen/Qwen3-8B"), load_gpu(gpu), traffic, config or EngineConfig(max_model_len=4096),
        constants=constants, options=OPTIONS,
    )  # fmt: skip


def test_one_run_of_a_slower_engine_predicts_its_other_settings():
    shipped = load_constants()
    truth = shipped.replace(correction=1.3, request_s=shipped.request_s * 2)
    found = calibrate(shipped, [run(truth)])
    other = EngineConfig(max_model_len=4096, max_num_seqs=4)
    wanted, before, after = (run(constants, other).duration_s for constants in (truth, shipped, found))
    assert abs(before / wanted - 1) > 0.2
    assert after == pytest.approx(wanted, rel=0.07)
    assert found.level == "calibrated"
    assert found.interval_low < 1 < found.interval_high
    assert found.interval_high / found.interval_low < shipped.interval_high / shipped.interval_low


def test_runs_of_two_cards_or_none_are_refused():
    with pytest.raises(OutOfRangeError):
        calibrate(load_constants(), [])
    with pytest.raises(OutOfRangeError):
        calibrate(load_constants(), [run(None, requests=2), run(None, requests=2, gpu="L4")])


def test_a_run_without_steps_is_refused():
    with pytest.raises(OutOfRangeError, match="no steps"):
        calibrate(load_constants(), [run(None, EngineConfig(max_model_len=128), requests=1)])
