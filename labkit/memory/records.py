"""`MemoryBreakdown` and `MemoryPlan`: what the planner predicts and a run measures, in the same parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from labkit.specs.engine_config import EngineConfig
from labkit.specs.gpu_spec import GpuSpec
from labkit.specs.model_spec import ModelSpec
from labkit.text import brief

PARTS = (
    "weights",
    "kv_cache",
    "block_tables",
    "activation",
    "cuda_graphs",
    "workspace",
    "outside",
    "free",
)
PART_TITLES: Mapping[str, str] = {
    "weights": "weights",
    "kv_cache": "KV cache",
    "block_tables": "block tables",
    "activation": "activation peak",
    "cuda_graphs": "CUDA graphs",
    "workspace": "workspace (non-torch)",
    "outside": "outside the budget",
    "free": "free",
}


@dataclass(frozen=True)
class MemoryBreakdown:
    """The card's memory in named parts; their sum is always exactly the card's total.

    Attributes:
        kind: "predicted", "measured" or "simulated".
        total_bytes: the card's total as CUDA reports it (on a CPU: the budget in `cpu_memory_gib`).
        weights_bytes … outside_bytes: one number for each of `PARTS` but "free". `workspace` is non-torch memory,
            `outside` what is used before the engine counts (context, other processes).
        uncertainty_bytes: part → ± bytes, for predictions.
        kv_reserved_bytes, kv_stored_bytes: of the KV part: bytes in blocks that requests hold, and bytes that hold
            a token; the difference is tail waste. None where nothing ran.
    """

    kind: Literal["predicted", "measured", "simulated"]
    total_bytes: int
    weights_bytes: int = 0
    kv_cache_bytes: int = 0
    block_tables_bytes: int = 0
    activation_bytes: int = 0
    cuda_graphs_bytes: int = 0
    workspace_bytes: int = 0
    outside_bytes: int = 0
    uncertainty_bytes: Mapping[str, int] = field(default_factory=dict)
    kv_reserved_bytes: int | None = None
    kv_stored_bytes: int | None = None

    @property
    def used_bytes(self) -> int:
        """Sum of every part but the free one."""
        return sum(getattr(self, f"{part}_bytes") for part in PARTS if part != "free")

    @property
    def free_bytes(self) -> int:
        """What is left of the total; negative by as much as the parts overrun it."""
        return self.total_bytes - self.used_bytes

    def parts(self) -> dict[str, int]:
        """Part → bytes in the order of `PARTS`; the values sum to `total_bytes`."""
        return {part: getattr(self, f"{part}_bytes") for part in PARTS}


Verdict = Literal["fits", "does not fit", "may not fit"]


@dataclass(frozen=True)
class MemoryPlan:
    """What a configuration means for memory, before anything runs.

    Attributes:
        config: the configuration with every None resolved.
        engine, engine_version: whose rules were applied: "vllm" with a version, "labkit", "sglang".
        breakdown: the predicted parts.
        block_bytes: bytes of one KV block over all layers of the binding rank.
        num_gpu_blocks: blocks in the pool, vLLM's null block included where that version has one.
        num_swap_blocks: blocks in the host pool.
        kv_cache_tokens: tokens as that engine prints "GPU KV cache size".
        max_concurrency: requests of `config.max_model_len` tokens at once, as that engine prints it.
        max_model_len_that_fits: largest length of which one request fits; 0 when none does.
        verdict: "fits", "does not fit", or "may not fit" when the margin is inside the uncertainty.
        margin_bytes: KV bytes beyond what one request of `max_model_len` needs; negative when short.
        binding_limit: the part or knob that sets the capacity, in words.
        formulas: part or quantity → its formula in words with the numbers put in.
        notes: what was assumed, one sentence each.
    """

    model: ModelSpec
    gpu: GpuSpec
    config: EngineConfig
    engine: str
    engine_version: str
    breakdown: MemoryBreakdown
    block_bytes: int
    num_gpu_blocks: int
    num_swap_blocks: int
    kv_cache_tokens: int
    max_concurrency: float
    max_model_len_that_fits: int
    verdict: Verdict
    margin_bytes: int
    binding_limit: str
    formulas: Mapping[str, str]
    notes: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        shown = ("verdict", "kv_cache_tokens", "max_concurrency", "max_model_len_that_fits", "binding_limit")
        return brief(self, "model", "gpu", "engine", "engine_version", *shown)
