"""Intervals of predictions after calibration by one to three runs, from runs that the constants never saw.

An interval is two factors on a predicted value between which nine in ten measured ones lie. It is conformal: as far to
both sides of the prediction as |log(measured/predicted)| goes in nine of ten other runs. It is not moved to the middle
of those: runs of one kind err together, and what they share is not what the next kind has. It is judged on runs that
are left out, whole kinds of them at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from labkit.engine.step_constants import StepConstants
from labkit.experiments.calibrate import SIGMAS
from labkit.experiments.fit_constants import fit_constants
from labkit.experiments.public_runs import PublicRun, predict

SHARE = 0.9
MOST_RUNS = 3
# A deployment has runs to calibrate with and as many to judge by.
_FEWEST = 2 * MOST_RUNS
_NOISE = 0.02
Interval = tuple[float, float]
Ratio = tuple[Hashable, float]


def conformal(log_ratios: Sequence[float]) -> Interval:
    """Factors between which `SHARE` of new ratios lie, when they come as these did: to both sides of 1 the
    ceil((n + 1) · SHARE)-th smallest |log(measured/predicted)|.

    With fewer than nine ratios no distance is known to hold so many: the largest stands for it.
    """
    distances = np.sort(np.abs(np.asarray(log_ratios, dtype=float)))
    half = float(distances[min(len(distances), math.ceil((len(distances) + 1) * SHARE)) - 1])
    return math.exp(-half), math.exp(half)


def is_inside(log_ratio: float, interval: Interval) -> bool:
    """Whether a measured value lies in the interval of its prediction."""
    return interval[0] <= math.exp(log_ratio) <= interval[1]


def left_out_inside(ratios: Sequence[Ratio]) -> list[bool]:
    """For each (group, log ratio) whether it lies in the interval that the other groups give."""
    by_others = {
        group: conformal([ratio for key, ratio in ratios if key != group]) for group in {key for key, _ in ratios}
    }
    return [is_inside(ratio, by_others[group]) for group, ratio in ratios]


def percent(inside: Sequence[bool]) -> float:
    """Share of the true ones."""
    return round(100 * float(np.mean(inside)), 1)


def width_percent(interval: Interval) -> float:
    """Half of the interval's width, in percent of its middle."""
    return round(100 * (interval[1] - interval[0]) / (interval[1] + interval[0]), 2)


def after_few_runs(
    runs: Sequence[PublicRun], constants_without: Callable[[str], StepConstants]
) -> dict[int, list[Ratio]]:
    """Number of calibrating runs → (model, log(measured/predicted)) of the other runs of each deployment: the middle
    load calibrates first, then the lowest, then the highest.

    Args:
        constants_without: model's name → constants that were fitted without it.
    """
    found: dict[int, list[Ratio]] = {count: [] for count in range(1, MOST_RUNS + 1)}
    for own in _deployments(runs):
        start = constants_without(own[0].model_name)
        order = (own[len(own) // 2], own[0], own[-1])
        rest = tuple(run for run in own if run not in order)
        for count, ratios in found.items():
            constants = calibrated_by(start, order[:count])
            ratios += zip((run.model_name for run in rest), _log_ratios(rest, constants), strict=True)
    return found


def _deployments(runs: Sequence[PublicRun]) -> Iterator[list[PublicRun]]:
    groups: dict[tuple, list[PublicRun]] = {}
    for run in runs:
        groups.setdefault(run.deployment, []).append(run)
    for group in groups.values():
        if len(group) >= _FEWEST:
            yield sorted(group, key=lambda run: (run.concurrency, run.input_tokens, run.output_tokens))


def calibrated_by(start: StepConstants, runs: tuple[PublicRun, ...]) -> StepConstants:
    """`start` moved to meet a few runs of one deployment, of which only the mean time per token is known."""
    measured = np.array([run.seconds for run in runs])
    found = fit_constants(start, lambda found: predict(runs, found), measured, SIGMAS, noise=_NOISE)
    return found.with_intervals("vllm", "calibrated", len(runs))


def _log_ratios(runs: tuple[PublicRun, ...], constants: StepConstants) -> list[float]:
    measured = np.array([run.seconds for run in runs])
    return np.log(measured / predict(runs, constants)).tolist()


def run_ratios(rows: Sequence[Mapping[str, Any]], metric: str) -> list[Ratio]:
    """(token budget, log(measured/predicted)) of rows of `card_proof.foretold`: runs of one budget take the same kinds
    of steps and err together."""
    return [
        (str(row["knobs"].get("max_num_batched_tokens")), math.log(row["measured"][metric] / row["foretold"][metric]))
        for row in rows
    ]
