"""Accuracy of the step-time model on runs that its constants never saw: whole models and whole cards left out.

`labkit bench simulation` writes `results/simulation.json`; with `fit=True` it also renews the shipped constants.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from labkit.engine.step_constants import CONSTANT_NAMES, LEVELS, TPOT, StepConstants, constants_table, load_constants
from labkit.experiments.card_proof import fit_shipped, prove, read_sweep
from labkit.experiments.fit_constants import fit_constants
from labkit.experiments.intervals import (
    Interval,
    Ratio,
    after_few_runs,
    conformal,
    left_out_inside,
    percent,
    width_percent,
)
from labkit.experiments.public_runs import PublicRun, predict, public_runs
from labkit.experiments.search_bench import shares_within
from labkit.experiments.virtual_run import VirtualOptions, simulate
from labkit.files import write_atomic
from labkit.measure.summary import summarize
from labkit.results import at_least, at_most, write_results
from labkit.specs import load_gpu, load_model, load_workload, synthetic_workload
from labkit.specs.engine_config import EngineConfig

# Log-normal widths of the prior around the data-sheet level: wide where nothing was known beforehand.
SIGMAS = {
    "bandwidth_efficiency": 0.1, "flops_efficiency": 0.2, "flops_efficiency_8bit": 0.2, "flops_efficiency_4bit": 0.3,
    "expert_efficiency": 0.3, "kv_efficiency": 0.3, "kv_efficiency_8bit": 0.3, "attention_efficiency": 0.4,
    "all_reduce_s": 0.5, "link_efficiency": 0.3, "step_s": 0.7, "layer_s": 0.7, "moe_layer_s": 1.0, "request_s": 0.7,
}  # fmt: skip
# Runs of one deployment err together, so that each counts for far less than an independent value of 10 % noise.
NOISE = 0.5
DENSE_CARD = "TPOT of dense models on a card left out, median error, %"
DENSE_MODEL = "TPOT of a dense model left out, median error, %"
MOE_MODEL = "TPOT of a mixture of experts left out, median error, %"
ORDER = "pairs of configurations more than 5 % apart in the right order, %"
SPEED = "1,000 requests of the Azure trace, 8B model on an H100, CPU seconds"
SEARCH = "public grids whose best is met within 5 % in five launches, %"
COVERAGE_LOW = "90 % interval, share of measured values inside, %"
COVERAGE_HIGH = "90 % interval, share of measured values inside, % (upper bar)"
AFTER_RUNS = "90 % interval after one to three calibrating runs, share of measured values inside, %"
_NORMAL_90 = 1.645
KeyOf = Callable[[PublicRun], Any]
Runs = tuple[PublicRun, ...]


def measured_s(runs: Runs) -> np.ndarray:
    """Measured seconds of each run, [runs]."""
    return np.array([run.seconds for run in runs])


def fit_engine(runs: Runs) -> StepConstants:
    """Constants of one engine generation from its runs, starting at the data-sheet level."""
    start = load_constants(level="data sheet")
    return fit_constants(start, lambda found: predict(runs, found), measured_s(runs), SIGMAS, noise=NOISE)


def fits_without(runs: Runs, key: KeyOf) -> dict[Any, StepConstants]:
    """Key → constants fitted to the runs that do not have it."""
    return {
        one: fit_engine(tuple(run for run in runs if key(run) != one)) for one in sorted({key(run) for run in runs})
    }


def left_out(runs: Runs, key: KeyOf, fits: Mapping[Any, StepConstants]) -> np.ndarray:
    """log(predicted/measured) of each run by constants fitted without the runs that share its key, [runs]."""
    errors = np.empty(len(runs))
    keys = [key(run) for run in runs]
    for one, constants in fits.items():
        mask = np.array([entry == one for entry in keys])
        own = tuple(run for run, out in zip(runs, mask, strict=True) if out)
        errors[mask] = np.log(predict(own, constants) / measured_s(own))
    return errors


def bench_simulation(
    path: str | os.PathLike[str],
    *,
    fit: bool = False,
    sweep: Path = Path("results/h200-sweep.json"),
    unseen: Path = Path("results/h200-unseen.json"),
) -> dict[str, Any]:
    """Cross-validate and write the results file; returns its content.

    Args:
        sweep: runs of labkit's own engine on a card, of `labkit.experiments.card_sweep`; what they prove is a miss
            where there is no such file. unseen: of other runs, see `card_proof.prove`.
        fit: also write `step_constants.json` anew, for whoever changes the formula or the runs.

    Raises:
        FileFormatError: the folder cannot be written.
    """
    public, proof = prove_on_public_runs(), prove(sweep, unseen)
    if fit:
        _write_constants(
            public.intervals, {"labkit": proof.intervals, "vllm": {"calibrated": public.after_runs}}, sweep
        )
        # The shipped constants and the search lean on what was just written.
        proof = prove(sweep, unseen)
    rows = [*public.rows]
    for level, errors in (("data sheet alone", _errors("data sheet")), ("in sample", _errors("shipped"))):
        rows += _rows(level, errors, _model_of)
    return write_results(
        path, command="labkit bench simulation", rows=[*rows, *_kept_back(), *proof.rows],
        summary=public.summary | {SPEED: at_most(azure_run_s(), 1.0)} | proof.summary, intervals=public.intervals,
    )  # fmt: skip


@dataclass(frozen=True)
class PublicProof:
    """What the public runs show.

    Attributes:
        rows, summary: of the results file. intervals: of the shipped level, dense models and mixtures of experts.
        after_runs: for one calibrating run and more, metric → interval.
    """

    rows: list[dict[str, Any]]
    summary: dict[str, dict[str, Any]]
    intervals: dict[str, list[float]]
    after_runs: list[dict[str, list[float]]]


def prove_on_public_runs() -> PublicProof:
    """Cross-validation, the search on public grids, and the intervals that follow."""
    by_card: list[tuple[PublicRun, float]] = []
    by_model: list[tuple[PublicRun, float]] = []
    fits: dict[str, dict[str, StepConstants]] = {}
    for engine in ("V1", "V0"):
        runs = tuple(run for run in public_runs() if run.engine == engine)
        by_card += zip(runs, left_out(runs, _card_of, fits_without(runs, _card_of)), strict=True)
        fits[engine] = fits_without(runs, _model_of)
        by_model += zip(runs, left_out(runs, _model_of, fits[engine]), strict=True)
    inside, intervals = coverage(by_model)
    served = tuple(run for run in public_runs() if run.engine == "V1")
    calibrated = after_few_runs(served, fits["V1"].__getitem__)
    after_rows, after_inside = _after_rows(calibrated)
    searched: list[dict[str, Any]] = [
        {"check": "search on public grids", "launches_allowed": most, **found}
        for most, found in shares_within(served, fits["V1"]).items()
    ]
    rows = [*_rows("card left out", by_card, _card_of), *_rows("model left out", by_model, _model_of)]
    summary = {
        DENSE_CARD: at_most(median_error(by_card, moe=False), 10, 7),
        DENSE_MODEL: at_most(median_error(by_model, moe=False), 8, 6),
        MOE_MODEL: at_most(median_error(by_model, moe=True), 20, 12),
        ORDER: at_least(right_order(by_model), 95, 98),
        SEARCH: at_least(float(searched[-1]["percent_within"]), 95, 98),
        COVERAGE_LOW: at_least(inside, 85, 90),
        COVERAGE_HIGH: at_most(inside, 95, 90),
        AFTER_RUNS: at_least(after_inside, 85, 90),
        f"{AFTER_RUNS} (upper bar)": at_most(after_inside, 95, 90),
    }
    after = [{TPOT: _edges(conformal([ratio for _, ratio in ratios]))} for ratios in calibrated.values()]
    return PublicProof([*rows, *after_rows, *searched], summary, intervals, after)


def _after_rows(calibrated: Mapping[int, Sequence[Ratio]]) -> tuple[list[dict[str, Any]], float]:
    """Errors and intervals after so many calibrating runs, and the share of all values inside, models left out."""
    rows, every = [], []
    for count, ratios in calibrated.items():
        inside, sizes = left_out_inside(ratios), np.abs(np.expm1([-ratio for _, ratio in ratios]))
        every += inside
        rows.append({
            "check": "calibrated by runs of the same deployment", "calibrating_runs": count, "runs": len(ratios),
            "median_error_percent": _percent(sizes, 50), "p90_error_percent": _percent(sizes, 90),
            "percent_inside": percent(inside),
            "half_width_percent": width_percent(conformal([ratio for _, ratio in ratios])),
        })  # fmt: skip
    return rows, percent(every)


def _edges(interval: Interval) -> list[float]:
    return [round(edge, 3) for edge in interval]


# vLLM 0.25.1 on one H200, the shape of Llama-3.1-8B with random weights: requests, measured output tokens per second.
KEPT_BACK = ((256, 9677.5), (1, 200.0))


def _kept_back() -> list[dict[str, Any]]:
    """Runs that no constant was fitted to: prompts of 512 and outputs of 256 tokens, all offered at once."""
    rows = []
    for level in LEVELS[:2]:
        for num_requests, measured in KEPT_BACK:
            traffic = synthetic_workload(num_requests, input_lengths=512, output_lengths=256, seed=1)
            record = simulate(
                load_model("meta-llama/Llama-3.1-8B-Instruct"), load_gpu("H200"), traffic,
                EngineConfig(max_model_len=4096), engine_version="0.25.1", constants=load_constants("0.25.1", level),
                options=VirtualOptions(arrival_scale=0, has_server=False),
            )  # fmt: skip
            predicted = summarize(record).output_tokens_per_s or 0.0
            rows.append({
                "check": f"kept back, {level}", "group": f"{num_requests} requests of 512 to 256 on an H200",
                "measured_tokens_per_s": measured, "predicted_tokens_per_s": round(predicted, 1),
                "error_percent": round(100 * (predicted / measured - 1), 1),
            })  # fmt: skip
    return rows


def azure_run_s(repeats: int = 5) -> float:
    """CPU seconds of the fastest of some runs: other work on the machine only makes it slower."""
    model, card = load_model("meta-llama/Llama-3.1-8B-Instruct"), load_gpu("H100 SXM")
    traffic = load_workload("azure-2023-conv", limit=1000)
    times = []
    for _ in range(repeats):
        start = time.process_time()
        simulate(model, card, traffic)
        times.append(time.process_time() - start)
    return round(min(times), 3)


def median_error(errors: Sequence[tuple[PublicRun, float]], *, moe: bool) -> float:
    """Median absolute error of dense or MoE runs, in percent."""
    return _percent(np.abs(np.expm1([error for run, error in errors if run.is_moe == moe])), 50)


def right_order(errors: Sequence[tuple[PublicRun, float]]) -> float:
    """Percent of pairs whose output rate per card is predicted in the measured order: pairs of one model, card and
    traffic that differ by more than 5 %."""
    groups: dict[tuple, list[tuple[float, float]]] = {}
    for run, error in errors:
        rate = run.concurrency / run.seconds / run.config.tensor_parallel_size
        key = (run.model_name, run.weights, run.gpu_name, run.input_tokens, run.output_tokens)
        groups.setdefault(key, []).append((np.log(rate), np.log(rate) - error))
    gaps = [
        (a[0] - b[0], a[1] - b[1])
        for group in groups.values()
        for a, b in combinations(group, 2)
        if abs(a[0] - b[0]) > np.log(1.05)
    ]
    return 100 * float(np.mean([measured * predicted > 0 for measured, predicted in gaps]))


def coverage(errors: Sequence[tuple[PublicRun, float]]) -> tuple[float, dict[str, list[float]]]:
    """Percent of left-out values inside a 90 % interval made from the other models' errors, and the intervals made
    from all: measured over predicted, low and high, for dense models and mixtures of experts."""
    inside: list[bool] = []
    intervals = {}
    for moe, name in ((False, "interval_dense"), (True, "interval_moe")):
        groups: dict[str, list[float]] = {}
        for run, error in errors:
            if run.is_moe == moe:
                groups.setdefault(run.model_name, []).append(-error)
        for model, ratios in groups.items():
            low, high = interval([group for other, group in groups.items() if other != model])
            inside += [low <= ratio <= high for ratio in ratios]
        intervals[name] = [round(float(np.exp(edge)), 3) for edge in interval(list(groups.values()))]
    return 100 * float(np.mean(inside)), intervals


def interval(groups: Sequence[Sequence[float]]) -> tuple[float, float]:
    """The range of a value of a new group at 90 %, low and high: values of one model err together, so the spread
    between models counts, and that of their mean, beside the spread within one."""
    means = np.array([np.mean(group) for group in groups])
    within = np.mean([np.var(group) for group in groups])
    between = np.var(means, ddof=1) if len(means) > 1 else 0.0
    half = _NORMAL_90 * float(np.sqrt(within + between * (1 + 1 / len(means))))
    return float(means.mean()) - half, float(means.mean()) + half


def _errors(level: Any) -> list[tuple[PublicRun, float]]:
    found: list[tuple[PublicRun, float]] = []
    for engine, version in (("V1", "0.19.0"), ("V0", "0.6.0")):
        runs = tuple(run for run in public_runs() if run.engine == engine)
        found += zip(runs, np.log(predict(runs, load_constants(version, level)) / measured_s(runs)), strict=True)
    return found


def _model_of(run: PublicRun) -> str:
    return run.model_name


def _card_of(run: PublicRun) -> str:
    return run.gpu_name


def _rows(kind: str, errors: Sequence[tuple[PublicRun, float]], key: KeyOf) -> list[dict[str, Any]]:
    rows = []
    for engine, one in sorted({(run.engine, key(run)) for run, _ in errors}):
        sizes = np.abs(np.expm1([error for run, error in errors if (run.engine, key(run)) == (engine, one)]))
        row = {"check": kind, "engine": engine, "group": one, "runs": len(sizes)}
        rows.append({**row, "median_error_percent": _percent(sizes, 50), "p90_error_percent": _percent(sizes, 90)})
    return rows


def _percent(sizes: np.ndarray, share: float) -> float:
    return round(100 * float(np.percentile(sizes, share)), 2)


def _write_constants(intervals: dict[str, list[float]], measured: Mapping[str, Any], sweep: Path) -> None:
    import labkit.engine

    path = Path(next(iter(labkit.engine.__path__))) / "step_constants.json"
    table = json.loads(path.read_text(encoding="utf-8"))
    for engine in ("V1", "V0"):
        found = fit_engine(tuple(run for run in public_runs() if run.engine == engine))
        table["shipped"][engine] = {**_rounded(found, SIGMAS), **intervals}
    if sweep.is_file():
        table["shipped"]["labkit"] = {**_rounded(fit_shipped(read_sweep(sweep)), CONSTANT_NAMES), **intervals}
        table["intervals"] = measured
    constants_table.cache_clear()
    write_atomic(path, json.dumps(table, indent=1, ensure_ascii=False) + "\n")


def _rounded(found: StepConstants, names: Iterable[str]) -> dict[str, float]:
    usual = StepConstants.__dataclass_fields__
    return {
        name: float(f"{getattr(found, name):.4g}") for name in names if not name.startswith("interval")
        and getattr(found, name) != usual[name].default
    }  # fmt: skip
