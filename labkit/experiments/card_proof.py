"""How well the virtual GPU foretells labkit's own engine, on the runs of `card_sweep`, without a card.

The constants come from the file's microbenchmark and from one of its runs; every other run is foretold: its pool, its
preemptions, its steps and their times. `labkit bench simulation` puts the result beside the public runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from labkit.engine.step_constants import TPOT, StepConstants, load_constants
from labkit.experiments.calibrate import calibrate
from labkit.experiments.card_constants import constants_of
from labkit.experiments.card_sweep import SweepRun, run_metrics, unpacked_steps
from labkit.experiments.intervals import conformal, left_out_inside, percent, run_ratios, width_percent
from labkit.experiments.measured_memory import MeasuredMemory, memory_of
from labkit.experiments.microbench import Microbenchmark
from labkit.experiments.run import RunOutcome
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
# Every so many runs of the grid calibrate in turn.
_EVERY, _ENOUGH_POINTS = 2, 36
# Pairs that differ by less are not told apart; a few preemptions say little of a share.
_DIFFERENT = 1.05
# Of the grid, those that calibrate beside the base where two or three runs do: other KV, other token budget.
_FURTHER = ({"kv_cache_dtype": "fp8", "max_num_batched_tokens": 2048}, {"max_num_batched_tokens": 512})
INTERVAL_METRICS = ("tpot_mean_s", "output_tokens_per_s", "itl_p99_s")


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
        constants: of the microbenchmark alone. runs: the grid and what lies beside it. unseen: other runs,
            of a file of their own.
        calibrating: for each model its run that calibrates, all knobs as in the base.
    """

    constants: StepConstants
    runs: tuple[MeasuredRun, ...]
    unseen: tuple[MeasuredRun, ...]
    calibrating: Mapping[str, MeasuredRun]
    card: str

    @property
    def first(self) -> MeasuredRun:
        """The run that calibrates the grid's model."""
        return self.calibrating[self.runs[0].run.model]

    @property
    def few(self) -> tuple[MeasuredRun, ...]:
        """Runs that calibrate the grid's model where up to three do, the first one first."""
        found = [self.first]
        for wanted in _FURTHER:
            like = {**self.first.row["settings"], **wanted}
            found += [run for run in self.grid if dict(run.row["settings"]) == like][:1]
        return tuple(found)

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
    by_part: dict[str, list[MeasuredRun]] = {}
    for run in runs:
        by_part.setdefault(run.run.part, []).append(run)
    firsts = ("repeat", "calibrates", "second model calibrates")
    calibrating = [run for part in firsts for run in by_part.get(part, ())]
    return Sweep(
        constants=constants_of(found, gpu, load_constants(engine="labkit", level="data sheet")),
        runs=(*by_part.get("repeat", ()), *by_part.get("grid", ())),
        unseen=(*by_part.get("unseen", ()), *by_part.get("second model", ())),
        calibrating={run.run.model: run for run in reversed(calibrating)}, card=content["card"],
    )  # fmt: skip


def foretell(run: MeasuredRun, constants: StepConstants, memory: MeasuredMemory | None) -> dict[str, Any]:
    """The run's metrics by the virtual GPU, which sees its configuration and traffic alone."""
    record = simulate(
        load_model(run.run.model), run.gpu, run.run.workload(), run.run.config, engine="labkit", constants=constants,
        memory=memory, options=VirtualOptions(has_server=False),
    )  # fmt: skip
    return run_metrics(RunOutcome("finished", record.duration_s, record.requests, record.steps, None))


@dataclass(frozen=True)
class Proof:
    """What a sweep's file shows.

    Attributes:
        rows: of the results file. summary: name → value with its bar. intervals: of the levels that are reached by
            measuring on the card, as `step_constants.json` keeps them; empty without a sweep.
    """

    rows: list[dict[str, Any]]
    summary: dict[str, dict[str, Any]]
    intervals: dict[str, list[dict[str, list[float]]]]


