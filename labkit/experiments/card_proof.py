"""How well the virtual GPU foretells labkit's own engine, on the runs of `card_sweep`, without a card.

The constants come from the file's microbenchmark and from one of its runs; every other run is foretold: its pool, its
preemptions, its steps and their times. `labkit bench simulation` puts the result beside the public runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from labkit.engine.step_constants import StepConstants, load_constants
from labkit.experiments.calibrate import calibrate
from labkit.experiments.card_constants import constants_of
from labkit.experiments.card_sweep import SweepRun, run_metrics, unpacked_steps
from labkit.experiments.measured_memory import MeasuredMemory, memory_of
from labkit.experiments.microbench import Microbenchmark
from labkit.experiments.run import RunOutcome
from labkit.experiments.search import Outcome, Point, Simulate, guided_search
from labkit.experiments.serialise import from_plain
from labkit.experiments.virtual_run import VirtualOptions, simulate
from labkit.measure.run_record import RequestRow, RunRecord
from labkit.memory import plan as memory_plan
from labkit.results import at_least, at_most
from labkit.specs import load_gpu, load_model
from labkit.specs.gpu_spec import GpuSpec

# Metric → words and bars in percent: at most, and what is aimed at.
_BARS = {
    "output_tokens_per_s": ("throughput", 3, 2), "tpot_mean_s": ("TPOT", 5, 3), "itl_p99_s": ("p99 ITL", 15, 8),
    "num_preemptions": ("preemptions", 10, 5),
}  # fmt: skip
METRICS = tuple(_BARS)
FLAGS = ("gpu_memory_utilization", "max_num_seqs", "max_num_batched_tokens", "kv_cache_dtype")
# Below so many preemptions a share says little.
_FEW_PREEMPTIONS = 10
_LIMITS_PERCENT = (25, 50, 75, 100)
# Every so many runs of the grid calibrate in turn.
_EVERY, _ENOUGH_POINTS = 2, 36


@dataclass(frozen=True)
class MeasuredRun:
    """One row of the sweep: what was run, and what came out."""

    run: SweepRun
    row: Mapping[str, Any]
    gpu: GpuSpec

    @cached_property
    def record(self) -> RunRecord:
        """The run as a record, with the pool that it had."""
        model = load_model(self.run.model)
        planned = memory_plan(model, self.gpu, self.run.config)
        blocks = int(self.row["num_gpu_blocks"])
        plan = replace(planned, num_gpu_blocks=blocks, kv_cache_tokens=blocks * planned.config.block_size)
        return RunRecord(
            run_id=str(self.row["knobs"]), name="", created="", status="finished", config=self.run.config, model=model,
            gpu=self.gpu, workload={}, plan=plan, requests=self._offered(), steps=unpacked_steps(self.row["steps"]),
            duration_s=float(self.row["duration_s"]),
        )  # fmt: skip

    def _offered(self) -> tuple[RequestRow, ...]:
        requests = self.run.workload().requests
        return tuple(
            RequestRow(index, request.arrival_s, None, None, request.input_tokens, request.output_tokens)
            for index, request in enumerate(requests)
        )

    @property
    def memory(self) -> MeasuredMemory:
        """Its memory parts, for the pools of others."""
        return memory_of(self.row["memory_parts"], self.record.plan)


@dataclass(frozen=True)
class Sweep:
    """The content of a sweep's file.

    Attributes:
        constants: of the microbenchmark alone. runs: the grid and what lies beside it. held_back: other runs.
    """

    constants: StepConstants
    runs: tuple[MeasuredRun, ...]
    held_back: tuple[MeasuredRun, ...]
    card: str

    @property
    def first(self) -> MeasuredRun:
        """The run that calibrates: all knobs as in the base."""
        return next(run for run in self.runs if run.run.part == "repeat")

    @property
    def grid(self) -> tuple[MeasuredRun, ...]:
        """The runs of the grid."""
        return tuple(run for run in self.runs if run.run.part == "grid")


def read_sweep(path: Path) -> Sweep:
    """The sweep in a file of `card_sweep`; runs that failed are left out."""
    content = json.loads(path.read_text(encoding="utf-8"))
    gpu = load_gpu(content["card"])
    found = from_plain(Microbenchmark, content["microbenchmark"])
    rows = [row for row in content["rows"] if "error" not in row]
    runs = tuple(
        MeasuredRun(SweepRun(row["part"], row["settings"], row["seed"], row["traffic"], row["model"]), row, gpu)
        for row in rows
    )
    return Sweep(
        constants=constants_of(found, gpu, load_constants(engine="labkit", level="data sheet")),
        runs=tuple(run for run in runs if run.run.part != "held back"),
        held_back=tuple(run for run in runs if run.run.part == "held back"),
        card=content["card"],
    )


def foretell(run: MeasuredRun, constants: StepConstants, memory: MeasuredMemory | None) -> dict[str, Any]:
    """The run's metrics by the virtual GPU, which sees its configuration and traffic alone."""
    record = simulate(
        load_model(run.run.model), run.gpu, run.run.workload(), run.run.config, engine="labkit", constants=constants,
        memory=memory, options=VirtualOptions(has_server=False),
    )  # fmt: skip
    return run_metrics(RunOutcome("finished", record.duration_s, record.requests, record.steps, None))


