"""`labkit bench planner`: how right the planner is on everything known, written to `results/planner.json`."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from labkit.memory.budget import Constants, non_torch_with
from labkit.memory.fit import cross_validate, predicted_activation, predicted_graphs, runner_of
from labkit.memory.machine import answers_json, question_for
from labkit.memory.planner import plan
from labkit.memory.public_cases import (
    PRINT_ROUNDING_GIB,
    Check,
    all_checks,
    case_file,
    golden_checks,
    unfitted_activations,
    verdict_file,
    verdict_plan,
)
from labkit.memory.records import MemoryPlan
from labkit.memory.rules import vllm_rules
from labkit.memory.run_files import GIB, Run, load_runs
from labkit.memory.stages import Overrides
from labkit.memory.tensors import count_parameters
from labkit.results import at_most, write_results
from labkit.specs.model_catalogue import catalogue_model, model_names

Errors = dict[str, list[float]]


def bench_planner(path: str | os.PathLike[str] = "results/planner.json") -> dict[str, Any]:
    """Measure everything that the planner promises, write it to `path` and return it."""
    runs = load_runs()
    h100 = [run for run in runs if run.version == "0.19.0"]
    h200 = [run for run in runs if run.version != "0.19.0"]
    result = {
        "golden_table": _checks(golden_checks()),
        "public_reports": _checks(all_checks()) | {"listed": case_file()["listed"]},
        "verdicts": _verdicts(),
        "h100_vllm_0_19": _summary([(run, _planned(run)) for run in h100]),
        "h200_vllm_0_25": _summary([(run, _planned(run)) for run in h200]),
        "leaving_out_whole_models": _validated(runs, lambda run: run.family),
        "leaving_out_whole_settings": _validated(runs, lambda run: f"{run.version} {run.setting}"),
        "activations_of_families_not_in_the_fit": _unfitted(),
        "parameters": _parameters(),
        "speed": _speed(),
    }
    details: dict[str, Any] = {name: _without_runs(part) for name, part in result.items()}
    return write_results(
        path,
        command="labkit bench planner",
        rows=[*result["h100_vllm_0_19"]["runs"], *result["h200_vllm_0_25"]["runs"]],
        summary=_asked(result),
        what="accuracy of labkit's memory planner; errors are planner less real, in percent or GiB",
        sources="labkit/memory/runs: start-up runs, public reports, vLLM 0.33's own planner",
        **details,
    )


def _without_runs(part: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in part.items() if name != "runs"}


def _planned(run: Run, overrides: Overrides | None = None) -> MemoryPlan:
    overrides = overrides or run.overrides
    return plan(run.model, run.gpu, run.config, engine="vllm", engine_version=run.version, overrides=overrides)


def _errors(run: Run, found: MemoryPlan) -> dict[str, float]:
    """Planner less real. Parts are those of rank 0, which prints the log; the pool is rank 0's, tokens are all's."""
    rank = found.details["ranks"][0]
    errors = {
        "pool_percent": 100 * (rank["available_kv_bytes"] / GIB / run.pool_gib - 1),
        "tokens_percent": 100 * (found.kv_cache_tokens / run.tokens - 1),
        "concurrency_percent": 100 * (found.max_concurrency / run.concurrency - 1),
        "weights_percent": 100 * (rank["weights_bytes"] / GIB / run.weights_gib - 1),
        "activation_percent": 100 * (rank["activation_bytes"] / GIB / run.activation_gib - 1),
        "activation_gib": rank["activation_bytes"] / GIB - run.activation_gib,
        "non_torch_gib": rank["non_torch_bytes"] / GIB - run.non_torch_gib,
    }
    if run.graphs_gib is not None:
        errors["graphs_gib"] = rank["cuda_graphs_bytes"] / GIB - run.graphs_gib
    return errors


def _summary(pairs: Iterable[tuple[Run, MemoryPlan]]) -> dict[str, Any]:
    rows, errors = [], {}  # type: list[dict[str, Any]], Errors
    for run, found in pairs:
        own = _errors(run, found)
        rows.append(
            {
                "model": run.model_name, "setting": run.setting, "max_model_len": run.config.max_model_len,
                "verdict": found.verdict, "inside_uncertainty": _is_inside(run, found),
                **{name: round(value, 3) for name, value in own.items()},
            }
        )  # fmt: skip
        for name, value in own.items():
            errors.setdefault(name, []).append(value)
    covered = sum(row["inside_uncertainty"] for row in rows)
    return {"num_runs": len(rows), "pools_inside_uncertainty": covered, **_statistics(errors), "runs": rows}


def _is_inside(run: Run, found: MemoryPlan) -> bool:
    """The real pool lies within the plan's uncertainty and print rounding."""
    rank = found.details["ranks"][0]
    error = abs(rank["available_kv_bytes"] / GIB - run.pool_gib)
    return error <= rank["uncertainty_bytes"]["kv_cache"] / GIB + PRINT_ROUNDING_GIB


def _statistics(errors: Errors) -> dict[str, Any]:
    found = {}
    for name, values in errors.items():
        largest: float = max(values, key=lambda value: abs(value))
        mean = statistics.fmean(abs(value) for value in values)
        found[name] = {"mean_absolute": round(mean, 3), "largest": round(largest, 3)}
    return found


def _validated(runs: Sequence[Run], group: Callable[[Run], str]) -> dict[str, Any]:
    """The same errors with the constants fitted without the run's group; pipeline stages share one override, so no."""
    single = [run for run in runs if run.config.pipeline_parallel_size == 1]
    found: dict[str, Any] = {}
    for name, wanted in (("h100_vllm_0_19", "0.19.0"), ("h200_vllm_0_25", "0.25.1")):
        held = [(run, constants) for run, constants in cross_validate(single, group) if run.version == wanted]
        summary = _summary((run, _planned(run, _held_out(run, constants))) for run, constants in held)
        found[name] = {key: value for key, value in summary.items() if key != "runs"}
    return found