def prove(path: Path, unseen_path: Path | None = None) -> Proof:
    """Rows, promised numbers and intervals of a sweep's file; what a missing file would show is a miss.

    Args:
        unseen_path: file of runs that no choice has seen, with a microbenchmark and calibrating runs of its own, since
            engines change from one session on a card to the next.
    """
    from labkit.experiments.card_search import search_on_grid

    if not path.is_file():
        return Proof([], _summary({}, {}), {})
    sweep = read_sweep(path)
    alone = foretold(sweep.runs, sweep.constants, None)
    parts = {
        _ONE_RUN: foretold([run for run in sweep.runs if run is not sweep.first], *_calibrated(sweep.first, sweep)),
        **_unseen(unseen_path),
    }
    flags, searched = changed_flags(sweep), search_on_grid(sweep, 5)
    covered, inside = coverage(parts)
    shipped = _shipped(sweep, unseen_path)
    every = [row for group in parts.values() for row in group]
    found = {
        "worst flag": max(max(flag["throughput_median"], flag["tpot_median"]) for flag in flags.values()),
        "order": right_order([*parts[_ONE_RUN]]), "inside": inside, "points": float(len(sweep.grid)), **searched,
        "shipped": shipped[-1]["median_error_percent"]["tpot_mean_s"] if len(shipped) > 1 else None,
    }  # fmt: skip
    rows: list[dict[str, Any]] = [
        {"check": "own engine, microbenchmark alone", "runs": len(alone), "median_error_percent": medians(alone)}
    ]
    rows += [{"check": f"own engine, {part}", **row} for part, group in parts.items() for row in group]
    rows += [{"check": "own engine, one flag changed", "flag": flag, **values} for flag, values in flags.items()]
    rows += [
        *shipped,
        *covered,
        *_after_more_runs(sweep),
        {"check": "search on the card's grid", "launches_allowed": 5, **searched},
    ]
    intervals = {"microbenchmark": [_interval_of(alone)], "calibrated": [_interval_of(every)]}
    return Proof(rows, _summary({part: medians(group) for part, group in parts.items()}, found), intervals)


def _shipped(sweep: Sweep, unseen_path: Path | None) -> list[dict[str, Any]]:
    """Errors of the constants that come with labkit, without a measurement here: of the grid, some of whose runs they
    were fitted to, then of all that was held back, where there is such a file."""
    constants, unseen = load_constants(engine="labkit"), _read_if_there(unseen_path)
    parts = {"grid": sweep.grid} | ({"runs held back, both models": unseen.unseen} if unseen else {})
    found = {part: foretold(runs, constants, None) for part, runs in parts.items()}
    return [
        {"check": "own engine, shipped constants alone", "part": part, "runs": len(group), "errors_percent": [
            {"knobs": row["knobs"], **row["error_percent"]} for row in group
        ], "median_error_percent": medians(group)}
        for part, group in found.items()
    ]  # fmt: skip


_ONE_RUN = "microbenchmark and one run"
_UNSEEN, _SECOND_MODEL = "runs held back", "runs held back of an 8B model"


def _unseen(path: Path | None) -> dict[str, list[dict[str, Any]]]:
    """Part → rows, each by the calibrating run of its model."""
    found: dict[str, list[dict[str, Any]]] = {_UNSEEN: [], _SECOND_MODEL: []}
    sweep = _read_if_there(path)
    if sweep is None:
        return found
    for part, name in (("unseen", _UNSEEN), ("second model", _SECOND_MODEL)):
        runs = [run for run in sweep.unseen if run.run.part == part]
        if runs and runs[0].run.model in sweep.calibrating:
            found[name] = foretold(runs, *_calibrated(sweep.calibrating[runs[0].run.model], sweep))
    return found


def _read_if_there(path: Path | None) -> Sweep | None:
    return read_sweep(path) if path is not None and path.is_file() else None