def prove(path: Path) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """Rows and promised numbers of a sweep's file for the results of the simulation; all are misses without a file."""
    sweep = read_sweep(path) if path.is_file() else None
    rows: list[dict[str, Any]] = []
    found: dict[str, float | None] = {}
    held: dict[str, float | None] = {}
    inside, worst_flag, searched = None, None, dict[str, float]()
    if sweep is not None:
        constants, memory = calibrate(sweep.constants, [sweep.first.record]), sweep.first.memory
        alone = foretold(sweep.runs, sweep.constants, None)
        after = foretold([run for run in sweep.runs if run is not sweep.first], constants, memory)
        later = foretold(sweep.held_back, constants, memory)
        found, held = medians(after), medians(later)
        inside = share_inside([*after, *later], constants)
        flags, searched = changed_flags(sweep), search_on_grid(sweep, 5)
        worst_flag = max(max(flag["throughput_median"], flag["tpot_median"]) for flag in flags.values())
        rows += [
            {"check": "own engine, microbenchmark alone", "runs": len(alone), "median_error_percent": medians(alone)}
        ]
        rows += [{"check": "own engine, microbenchmark and one run", **row} for row in after]
        rows += [{"check": "own engine, runs held back", **row} for row in later]
        rows += [{"check": "own engine, one flag changed", "flag": flag, **values} for flag, values in flags.items()]
        rows += [{"check": "search on the card's grid", "launches_allowed": 5, **searched}]
    # The pools that send many requests back are among the runs held back.
    summary = {
        f"own engine on an H200, microbenchmark and one run: {words}, median error, %": at_most(found.get(name), *bars)
        for name, (words, *bars) in _BARS.items()
        if name != "num_preemptions"
    }
    summary |= {
        f"own engine on an H200, runs held back: {words}, median error, %": at_most(held.get(name), *bars)
        for name, (words, *bars) in _BARS.items()
    }
    return rows, summary | {
        "own engine, a flag changed after calibration at another: worst flag's median error, %": at_most(
            worst_flag, 7, 4
        ),
        "own engine, 90 % interval, share of measured TPOT inside, %": at_least(inside, 85, 90),
        "search on an H200's grid: goals met within 5 % in five launches, %": at_least(
            searched.get("percent_within"), 95, 98
        ),
        "search on an H200's grid: launches used, mean": at_most(searched.get("mean_launches"), 5, 4),
        "search on an H200's grid: configurations that were measured": at_least(
            None if sweep is None else len(sweep.grid), _ENOUGH_POINTS
        ),
    }  # fmt: skip


def fit_shipped(sweep: Sweep) -> StepConstants:
    """Constants of labkit's engine for cards that were not measured: the shares of this one, products by the smooth
    roofline, fitted to a few runs of its grid."""
    bare = sweep.constants.replace(products=())
    return calibrate(bare, [run.record for run in sweep.grid[::9]])


def share_inside(rows: Sequence[Mapping[str, Any]], constants: StepConstants) -> float:
    """Percent of runs whose TPOT lies in the interval of its prediction."""
    ratios = np.array([row["measured"]["tpot_mean_s"] / row["foretold"]["tpot_mean_s"] for row in rows])
    return round(100 * float(np.mean((ratios >= constants.interval_low) & (ratios <= constants.interval_high))), 1)


def errors(measured: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, float]:
    """Foretold over measured - 1 of each metric; preemptions where there were enough."""
    result = {}
    for name in METRICS:
        if name == "num_preemptions" and max(measured[name], found[name]) < _FEW_PREEMPTIONS:
            continue
        result[name] = float(found[name]) / max(float(measured[name]), 1e-12) - 1
    return result


def foretold(
    runs: Sequence[MeasuredRun], constants: StepConstants, memory: MeasuredMemory | None
) -> list[dict[str, Any]]:
    """One row a run: measured, foretold, and the errors in percent."""
    rows = []
    for run in runs:
        found = foretell(run, constants, memory)
        rows.append({
            "part": run.run.part, "knobs": run.row["knobs"], "seed": run.run.seed, "traffic": run.run.traffic,
            "measured": {name: run.row[name] for name in METRICS}, "foretold": {name: found[name] for name in METRICS},
            "error_percent": {name: round(100 * value, 2) for name, value in errors(run.row, found).items()},
        })  # fmt: skip
    return rows


