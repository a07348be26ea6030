"""The search on grids that others measured: how near to the grid's best after so many launches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from labkit.experiments.public_runs import PublicRun
from labkit.experiments.search import Outcome, Point, guided_search

_LIMITS_PERCENT = (25, 50, 75, 100)
_FEWEST = 10


@dataclass(frozen=True)
class Grid:
    """Measured (tensor parallelism, concurrency) points of one model, card and traffic, with a latency limit."""

    runs: tuple[PublicRun, ...]
    errors: tuple[float, ...]
    limit_s: float

    @property
    def points(self) -> list[dict[str, int]]:
        """The settings, in the order of `runs`."""
        return [
            {"tensor_parallel_size": run.config.tensor_parallel_size, "concurrency": run.concurrency}
            for run in self.runs
        ]

    def outcome(self, point: Point, *, measured: bool) -> Outcome:
        """Output tokens per second and card, and the time per token; simulated ones by constants that never saw the
        model."""
        index = self.points.index(dict(point))
        run = self.runs[index]
        seconds = run.seconds if measured else run.seconds * float(np.exp(self.errors[index]))
        return Outcome(run.concurrency / seconds / run.config.tensor_parallel_size, seconds)

    @property
    def best(self) -> float:
        """The largest measured value inside the limit."""
        outcomes = [self.outcome(point, measured=True) for point in self.points]
        return max(one.value for one in outcomes if (one.latency_s or 0.0) <= self.limit_s)


def grids(errors: Sequence[tuple[PublicRun, float]]) -> Iterator[Grid]:
    """Grids of 10 points or more, each under four latency limits.

    Args:
        errors: runs with log(predicted/measured), as `simulation_bench.left_out` gives them.
    """
    groups: dict[tuple, dict[tuple, tuple[PublicRun, float]]] = {}
    for run, error in errors:
        key = (run.model_name, run.weights, run.gpu_name, round(run.input_tokens), round(run.output_tokens))
        groups.setdefault(key, {})[run.config.tensor_parallel_size, run.concurrency] = (run, error)
    for group in groups.values():
        if len(group) >= _FEWEST:
            runs, misses = zip(*(group[key] for key in sorted(group)), strict=True)
            for percent in _LIMITS_PERCENT:
                yield Grid(runs, misses, float(np.percentile([run.seconds for run in runs], percent)))


def shares_within(
    errors: Sequence[tuple[PublicRun, float]], max_runs: int, tolerance: float = 0.05
) -> dict[str, float]:
    """Percent of grids whose best is met to `tolerance` in `max_runs` launches, with the mean launches used; the
    search starts from the middle of each grid."""
    met, used = [], []
    for grid in grids(errors):
        points = grid.points
        found = guided_search(
            points,
            lambda point, grid=grid: grid.outcome(point, measured=False),  # type: ignore[misc]
            lambda point, grid=grid: grid.outcome(point, measured=True),  # type: ignore[misc]
            default=points[len(points) // 2],
            latency_limit_s=grid.limit_s,
            max_runs=max_runs,
            repeats=False,
        )
        value = found.best.measured.value if found.best and found.best.measured else 0.0
        met.append(value >= (1 - tolerance) * grid.best)
        used.append(len(found.launches))
    return {"grids": len(met), "percent_within": 100 * float(np.mean(met)), "mean_launches": float(np.mean(used))}