def _summary(
    errors_of: Mapping[str, Mapping[str, float | None]], found: Mapping[str, float | None]
) -> dict[str, dict[str, Any]]:
    # The pools that send many requests back are not in the grid.
    summary = {
        f"own engine on an H200, {part}: {words}, median error, %": at_most(errors_of.get(part, {}).get(name), *bars)
        for part in (_ONE_RUN, _UNSEEN, _SECOND_MODEL)
        for name, (words, *bars) in _BARS.items()
        if not (part == _ONE_RUN and name == "num_preemptions")
    }
    coverage_words = "own engine, 90 % interval, share of measured TPOT inside, %"
    return summary | {
        "own engine, a flag changed after calibration at another: worst flag's median error, %": at_most(
            found.get("worst flag"), 7, 4
        ),
        "own engine on an H200, shipped constants alone, runs held back of both models: TPOT, median error, %": at_most(
            found.get("shipped"), 10, 7
        ),
        "own engine, pairs of configurations more than 5 % apart in the right order, %": at_least(
            found.get("order"), 95, 98
        ),
        coverage_words: at_least(found.get("inside"), 85, 90),
        f"{coverage_words} (upper bar)": at_most(found.get("inside"), 95),
        "search on an H200's grid: goals met within 5 % in five launches, %": at_least(
            found.get("percent_within"), 95, 98
        ),
        "search on an H200's grid: launches used, mean": at_most(found.get("mean_launches"), 5, 4),
        "search on an H200's grid: configurations that were measured": at_least(found.get("points"), _ENOUGH_POINTS),
    }  # fmt: skip


def _calibrated(first: MeasuredRun, sweep: Sweep) -> tuple[StepConstants, MeasuredMemory]:
    return calibrate(sweep.constants, [first.record]), first.memory


def _after_more_runs(sweep: Sweep) -> list[dict[str, Any]]:
    """What two calibrating runs change, and three: errors and interval of the grid's other runs."""
    few, found = sweep.few, []
    for count in range(1, len(few) + 1):
        constants = calibrate(sweep.constants, [run.record for run in few[:count]])
        rows = foretold([run for run in sweep.grid if run not in few], constants, sweep.first.memory)
        found.append({
            "check": "own engine, grid after more calibrating runs", "calibrating_runs": count, "runs": len(rows),
            "median_error_percent": medians(rows),
            "half_width_percent": width_percent(conformal([ratio for _, ratio in run_ratios(rows, TPOT)])),
        })  # fmt: skip
    return found


def _interval_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Metric → low and high, as `step_constants.json` keeps them."""
    return {
        metric: [round(edge, 3) for edge in conformal([ratio for _, ratio in run_ratios(rows, metric)])]
        for metric in INTERVAL_METRICS
    }


def coverage(parts: Mapping[str, Sequence[Mapping[str, Any]]]) -> tuple[list[dict[str, Any]], float]:
    """Rows of how many measured values lie in the interval of their prediction, and that share of the time per token in
    percent. Each is judged by the interval that the other kinds of runs give: a kind is a token budget of the grid, and
    each run beside it."""
    rows, share = [], 0.0
    for metric in reversed(INTERVAL_METRICS):
        ratios, names = [], []
        for part, group in parts.items():
            for number, (budget, ratio) in enumerate(run_ratios(group, metric)):
                ratios.append((budget if part == _ONE_RUN else (part, number), ratio))
                names.append(part)
        inside = left_out_inside(ratios)
        share = percent(inside)
        by_part = {
            part: percent([one for one, name in zip(inside, names, strict=True) if name == part])
            for part, group in parts.items() if group
        }  # fmt: skip
        rows.append({
            "check": "own engine, interval after one run", "metric": metric, "percent_inside": share,
            "half_width_percent": width_percent(conformal([ratio for _, ratio in ratios])),
            "percent_inside_by_part": by_part,
        })  # fmt: skip
    return rows, share


def right_order(rows: Sequence[Mapping[str, Any]]) -> float:
    """Percent of pairs of runs whose measured throughputs differ by more than 5 % that are foretold in that order."""
    rates = [(row["measured"]["output_tokens_per_s"], row["foretold"]["output_tokens_per_s"]) for row in rows]
    right = [
        (one[0] > other[0]) == (one[1] > other[1])
        for one, other in combinations(rates, 2)
        if max(one[0], other[0]) > _DIFFERENT * min(one[0], other[0])
    ]
    return percent(right)


def fit_shipped(sweep: Sweep) -> StepConstants:
    """Constants of labkit's engine for cards that were not measured: the shares of this one, products by the smooth
    roofline, fitted to a few runs of its grid.

    What large products reach of the bandwidth stays as it was measured. Those of a small model are late by their
    starts, once a layer: taken as a share, that makes the steps of a large model a fourth too slow.
    """
    bare = sweep.constants.replace(products=())
    return calibrate(bare, [run.record for run in sweep.grid[::9]], {"bandwidth_efficiency": 0.0, "layer_s": 1.0})


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
