"""SGLang's rule: --mem-fraction-static covers weights and KV; activations and graphs live in the rest.

Source: public start-up lines of SGLang, cases N05 and D30 of tests/memory/data/cases.yaml: K and V pools are printed
apart, "GB" means GiB, and nothing is subtracted for a profiled peak.
"""

from __future__ import annotations

from labkit.format import count, memory
from labkit.memory.capacity import judge
from labkit.memory.explain import rank_details
from labkit.memory.records import MemoryBreakdown, MemoryPlan
from labkit.memory.resolve import resolve_config
from labkit.memory.rules import vllm_rules
from labkit.memory.stages import Calibration, Overrides, plan_ranks
from labkit.specs.engine_config import EngineConfig
from labkit.specs.gpu_spec import GpuSpec
from labkit.specs.model_spec import ModelSpec

# Layout and part formulas are shared with this vLLM version: full attention in every layer, one token a slot.
NEAREST_VLLM = "0.8.0"


def plan_sglang(model: ModelSpec, gpu: GpuSpec, config: EngineConfig, overrides: Overrides) -> MemoryPlan:
    """The plan of SGLang with --mem-fraction-static = `config.gpu_memory_utilization`.

    The pool is the static fraction of what is free before loading, less the weights; it holds whole tokens.
    """
    rules = vllm_rules(NEAREST_VLLM)
    resolved = resolve_config(model, gpu, config, rules)
    rank = plan_ranks(model, gpu, resolved.replace(block_size=1), rules, overrides, Calibration())[0]
    free_before = rank.total_bytes - rank.outside_bytes
    pool = round(free_before * resolved.gpu_memory_utilization) - rank.weights_bytes
    if overrides.available_kv_bytes is not None:
        pool = overrides.available_kv_bytes
    token_bytes = rank.layout.block_bytes
    tokens = max(0, pool // token_bytes) if token_bytes else 0
    length = resolved.max_model_len or 1
    breakdown = MemoryBreakdown(
        "predicted", rank.total_bytes, rank.weights_bytes, tokens * token_bytes, 0, rank.activation_bytes,
        rank.cuda_graphs_bytes, rank.non_torch_bytes, rank.outside_bytes, uncertainty_bytes=rank.uncertainty_bytes,
    )  # fmt: skip
    margin = pool - length * token_bytes
    verdict = judge(margin, rank.uncertainty_bytes["weights"])
    return MemoryPlan(
        model=model, gpu=gpu, config=resolved, engine="sglang", engine_version="any", breakdown=breakdown,
        block_bytes=token_bytes, num_gpu_blocks=tokens, num_swap_blocks=0, kv_cache_tokens=tokens,
        max_concurrency=tokens / length, max_model_len_that_fits=tokens,
        verdict="may not fit" if verdict == "fits" and breakdown.free_bytes < 0 else verdict, margin_bytes=margin,
        binding_limit="KV tokens" if margin >= 0 else "max_model_len: one request needs more KV than there is",
        formulas={
            "kv_cache": f"{memory(free_before)} free × {resolved.gpu_memory_utilization:g} − weights "
            f"{memory(rank.weights_bytes)} = {memory(pool)}",
            "tokens": f"pool / {count(token_bytes)} B = {count(tokens)}",
            "activation": f"outside the static fraction: {memory(rank.activation_bytes)}",
        },
        notes=("mem-fraction-static is not gpu_memory_utilization: activations and graphs must fit in the rest",),
        details={"ranks": (rank_details(rank),), "binding_rank": 0},
    )  # fmt: skip
