"""The guided search: finds what a grid would, learns from failures, and says when nothing is better."""

from __future__ import annotations

import math

import numpy as np
import pytest

from labkit.errors import DoesNotFitError, OutOfRangeError, WorkerError
from labkit.experiments.public_runs import public_runs
from labkit.experiments.residual_gp import ResidualGp
from labkit.experiments.search import Learnt, Outcome, guided_search, scaled_positions
from labkit.experiments.search_bench import shares_within
from labkit.experiments.simulation_bench import fit_engine

POINTS = [{"max_num_seqs": seqs, "block_size": block} for seqs in (32, 64, 128, 256) for block in (16, 32)]


def value_of(point) -> float:
    return 1000 * math.log2(point["max_num_seqs"]) - 10 * point["block_size"]


def search(points=POINTS, simulate=None, launch=None, **settings):
    return guided_search(
        points,
        simulate or (lambda point: Outcome(value_of(point))),
        launch or (lambda point: Outcome(value_of(point))),
        default=settings.pop("default", POINTS[0]),
        **settings,
    )


def test_a_true_simulation_needs_the_default_and_the_best():
    found = search()
    assert found.best.point == {"max_num_seqs": 256, "block_size": 16}
    assert [launch.point for launch in found.launches][:2] == [POINTS[0], found.best.point]
    assert found.gain == pytest.approx(value_of(found.best.point) / value_of(POINTS[0]) - 1)
    assert found.is_different
    assert len([one for one in found.launches if not one.is_repeat]) <= 5
    assert "max_num_seqs 256" in found.sentence


def test_winner_and_default_are_launched_once_more_and_the_gain_has_a_range():
    rng = np.random.default_rng(1)
    found = search(launch=lambda point: Outcome(value_of(point) * math.exp(rng.normal(0, 0.02))))
    assert [one.point for one in found.launches if one.is_repeat] == [POINTS[0], found.best.point]
    low, high = found.gain_range
    assert low < found.gain < high
    # Two launches of each, 2 % apart from each other: 1.96 · 0.02 · √(1/2 + 1/2), within what few repeats can tell.
    assert 0.5 < (math.log1p(high) - math.log1p(low)) / 2 / (1.96 * 0.02) < 2
    first, again = (one.measured.value for one in found.launches if one.point == POINTS[0])
    assert found.baseline.measured.value == pytest.approx(math.sqrt(first * again))
    assert len(search(max_runs=5).launches) <= 5
    assert not any(one.is_repeat for one in search(repeats=False).launches)


def test_a_lucky_winner_that_its_repeat_does_not_confirm_is_no_difference():
    seen = []

    def launch(point):
        seen.append(dict(point))
        is_first = seen.count(dict(point)) == 1
        return Outcome(100.0 * (1.1 if point == POINTS[6] and is_first else 0.93 if point == POINTS[6] else 1.0))

    found = search(simulate=lambda point: Outcome(120.0 if point == POINTS[6] else 100 + POINTS.index(point)),
                   launch=launch)  # fmt: skip
    assert not found.is_different
    assert found.sentence.startswith("No difference")


def test_what_the_simulation_cannot_tell_apart_is_launched_once_and_the_surer_one():
    points = [{"max_num_seqs": seqs, "gpu_memory_utilization": share} for seqs in (32, 256) for share in (0.95, 0.5)]
    found = search(
        points, simulate=lambda point: Outcome(
            float(point["max_num_seqs"]), fit_probability=0.8 if point["gpu_memory_utilization"] > 0.9 else 1.0
        ), launch=lambda point: Outcome(float(point["max_num_seqs"])), default=points[1],
    )  # fmt: skip
    assert found.best.point == {"max_num_seqs": 256, "gpu_memory_utilization": 0.5}
    # The others of each pair come when nothing else is left to try.
    assert [tuple(one.point.values()) for one in found.launches][:2] == [(32, 0.5), (256, 0.5)]
    assert search(POINTS, lambda point: Outcome(float(point["max_num_seqs"])), max_runs=2).num_alike == 4


def test_a_simulation_that_learns_from_the_first_launches_is_asked_again():
    truth = {32: 5000.0, 64: 6000.0, 128: 3500.0, 256: 3000.0}
    asked = []

    def resimulate():
        asked.append(True)
        return Learnt(lambda point: Outcome(truth[point["max_num_seqs"]] - point["block_size"]), 0.005)

    found = search(
        launch=lambda point: Outcome(truth[point["max_num_seqs"]] - point["block_size"]), resimulate=resimulate
    )
    assert len(asked) == 2
    assert found.best.point == {"max_num_seqs": 64, "block_size": 16}
    assert [one.point["max_num_seqs"] for one in found.launches][1] == 64
    # What errs by so little leaves nothing to look for beside the best: default and winner, each once more.
    assert len(found.launches) == 4