def _held_out(run: Run, constants: Constants) -> Overrides:
    """Overrides that put the left-out constants' parts into the plan."""
    graphs = predicted_graphs(run, constants)
    rules = vllm_rules(run.version)
    inside = rules.graphs_in_budget == "all" or (rules.graphs_in_budget == "runner1" and runner_of(run) == 1)
    return Overrides(
        free_bytes=run.overrides.free_bytes,
        activation_bytes=round(predicted_activation(run, constants) * GIB),
        non_torch_bytes=non_torch_with(constants, run.config, True),
        cuda_graphs_bytes=round(graphs * GIB) if inside or run.graphs_gib is not None else 0,
    )


def _checks(checks: Sequence[Check]) -> dict[str, Any]:
    exact = [check for check in checks if check.is_exact]
    return {
        "numbers": len(checks),
        "exact_or_inside_print_rounding": len(exact),
        "wrong": [f"{check.case} {check.quantity}" for check in checks if not check.is_exact],
    }


def _verdicts() -> dict[str, Any]:
    rows = [(case, verdict_plan(case).verdict) for case in verdict_file()]
    rows += [
        ({"id": f"{run.version} {run.model_name} {run.setting}", "fits": True}, _planned(run).verdict)
        for run in load_runs()
    ]
    false_fits = [case["id"] for case, verdict in rows if verdict == "fits" and not case["fits"]]
    false_refusals = [case["id"] for case, verdict in rows if verdict == "does not fit" and case["fits"]]
    unsure = [case["id"] for case, verdict in rows if verdict == "may not fit"]
    return {
        "cases": len(rows),
        "right": len(rows) - len(false_fits) - len(false_refusals) - len(unsure),
        "may_not_fit": unsure,
        "false_fits": false_fits,
        "false_refusals": false_refusals,
    }


def _unfitted() -> dict[str, Any]:
    rows = unfitted_activations()
    percent = {name: round(100 * (planned / real - 1), 2) for name, (planned, real) in rows.items()}
    mean = statistics.fmean(abs(value) for value in percent.values())
    return {"mean_absolute_percent": round(mean, 2), "percent": percent}


def _parameters() -> dict[str, Any]:
    models = [catalogue_model(name) for name in model_names()]
    wrong = [model.name for model in models if count_parameters(model) != model.num_parameters]
    return {"models": len(models), "exact": len(models) - len(wrong), "wrong": wrong}


def _speed() -> dict[str, float]:
    """CPU milliseconds, medians: one plan, all inverse questions, and the import in a fresh process."""
    question = question_for("Qwen/Qwen3-235B-A22B", "H200", {"max_model_len": 32768}, num_gpus=4)
    code = "import time; t = time.process_time(); import labkit.memory; print(time.process_time() - t)"
    imports = [
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
        for _ in range(3)
    ]
    return {
        "plan_ms": _median_ms(question.plan, 21),
        "all_questions_ms": _median_ms(lambda: answers_json(question), 5),
        "import_ms": round(1000 * statistics.median(imports), 2),
    }


def _median_ms(call: Callable[[], Any], repeats: int) -> float:
    call()
    times = []
    for _ in range(repeats):
        start = time.process_time()
        call()
        times.append(1000 * (time.process_time() - start))
    return round(statistics.median(times), 3)


def _asked(result: dict[str, Any]) -> dict[str, Any]:
    """Each number that was promised, beside what was measured."""
    h100, h200, speed = result["h100_vllm_0_19"], result["h200_vllm_0_25"], result["speed"]
    outside = sum(part["num_runs"] - part["pools_inside_uncertainty"] for part in (h100, h200))
    return {
        "golden table, wrong numbers": at_most(len(result["golden_table"]["wrong"]), 0),
        "public reports, wrong numbers": at_most(len(result["public_reports"]["wrong"]), 0),
        "false fits": at_most(len(result["verdicts"]["false_fits"]), 0),
        "false refusals": at_most(len(result["verdicts"]["false_refusals"]), 0),
        "parameter counts of the catalogue, wrong": at_most(len(result["parameters"]["wrong"]), 0),
        "H100 pool, mean absolute [%]": at_most(h100["pool_percent"]["mean_absolute"], 1),
        "H100 tokens, mean absolute [%]": at_most(h100["tokens_percent"]["mean_absolute"], 2),
        "H100 weights, mean absolute [%]": at_most(h100["weights_percent"]["mean_absolute"], 1),
        "H100 activation, mean absolute [%]": at_most(h100["activation_percent"]["mean_absolute"], 10),
        "H200 pool, mean absolute [%]": at_most(h200["pool_percent"]["mean_absolute"], 1),
        "H200 tokens, mean absolute [%]": at_most(h200["tokens_percent"]["mean_absolute"], 2),
        "H200 activation, largest [GiB]": at_most(abs(h200["activation_gib"]["largest"]), 0.3),
        "H200 graphs, largest [GiB]": at_most(abs(h200["graphs_gib"]["largest"]), 0.3),
        "real pools outside the stated uncertainty": at_most(outside, 2),
        "one plan [CPU ms]": at_most(speed["plan_ms"], 5),
        "all inverse questions [CPU ms]": at_most(speed["all_questions_ms"], 50),
        "import [CPU ms]": at_most(speed["import_ms"], 300),
    }
