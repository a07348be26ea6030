"""The search on grids that others measured: how near to the grid's best after so many launches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from labkit.engine.step_constants import StepConstants
from labkit.experiments.intervals import calibrated_by
from labkit.experiments.public_runs import PublicRun, predict
from labkit.experiments.search import Learnt, Outcome, Point, guided_search

_LIMITS_PERCENT = (25, 50, 75, 100)
_FEWEST = 10


@dataclass(frozen=True)
class Grid:
    """Measured (tensor parallelism, concurrency) points of one model, card and traffic, with a latency limit.

    Attributes:
        constants: that never saw the model.
    """

    runs: tuple[PublicRun, ...]
    constants: StepConstants
    limit_s: float
    _simulated: dict[tuple[int, ...], np.ndarray] = field(default_factory=dict)

    @property
    def points(self) -> list[dict[str, int]]:
        """The settings, in the order of `runs`."""
        return [
            {"tensor_parallel_size": run.config.tensor_parallel_size, "concurrency": run.concurrency}
            for run in self.runs
        ]

    def measured(self, point: Point) -> Outcome:
        """Output tokens per second and card, and the time per token."""
        return self._outcome(self.points.index(dict(point)), [run.seconds for run in self.runs])

    def simulation(self, launched: Sequence[Point] = ()) -> Learnt:
        """The same as foretold by constants that know the launched points alone."""
        own = tuple(self.points.index(dict(point)) for point in launched)
        constants = self.constants
        if own:
            constants = calibrated_by(constants, tuple(self.runs[index] for index in own))
        if own not in self._simulated:
            self._simulated[own] = predict(self.runs, constants)
        seconds = self._simulated[own].tolist()
        return Learnt(lambda point: self._outcome(self.points.index(dict(point)), seconds), constants.relative_error)

    def _outcome(self, index: int, seconds: Sequence[float]) -> Outcome:
        run = self.runs[index]
        return Outcome(run.concurrency / seconds[index] / run.config.tensor_parallel_size, seconds[index])

    @property
    def best(self) -> float:
        """The largest measured value inside the limit."""
        outcomes = [self.measured(point) for point in self.points]
        return max(one.value for one in outcomes if (one.latency_s or 0.0) <= self.limit_s)


def grids(runs: Sequence[PublicRun], fits: Mapping[str, StepConstants]) -> Iterator[Grid]:
    """Grids of 10 points or more, each under four latency limits.

    Args:
        fits: model → constants that never saw it.
    """
    groups: dict[tuple, dict[tuple, PublicRun]] = {}
    for run in runs:
        key = (run.model_name, run.weights, run.gpu_name, round(run.input_tokens), round(run.output_tokens))
        groups.setdefault(key, {})[run.config.tensor_parallel_size, run.concurrency] = run
    for group in groups.values():
        if len(group) >= _FEWEST:
            own = tuple(group[key] for key in sorted(group))
            for percent in _LIMITS_PERCENT:
                limit_s = float(np.percentile([run.seconds for run in own], percent))
                yield Grid(own, fits[own[0].model_name], limit_s)


def shares_within(
    runs: Sequence[PublicRun],
    fits: Mapping[str, StepConstants],
    allowed: Sequence[int] = (3, 5),
    tolerance: float = 0.05,
) -> dict[int, dict[str, float]]:
    """Launches allowed → percent of grids whose best is met to `tolerance` by then, with the mean launches used; the
    search starts from the middle of each grid and its simulation learns from the first launches."""
    met: dict[int, list[bool]] = {most: [] for most in allowed}
    used: dict[int, list[int]] = {most: [] for most in allowed}
    for grid in grids(runs, fits):
        points = grid.points
        launched: list[Point] = []

        def launch(point: Point, grid: Grid = grid, launched: list[Point] = launched) -> Outcome:
            launched.append(point)
            return grid.measured(point)

        found = guided_search(
            points, grid.simulation().simulate, launch, default=points[len(points) // 2],
            latency_limit_s=grid.limit_s, max_runs=max(allowed), repeats=False,
            resimulate=lambda grid=grid, launched=launched: grid.simulation(launched),  # type: ignore[misc]
        )  # fmt: skip
        good = [
            (one.latency_s or 0.0) <= grid.limit_s and one.value >= (1 - tolerance) * grid.best
            for one in (launch.measured for launch in found.launches) if one is not None
        ]  # fmt: skip
        for most in allowed:
            # Fewer allowed launches are the first of more.
            met[most].append(any(good[:most]))
            used[most].append(min(most, len(good)))
    return {
        most: {
            "grids": len(met[most]), "percent_within": 100 * float(np.mean(met[most])),
            "mean_launches": float(np.mean(used[most])),
        }
        for most in allowed
    }  # fmt: skip