def test_one_error_of_the_step_time_moves_value_and_latency_together():
    # B is 10 % late by the simulation. Where it is not, its steps are shorter than simulated and it gives more than
    # 140: by hand 140 · exp(σ²/2) · Φ(σ - 0.095/σ) = 69 for σ = 0.27, more than C's 62; apart they would give 52.
    outcomes = {"A": Outcome(100.0, 1.0), "B": Outcome(140.0, 1.1), "C": Outcome(62.0, 0.4)}
    points = [{"name": name} for name in outcomes]
    found = guided_search(
        points, lambda point: outcomes[point["name"]], lambda point: outcomes[point["name"]], default=points[0],
        latency_limit_s=1.0, max_runs=2,
    )  # fmt: skip
    assert [one.point["name"] for one in found.launches] == ["A", "B"]


def test_a_wrong_simulation_is_corrected_by_its_launches():
    # The simulation likes many sequences; in truth they fall off by half beyond 64.
    truth = {32: 5000.0, 64: 6000.0, 128: 3500.0, 256: 3000.0}
    found = search(launch=lambda point: Outcome(truth[point["max_num_seqs"]] - point["block_size"]))
    assert found.best.point["max_num_seqs"] == 64
    assert len(found.launches) <= 8


def test_the_limit_excludes_faster_but_later_settings():
    def outcome(point):
        return Outcome(value_of(point), 0.001 * point["max_num_seqs"])

    found = search(simulate=outcome, launch=outcome, latency_limit_s=0.1)
    assert found.best.point["max_num_seqs"] == 64
    nothing = search(simulate=outcome, launch=outcome, latency_limit_s=0.001)
    assert nothing.best is None
    assert "No configuration met the limit" in nothing.sentence


@pytest.mark.parametrize("kind", [DoesNotFitError, WorkerError])
def test_what_does_not_start_is_learnt_and_not_raised(kind):
    def launch(point):
        if point["max_num_seqs"] == 256:
            raise kind("out of memory")
        return Outcome(value_of(point))

    found = search(launch=launch)
    assert found.best.point["max_num_seqs"] == 128
    assert any(one.measured is None and "out of memory" in one.error for one in found.launches)


def test_no_difference_is_said():
    found = search(simulate=lambda point: Outcome(100.0), launch=lambda point: Outcome(100.0))
    assert not found.is_different
    assert found.sentence.startswith("No difference")
    # The default is the best, and gains nothing over itself whatever the noise.
    assert found.best.point == POINTS[0]
    assert (found.gain, found.gain_range) == (0, (0, 0))


def test_refused_points_cost_no_launch_and_limits_hold():
    launched = []

    def launch(point):
        launched.append(point)
        return Outcome(value_of(point) * np.random.default_rng(len(launched)).uniform(0.5, 2))

    found = search(
        simulate=lambda point: None if point["max_num_seqs"] > 128 else Outcome(value_of(point)),
        launch=launch,
        max_runs=3,
    )
    assert found.num_refused == 2
    assert len(launched) <= 3
    assert all(point["max_num_seqs"] <= 128 for point in launched)
    with pytest.raises(OutOfRangeError):
        search(simulate=lambda point: None)
    with pytest.raises(OutOfRangeError):
        search(max_runs=0)


def test_cancel_before_the_first_launch():
    found = search(is_cancelled=lambda: True)
    assert found.launches == ()
    assert found.stopped == "cancelled"


def test_the_process_passes_through_what_it_saw_and_knows_less_elsewhere():
    process = ResidualGp(np.array([[0.0], [0.1], [1.0]]), noise=1e-4)
    process.add(0, 0.3)
    mean, deviation = process.posterior()
    assert mean[0] == pytest.approx(0.3, abs=1e-3)
    assert 0.2 < mean[1] < 0.3
    assert deviation[0] < deviation[1] < deviation[2]


def test_positions_are_scaled_by_knob():
    positions = scaled_positions([{"a": 16, "b": "x"}, {"a": 64, "b": "y"}, {"a": 256, "b": "x"}])
    assert positions.tolist() == [[0, 0], [0.5, 1], [1, 0]]


def test_public_grids_are_met_in_five_launches():
    served = tuple(run for run in public_runs() if run.engine == "V1")
    runs = tuple(run for run in served if run.model_name == "meta-llama/Llama-3.1-70B" and run.gpu_name == "H200")
    others = tuple(run for run in served if run.model_name != runs[0].model_name)[::3]
    few, found = shares_within(runs, {runs[0].model_name: fit_engine(others)}).values()
    assert found["grids"] >= 8
    assert found["percent_within"] >= 85
    assert few["percent_within"] <= found["percent_within"]
    assert few["mean_launches"] <= 3 < found["mean_launches"] <= 5
