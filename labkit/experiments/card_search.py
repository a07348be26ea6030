"""The guided search on the grid that was measured on a card, without a card: launches are the grid's runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from labkit.experiments.calibrate import calibrate
from labkit.experiments.card_proof import MeasuredRun, Sweep, foretell
from labkit.experiments.search import Learnt, Outcome, Point, guided_search

_LIMITS_PERCENT = (25, 50, 100)
_LATENCIES = ("itl_p99_s", "ttft_p99_s")
_TOLERANCE = 0.05
Found = dict[tuple, dict[str, Any]]


def search_on_grid(sweep: Sweep, max_runs: int) -> dict[str, float]:
    """The simulation starts from the microbenchmark and learns from the first launches.

    Goals are the largest throughput under limits of the p99 between tokens or of the p99 to the first token, each from
    three defaults.

    Returns:
        percent of goals met within 5 %, launches made and launches until it was met (of those that were).
    """
    grid = {tuple(run.row["knobs"].items()): run for run in sweep.grid}
    points, simulations = [dict(key) for key in grid], _Simulations(sweep, grid)
    met, used, needed = [], [], []
    for default in (points[0], points[len(points) // 2], points[-1]):
        for latency, limit_s in _goals(list(grid.values())):
            best = max(run.row["output_tokens_per_s"] for run in grid.values() if run.row[latency] <= limit_s)
            launched: list[MeasuredRun] = []

            def launch(point: Point, launched: list[MeasuredRun] = launched, latency: str = latency) -> Outcome:
                run = grid[tuple(point.items())]
                launched.append(run)
                return Outcome(run.row["output_tokens_per_s"], run.row[latency])

            def learn(launched: list[MeasuredRun] = launched, latency: str = latency) -> Learnt:
                return simulations.after(launched, latency)

            found = guided_search(
                points, simulations.after((), latency).simulate, launch, default=default, latency_limit_s=limit_s,
                max_runs=max_runs, repeats=False, resimulate=learn,
            )  # fmt: skip
            good = [
                count for count, run in enumerate(launched, 1)
                if run.row[latency] <= limit_s and run.row["output_tokens_per_s"] >= (1 - _TOLERANCE) * best
            ]  # fmt: skip
            met.append(bool(good))
            needed += good[:1]
            used.append(len(found.launches))
    return {
        "goals": float(len(met)), "percent_within": round(100 * float(np.mean(met)), 1),
        "mean_launches": round(float(np.mean(used)), 2), "most_launches": float(max(used)),
        "mean_launches_until_met": round(float(np.mean(needed)), 2) if needed else 0.0,
    }  # fmt: skip


def _goals(runs: Sequence[MeasuredRun]) -> list[tuple[str, float]]:
    """Latency and its limit, each pair once; the loosest limit of both is none."""
    found = [
        (latency, float(np.percentile([run.row[latency] for run in runs], part)))
        for latency in _LATENCIES
        for part in _LIMITS_PERCENT
    ]
    return found[:-1]


class _Simulations:
    """The grid foretold with constants of the microbenchmark and of runs, each set of runs once."""

    def __init__(self, sweep: Sweep, grid: Mapping[tuple, MeasuredRun]) -> None:
        self._sweep, self._grid = sweep, grid
        self._known: dict[tuple[str, ...], tuple[Found, float]] = {}

    def after(self, launched: Sequence[MeasuredRun], latency: str) -> Learnt:
        """Point → what is expected once `launched` have been run."""
        key = tuple(sorted(run.record.run_id for run in launched))
        if key not in self._known:
            constants, memory = self._sweep.constants, None
            if launched:
                constants = calibrate(constants, [run.record for run in launched])
                memory = launched[-1].memory
            found = {point: foretell(run, constants, memory) for point, run in self._grid.items()}
            self._known[key] = found, constants.relative_error
        found, error = self._known[key]
        return Learnt(
            lambda point: Outcome(
                found[tuple(point.items())]["output_tokens_per_s"], found[tuple(point.items())][latency]
            ),
            error,
        )
