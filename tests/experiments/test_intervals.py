"""Intervals: by hand, with the coverage that they promise, wider where fewer runs calibrate."""

from __future__ import annotations

import math

import numpy as np
import pytest

from labkit.engine.step_constants import load_constants
from labkit.experiments.intervals import (
    after_few_runs,
    calibrated_by,
    conformal,
    is_inside,
    left_out_inside,
    run_ratios,
    width_percent,
)
from labkit.experiments.public_runs import predict, public_runs


def test_an_interval_by_hand():
    # Of eleven the ceil(12 · 0.9) = 11th nearest to 0 counts, on whichever side it lies.
    ratios = [-0.01 * number for number in range(11)]
    assert conformal(ratios) == pytest.approx((math.exp(-0.1), math.exp(0.1)))
    # Of twenty the 19th nearest counts: one that is far off does not.
    assert conformal([0.0] * 19 + [3.0]) == (1.0, 1.0)
    assert conformal([0.2]) == pytest.approx((math.exp(-0.2), math.exp(0.2)))
    assert is_inside(0.1, conformal(ratios))
    assert not is_inside(0.11, conformal(ratios))
    assert width_percent((0.9, 1.1)) == pytest.approx(10.0)


def test_nine_in_ten_new_values_lie_inside_whatever_their_distribution():
    rng, inside = np.random.default_rng(5), []
    for _ in range(300):
        values = rng.standard_t(2, 31) * 0.02 + 0.01
        low, high = conformal(values[:30])
        inside.append(low <= math.exp(values[30]) <= high)
    assert 0.85 < np.mean(inside) < 0.96


def test_a_group_is_judged_by_the_others():
    # Both a and b lie where the other and c allow it; c lies where nobody else does.
    ratios = [("a", -0.01), ("a", 0.01), ("b", 0.0), ("b", 0.0), ("c", 0.5)]
    assert left_out_inside(ratios) == [True, True, True, True, False]
    assert left_out_inside([*ratios[:4], ("b", 0.02)])[-1] is False
    rows = [{"knobs": {"max_num_batched_tokens": 512}, "measured": {"x": 2.0}, "foretold": {"x": 1.0}}]
    assert run_ratios(rows, "x") == [("512", math.log(2))]


def test_more_calibrating_runs_err_less_and_the_runs_themselves_are_met():
    runs = tuple(run for run in public_runs() if run.model_name == "meta-llama/Llama-3.1-70B")[::2]
    start = load_constants()
    found = after_few_runs(runs, lambda model: start)
    assert list(found) == [1, 2, 3]
    assert len({len(ratios) for ratios in found.values()}) == 1
    before = np.median(np.abs(np.log(predict(runs, start) / np.array([run.seconds for run in runs]))))
    after = [np.median([abs(ratio) for _, ratio in ratios]) for ratios in found.values()]
    assert after[2] < before
    own = runs[:1]
    slower = start.replace(correction=1.2)
    assert predict(own, calibrated_by(slower, own))[0] == pytest.approx(own[0].seconds, rel=0.03)


def test_constants_carry_the_interval_of_their_level():
    found = load_constants(engine="labkit").with_intervals("vllm", "calibrated", 2)
    assert found.level == "calibrated"
    assert found.interval_low < 1 < found.interval_high
    one, many = (load_constants().with_intervals("vllm", "calibrated", count) for count in (1, 9))
    assert one.relative_error > many.relative_error
    assert load_constants().replace(interval_low=0.9, interval_high=1.1).relative_error == pytest.approx(
        math.log(1.1 / 0.9) / 3.29
    )
