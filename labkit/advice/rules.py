"""The changes that may help, each with its reason and its risk; whether they do is decided by planning them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from labkit.advice.limit import BindingLimit
from labkit.format import count, share
from labkit.measure.run_record import RunRecord
from labkit.measure.summary import summarize
from labkit.memory.records import MemoryPlan
from labkit.specs.engine_config import HIGHEST_UTILIZATION

# Smaller chunks cost more steps than their memory is worth.
SMALLEST_TOKEN_BUDGET = 512
# Proposed lengths are whole multiples of this.
LENGTH_STEP = 256
# Prompts stall running answers where the slowest gap between tokens is so many times the usual one.
STALL_FACTOR = 3.0


@dataclass(frozen=True)
class Proposal:
    """One change to plan.

    Attributes:
        rule: stable name of the rule, for tests and links.
        title: the change as an order: "Store the KV cache in fp8".
        changes: knob → new value; Apply sets exactly these.
        reason: why it may help, one sentence.
        risk: what it may cost.
    """

    rule: str
    title: str
    changes: Mapping[str, Any]
    reason: str
    risk: str


Rule = Callable[[MemoryPlan, RunRecord | None, BindingLimit], Iterator[Proposal]]


def _lacks_memory(plan: MemoryPlan, limit: BindingLimit) -> bool:
    return plan.verdict != "fits" or limit.name in ("kv_blocks", "weights")


def _fp8_kv(plan: MemoryPlan, record: RunRecord | None, limit: BindingLimit) -> Iterator[Proposal]:
    if plan.config.kv_cache_dtype not in ("auto", "float16", "bfloat16"):
        return
    cost = (
        "On a CPU this saves memory, not time: values are converted at each read."
        if plan.gpu.is_cpu
        else "Attention reads half the bytes; backends without fp8 support refuse the flag or convert at each read."
    )
    yield Proposal(
        "fp8-kv",
        "Store the KV cache in fp8",
        {"kv_cache_dtype": "fp8"},
        f"One block takes fewer bytes, so the same memory holds more tokens. {cost}",
        "Rounding of K and V changes outputs a little; check quality on your own prompts.",
    )


def _utilization(plan: MemoryPlan, record: RunRecord | None, limit: BindingLimit) -> Iterator[Proposal]:
    current = plan.config.gpu_memory_utilization
    if plan.gpu.is_cpu or current >= HIGHEST_UTILIZATION or plan.config.kv_cache_memory_bytes is not None:
        return
    yield Proposal(
        "utilization",
        f"Raise gpu_memory_utilization to {HIGHEST_UTILIZATION}",
        {"gpu_memory_utilization": HIGHEST_UTILIZATION},
        f"All of the added {share(HIGHEST_UTILIZATION - current, 1)} of the card becomes KV cache.",
        "Less room for other processes and for what the engine does not count; start-up fails if it is not free.",
    )


def _cpu_memory(plan: MemoryPlan, record: RunRecord | None, limit: BindingLimit) -> Iterator[Proposal]:
    if not plan.gpu.is_cpu:
        return
    parts = plan.breakdown
    others = parts.used_bytes - parts.kv_cache_bytes
    needed = (others + parts.kv_cache_bytes - min(plan.margin_bytes, 0)) / plan.config.gpu_memory_utilization
    # Twice as much, or what one request needs where that is more.
    doubled = max(plan.config.cpu_memory_gib * 2, math.ceil(needed / 2**30))
    yield Proposal(
        "cpu-memory",
        f"Raise cpu_memory_gib to {doubled:g}",
        {"cpu_memory_gib": doubled},
        "On a machine without a GPU this budget stands in for the card's memory.",
        "The memory must be free on the host.",
    )


def _model_length(plan: MemoryPlan, record: RunRecord | None, limit: BindingLimit) -> Iterator[Proposal]:
    length = plan.config.max_model_len or 0
    if plan.verdict == "does not fit":
        target, reason = plan.max_model_len_that_fits, "It is the largest length of which one request fits."
    elif plan.verdict == "may not fit":
        target, reason = sure_length(plan), "One request of it fits even where the plan is off by all that it may be."
    elif record is not None and record.requests:
        longest = max(row.input_tokens + row.output_tokens for row in record.requests)
        target = 1 << max(longest - 1, 1).bit_length()
        reason = f"The longest request of the run had {count(longest)} tokens."
    else:
        return
    if 0 < target < length:
        yield Proposal(
            "model-length",
            f"Lower max_model_len to {count(target)}",
            {"max_model_len": target},
            reason,
            f"Requests of more than {count(target)} tokens are refused.",
        )


def _shorter(plan: MemoryPlan, record: RunRecord | None, limit: BindingLimit) -> Iterator[Proposal]:
    target = sure_length(plan)
    if plan.verdict == "does not fit" and 0 < target < plan.max_model_len_that_fits:
        yield Proposal(
            "sure-length",
            f"Lower max_model_len to {count(target)}",
            {"max_model_len": target},
            "One request of it fits even where the plan is off by all that it may be.",
            f"Requests of more than {count(target)} tokens are refused.",
        )


def sure_length(plan: MemoryPlan) -> int:
    """The length of which one request takes what is left less the plan's doubt, rounded down."""
    needed = plan.breakdown.kv_cache_bytes - plan.margin_bytes
    sure = plan.breakdown.kv_cache_bytes - plan.breakdown.uncertainty_bytes.get("kv_cache", 0)
    length = (plan.config.max_model_len or 0) * max(0, sure) // max(1, needed)
    return length // LENGTH_STEP * LENGTH_STEP