def medians(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Median absolute error of each metric in percent; None where no run has it."""
    found: dict[str, float | None] = {}
    for name in METRICS:
        sizes = [abs(row["error_percent"][name]) for row in rows if name in row["error_percent"]]
        found[name] = round(float(np.median(sizes)), 2) if sizes else None
    return found


def changed_flags(sweep: Sweep) -> dict[str, dict[str, float]]:
    """Flag → median and largest error of throughput and TPOT in percent, over pairs of runs that differ in it alone:
    the constants come from the first, the second is foretold."""
    found: dict[str, list[dict[str, float]]] = {flag: [] for flag in FLAGS}
    runs = [run for run in sweep.runs if run.run.part == "grid"]
    for first in runs[::_EVERY]:
        partners = [(flag, second) for second in runs if (flag := _only_difference(first, second))]
        if not partners:
            continue
        constants, memory = calibrate(sweep.constants, [first.record]), first.memory
        for flag, second in partners:
            if flag in found:
                found[flag].append(errors(second.row, foretell(second, constants, memory)))
    result = {}
    for flag, pairs in found.items():
        result[flag] = {"pairs": float(len(pairs))}
        if not pairs:
            continue
        for name, words in (("output_tokens_per_s", "throughput"), ("tpot_mean_s", "tpot")):
            sizes = 100 * np.abs([pair[name] for pair in pairs])
            result[flag] |= {f"{words}_median": round(float(np.median(sizes)), 2),
                             f"{words}_largest": round(float(sizes.max()), 2)}  # fmt: skip
    return result


def _only_difference(first: MeasuredRun, second: MeasuredRun) -> str | None:
    changed = [name for name, value in first.run.knobs.items() if second.run.knobs.get(name) != value]
    return changed[0] if len(changed) == 1 else None


def search_on_grid(sweep: Sweep, max_runs: int) -> dict[str, float]:
    """The search on the measured grid: launches are its runs, the simulation starts from the microbenchmark and learns
    from the first launches. Percent of goals (throughput under limits of p99 ITL) met within 5 %, mean launches."""
    grid = {tuple(run.row["knobs"].items()): run for run in sweep.grid}
    points = [dict(key) for key in grid]
    limits = [float(np.percentile([run.row["itl_p99_s"] for run in grid.values()], part)) for part in _LIMITS_PERCENT]
    simulations = _Simulations(sweep, grid)
    met, used = [], []
    for default in (points[0], points[-1]):
        for limit_s in limits:
            best = max(run.row["output_tokens_per_s"] for run in grid.values() if run.row["itl_p99_s"] <= limit_s)
            launched: list[MeasuredRun] = []

            def launch(point: Point, launched: list[MeasuredRun] = launched) -> Outcome:
                run = grid[tuple(point.items())]
                launched.append(run)
                return Outcome(run.row["output_tokens_per_s"], run.row["itl_p99_s"])

            found = guided_search(
                points, simulations.after(()), launch, default=default, latency_limit_s=limit_s, max_runs=max_runs,
                repeats=False, resimulate=lambda launched=launched: simulations.after(launched),  # type: ignore[misc]
            )  # fmt: skip
            value = found.best.measured.value if found.best and found.best.measured else 0.0
            met.append(value >= 0.95 * best)
            used.append(len(found.launches))
    return {
        "goals": float(len(met)), "percent_within": round(100 * float(np.mean(met)), 1),
        "mean_launches": round(float(np.mean(used)), 2), "most_launches": float(max(used)),
    }  # fmt: skip


class _Simulations:
    """The grid foretold with constants of the microbenchmark and of runs, each set of runs once."""

    def __init__(self, sweep: Sweep, grid: Mapping[tuple, MeasuredRun]) -> None:
        self._sweep, self._grid = sweep, grid
        self._known: dict[tuple[str, ...], dict[tuple, Outcome]] = {}

    def after(self, launched: Sequence[MeasuredRun]) -> Simulate:
        """Point → what is expected once `launched` have been run."""
        key = tuple(sorted(run.record.run_id for run in launched))
        if key not in self._known:
            constants, memory = self._sweep.constants, None
            if launched:
                constants = calibrate(constants, [run.record for run in launched])
                memory = launched[-1].memory
            self._known[key] = {
                point: Outcome(found["output_tokens_per_s"], found["itl_p99_s"])
                for point, run in self._grid.items()
                for found in [foretell(run, constants, memory)]
            }
        outcomes = self._known[key]
        return lambda point: outcomes[tuple(point.items())]
