"""`labkit plan`: from names and flags to a plan, and the plan as one JSON object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from labkit.errors import OutOfRangeError
from labkit.format import gib
from labkit.memory.logs.record import LogRecord
from labkit.memory.planner import LABKIT_VERSION
from labkit.memory.questions import Question, cards_needed, flag_effects, smallest_utilization
from labkit.memory.records import MemoryPlan
from labkit.memory.rules import vllm_rules
from labkit.memory.stages import Calibration, Overrides
from labkit.specs.engine_config import EngineConfig
from labkit.specs.model_loading import load_model

GIB = 2**30


def question_for(
    model: str,
    gpu: str,
    knobs: Mapping[str, Any] | None = None,
    *,
    num_gpus: int | None = None,
    engine: str = "vllm",
    vllm: str = "0.33.0",
    total_gib: float | None = None,
    free_gib: float | None = None,
    available_kv_gib: float | None = None,
    weights_gib: float | None = None,
    calibration: Calibration | LogRecord | None = None,
) -> Question:
    """What `labkit plan` was asked, as a `Question`.

    Args:
        model: catalogue name, hub id, folder, config.json or GGUF file.
        gpu: catalogue name, "auto" or "cpu".
        knobs: fields of `EngineConfig` that were set; the rest is as that vLLM version says. max_model_len -1 or "auto"
            takes the longest that fits.
        num_gpus: cards; without parallel sizes among the knobs they become tensor parallelism.
        total_gib, free_gib, available_kv_gib, weights_gib: what the machine or a log reports, per card.

    Raises:
        OutOfRangeError: more ranks than cards, or a size below zero.
    """
    from labkit.specs import load_gpu

    settings = dict(knobs or {})
    is_auto = settings.get("max_model_len") in (-1, "auto")
    if is_auto:
        del settings["max_model_len"]
    if engine != "labkit":
        settings.setdefault("gpu_memory_utilization", vllm_rules(vllm).utilization)
    _set_parallel_sizes(settings, num_gpus)
    sizes = {
        "total_bytes": total_gib, "free_bytes": free_gib, "available_kv_bytes": available_kv_gib,
        "weights_bytes": weights_gib,
    }  # fmt: skip
    for name, value in sizes.items():
        lowest = -(2**20) if name == "available_kv_bytes" else 0  # a log may print a negative pool
        if value is not None and not lowest <= value < 2**20:
            title = name.removesuffix("_bytes")
            knob = f"--{title.replace('_', '-')}-gib"
            raise OutOfRangeError(f"{title} cannot be {gib(value)}", works="0 or more GiB", knob=knob)
    question = Question(
        load_model(model),
        load_gpu(gpu),
        EngineConfig(**settings),
        engine=engine,
        engine_version=vllm,
        calibration=calibration,
        overrides=Overrides(**{name: None if value is None else round(value * GIB) for name, value in sizes.items()}),
    )
    total = question.gpu.total_bytes if total_gib is None else total_gib * GIB
    if free_gib is not None and free_gib * GIB > total:
        raise OutOfRangeError(
            f"more cannot be free than the card has: {gib(free_gib)}", available=gib(total / GIB),
            works=gib(total / GIB), knob="--free-gib",
        )  # fmt: skip
    return _with_longest(question) if is_auto else question


def _with_longest(question: Question) -> Question:
    """What `--max-model-len auto` does: the model's length, or the longest that fits."""
    found = question.plan()
    longest = min(found.config.max_model_len or 1, max(1, found.max_model_len_that_fits))
    return replace(question, config=question.config.replace(max_model_len=longest))


def _set_parallel_sizes(settings: dict[str, Any], num_gpus: int | None) -> None:
    if num_gpus is None:
        return
    names = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    ranks = 1
    for name in names:
        ranks *= settings.get(name) or 1
    if ranks == 1 and num_gpus > 1 and not any(name in settings for name in names):
        settings["tensor_parallel_size"] = num_gpus
    elif ranks > num_gpus:
        raise OutOfRangeError(
            "the parallel sizes need more cards than there are",
            needed=f"{ranks} cards",
            available=f"{num_gpus} cards",
            works=f"sizes whose product is at most {num_gpus}",
            knob="tensor_parallel_size",
        )


def plan_json(found: MemoryPlan) -> dict[str, Any]:
    """The plan as `labkit plan --json` prints it; sizes in GiB of the binding rank, every rank where they differ."""
    ranks = found.details.get("ranks")
    rank = ranks[found.details["binding_rank"]] if ranks else None
    breakdown = found.breakdown
    budget = rank["budget_bytes"] if rank else int(breakdown.total_bytes * found.config.gpu_memory_utilization)
    pool = rank["available_kv_bytes"] if rank and not found.config.num_gpu_blocks_override else breakdown.kv_cache_bytes
    result = {
        "model": found.model.name,
        "gpu": found.gpu.name,
        "engine": found.engine,
        "engine_version": found.engine_version if found.engine != "labkit" or rank else LABKIT_VERSION,
        "total_gib": breakdown.total_bytes / GIB,
        "budget_gib": budget / GIB,
        "weights_gib": breakdown.weights_bytes / GIB,
        "activation_gib": breakdown.activation_bytes / GIB,
        "non_torch_gib": breakdown.workspace_bytes / GIB,
        "cuda_graphs_gib": breakdown.cuda_graphs_bytes / GIB,
        "kv_cache_gib": pool / GIB,
        "outside_gib": breakdown.outside_bytes / GIB,
        "block_bytes": found.block_bytes,
        "num_gpu_blocks": found.num_gpu_blocks,
        "kv_cache_tokens": found.kv_cache_tokens,
        "max_concurrency": found.max_concurrency,
        "max_model_len_that_fits": found.max_model_len_that_fits,
        "verdict": found.verdict,
        "margin_gib": found.margin_bytes / GIB,
        "binding_limit": found.binding_limit,
        "uncertainty": {f"{part}_gib": size / GIB for part, size in breakdown.uncertainty_bytes.items()},
    }
    if "needed_bytes" in found.details:
        result["needed_gib"] = found.details["needed_bytes"] / GIB
        result["available_gib"] = found.details["available_bytes"] / GIB
    if ranks and len(ranks) > 1:
        result["binding_rank"] = found.details["binding_rank"]
        result["ranks"] = [_rank_json(entry) for entry in ranks]
    config = {name: value for name, value in found.config.to_dict().items() if value is not None}
    return result | {"config": config, "formulas": dict(found.formulas), "notes": list(found.notes)}


def _rank_json(rank: Mapping[str, Any]) -> dict[str, Any]:
    sizes = ("weights", "activation", "non_torch", "cuda_graphs")
    return {
        "layers": [rank["first_layer"], rank["last_layer"]],
        **{f"{name}_gib": rank[f"{name}_bytes"] / GIB for name in sizes},
        "kv_cache_gib": rank["available_kv_bytes"] / GIB,
        "block_bytes": rank["block_bytes"],
        "num_gpu_blocks": rank["num_blocks"],
    }


def answers_json(question: Question) -> dict[str, Any]:
    """The inverse questions: smallest utilization, cards needed, and what each flag buys."""
    return {
        "smallest_gpu_memory_utilization": smallest_utilization(question),
        "gpus_needed": cards_needed(question),
        "flags": [
            {
                "knob": effect.knob,
                "from": effect.before,
                "to": effect.after,
                "kv_gib": effect.kv_bytes / GIB,
                "tokens": effect.tokens,
                "requests": effect.requests,
                "verdict": effect.verdict,
                "text": effect.text,
            }
            for effect in flag_effects(question)
        ],
    }