def _num_seqs(plan: MemoryPlan, record: RunRecord | None, limit: BindingLimit) -> Iterator[Proposal]:
    seqs = plan.config.max_num_seqs or 0
    budget = plan.config.max_num_batched_tokens or seqs
    if limit.name == "max_num_seqs" and seqs * 2 <= budget:
        yield Proposal(
            "more-seqs",
            f"Raise max_num_seqs to {count(seqs * 2)}",
            {"max_num_seqs": seqs * 2},
            "All places were taken while KV blocks were free.",
            "Each step carries more requests, so each waits longer for its next token.",
        )
    elif _lacks_memory(plan, limit) and seqs > 64:
        target = max(64, seqs // 4)
        yield Proposal(
            "fewer-seqs",
            f"Lower max_num_seqs to {count(target)}",
            {"max_num_seqs": target},
            "Logits and sampler memory grow with it (about 16 bytes × max_num_seqs × vocabulary in vLLM).",
            f"No more than {count(target)} requests run at once.",
        )


def _token_budget(plan: MemoryPlan, record: RunRecord | None, limit: BindingLimit) -> Iterator[Proposal]:
    budget = plan.config.max_num_batched_tokens or 0
    if limit.name == "max_num_batched_tokens":
        yield Proposal(
            "larger-token-budget",
            f"Raise max_num_batched_tokens to {count(budget * 2)}",
            {"max_num_batched_tokens": budget * 2},
            "Steps were full while requests waited.",
            "Longer steps: the gap between tokens grows while a prompt is computed; the activation peak grows.",
        )
    target = budget // 2
    if _lacks_memory(plan, limit) and target >= max(SMALLEST_TOKEN_BUDGET, plan.config.max_num_seqs or 0):
        yield Proposal(
            "smaller-token-budget",
            f"Lower max_num_batched_tokens to {count(target)}",
            {"max_num_batched_tokens": target},
            "The activation peak, and the reserve of sliding-window layers, grow with it.",
            "Prompts are computed in more steps, so the time to first token grows.",
        )


def _eager(plan: MemoryPlan, record: RunRecord | None, limit: BindingLimit) -> Iterator[Proposal]:
    if plan.config.enforce_eager or plan.gpu.is_cpu or plan.breakdown.cuda_graphs_bytes <= 0:
        return
    # A little room is no reason to give up graphs where nothing waits for it.
    if not _lacks_memory(plan, limit):
        return
    yield Proposal(
        "eager",
        "Set enforce_eager",
        {"enforce_eager": True},
        "CUDA graphs keep memory of their own.",
        "Steps that take the card less time than their launches take the host become slower, several times for small "
        "models; the last resort.",
    )


def _block_size(plan: MemoryPlan, record: RunRecord | None, limit: BindingLimit) -> Iterator[Proposal]:
    waste = summarize(record).tail_waste_share if record is not None else None
    size = plan.config.block_size
    if waste is None or waste < 0.1 or size <= 16:
        return
    yield Proposal(
        "block-size",
        "Lower block_size to 16",
        {"block_size": 16},
        f"At the fullest step {share(waste, 1)} of the reserved places held no token.",
        "Longer block tables; some attention backends ask for larger blocks.",
    )


def _blocks_override(plan: MemoryPlan, record: RunRecord | None, limit: BindingLimit) -> Iterator[Proposal]:
    if plan.config.num_gpu_blocks_override is not None:
        yield Proposal(
            "no-override",
            "Remove num_gpu_blocks_override",
            {"num_gpu_blocks_override": None},
            f"The pool is held at {count(plan.num_gpu_blocks)} blocks instead of what memory allows.",
            "The pool then follows the card, so it differs from one machine to the next.",
        )


def _graphs(plan: MemoryPlan, record: RunRecord | None, limit: BindingLimit) -> Iterator[Proposal]:
    if plan.config.enforce_eager and not plan.gpu.is_cpu:
        yield Proposal(
            "graphs",
            "Unset enforce_eager",
            {"enforce_eager": False},
            "A captured graph launches a step's kernels at once; eager mode launches them one by one.",
            "CUDA graphs take memory of their own, and start-up takes longer.",
        )


def _prefix_caching(plan: MemoryPlan, record: RunRecord | None, limit: BindingLimit) -> Iterator[Proposal]:
    if record is not None and not plan.config.enable_prefix_caching:
        yield Proposal(
            "prefix-caching",
            "Set enable_prefix_caching",
            {"enable_prefix_caching": True},
            "Prompts that begin alike are computed once, and their blocks are shared.",
            "Full blocks are hashed, a little host time for each; no gain where prompts share nothing.",
        )


def _fp8_weights(plan: MemoryPlan, record: RunRecord | None, limit: BindingLimit) -> Iterator[Proposal]:
    is_wide = plan.config.quantization is None and plan.model.weight_format.kind == "16bit"
    if plan.gpu.fp8_flops and is_wide:
        yield Proposal(
            "fp8-weights",
            "Store the weights in fp8",
            {"quantization": "fp8"},
            "Weights take half the memory and half the reads, and this card multiplies fp8 at twice the rate.",
            "Rounding of the weights changes outputs a little; check quality on your own prompts.",
        )


def _awq_weights(plan: MemoryPlan, record: RunRecord | None, limit: BindingLimit) -> Iterator[Proposal]:
    is_wide = plan.config.quantization is None and plan.model.weight_format.kind == "16bit"
    if plan.verdict != "fits" and limit.name == "weights" and is_wide and not plan.gpu.is_cpu:
        yield Proposal(
            "awq-weights",
            "Take a copy of the model with 4-bit weights (AWQ)",
            {"quantization": "awq"},
            "Weights take about a quarter of the memory.",
            "Outputs change; check quality on your own prompts.",
        )


def _shorter_steps(plan: MemoryPlan, record: RunRecord | None, limit: BindingLimit) -> Iterator[Proposal]:
    gaps = summarize(record).inter_token_s if record is not None else None
    target = (plan.config.max_num_batched_tokens or 0) // 2
    if gaps is None or gaps.p99 < STALL_FACTOR * gaps.p50 or limit.name in ("kv_blocks", "weights"):
        return
    if plan.config.enable_chunked_prefill and target >= max(SMALLEST_TOKEN_BUDGET, plan.config.max_num_seqs or 0):
        yield Proposal(
            "shorter-steps",
            f"Lower max_num_batched_tokens to {count(target)}",
            {"max_num_batched_tokens": target},
            "The slowest times between tokens are of steps that carry a piece of a prompt; smaller pieces are shorter.",
            "Prompts are computed in more steps, so the time to first token grows.",
        )


def _more_gpus(plan: MemoryPlan, record: RunRecord | None, limit: BindingLimit) -> Iterator[Proposal]:
    if plan.gpu.is_cpu or plan.verdict == "fits":
        return
    doubled = plan.config.tensor_parallel_size * 2
    yield Proposal(
        "tensor-parallel",
        f"Use {doubled} GPUs (tensor_parallel_size {doubled})",
        {"tensor_parallel_size": doubled},
        "Weights and, up to the number of KV heads, the KV cache are divided over the cards.",
        f"Needs {doubled} cards of the same kind and pays communication in each layer.",
    )


RULES: tuple[Rule, ...] = (
    _fp8_kv,
    _utilization,
    _cpu_memory,
    _model_length,
    _shorter,
    _num_seqs,
    _token_budget,
    _eager,
    _graphs,
    _prefix_caching,
    _fp8_weights,
    _awq_weights,
    _shorter_steps,
    _block_size,
    _blocks_override,
    _more_gpus,
)
