"""The plan of labkit's own engine on a card, from its parts to requests."""

from __future__ import annotations

import math

from labkit.format import count, memory
from labkit.memory.budget import MAX_CAPTURE_SIZE
from labkit.memory.capacity import Capacity, judge, judge_stated
from labkit.memory.card_parts import CardParts, card_constants, card_parts, why_eager
from labkit.memory.explain import (
    DOUBT,
    TIGHT_POOL,
    binding_limit,
    card_notes,
    layout_texts,
    margin_doubt,
    rank_details,
)
from labkit.memory.labkit_rules import blocks_in_pool, check_shares, pool_bytes, pool_tensors
from labkit.memory.records import MemoryBreakdown, MemoryPlan, Verdict
from labkit.memory.resolve import resolve_config
from labkit.memory.rules import VersionRules
from labkit.memory.stages import Calibration, Overrides, RankPlan
from labkit.memory.step_buffers import can_fuse
from labkit.memory.weights import StageLayers
from labkit.specs.engine_config import EngineConfig
from labkit.specs.gpu_spec import GpuSpec
from labkit.specs.model_spec import ModelSpec

GIB, MIB = 2**30, 2**20
# What the measured engines leave unexplained: rests too small for torch's allocator to split off; the driver's growth
# in whole 2 MiB, times the graphs that the engine's estimate stands for; models without fused kernels; libraries.
REST_BYTES, GRAPHS_UNCERTAINTY, PLAIN_UNCERTAINTY, LIBRARY_UNCERTAINTY = 2 * MIB, 20 * MIB, 0.05, 16 * MIB


def plan_card(
    model: ModelSpec,
    gpu: GpuSpec,
    config: EngineConfig,
    rules: VersionRules,
    calibration: Calibration,
    overrides: Overrides,
) -> MemoryPlan:
    """See `labkit.memory.planner.plan`; `rules` say which defaults the open knobs take."""
    resolved = resolve_config(model, gpu, config, rules)
    check_shares(model, resolved.tensor_parallel_size)
    parts = card_parts(model, gpu, resolved)
    rank = _rank(model, gpu, resolved, parts, calibration, overrides)
    num_blocks = resolved.num_gpu_blocks_override or rank.num_blocks
    capacity = _capacity(model, resolved, rank, num_blocks)
    block_bytes = rank.layout.block_bytes
    return MemoryPlan(
        model=model, gpu=gpu, config=resolved, engine="labkit", engine_version=rules.text,
        breakdown=_breakdown(rank, num_blocks), block_bytes=block_bytes, num_gpu_blocks=num_blocks,
        num_swap_blocks=int(resolved.swap_space * GIB) // block_bytes if block_bytes else 0,
        kv_cache_tokens=capacity.tokens, max_concurrency=capacity.concurrency,
        max_model_len_that_fits=capacity.largest_length, verdict=_verdict(resolved, rank, capacity),
        margin_bytes=capacity.margin_bytes, binding_limit=binding_limit(resolved, [rank], 0, capacity),
        formulas=_formulas(model, gpu, resolved, parts, rank, capacity),
        notes=(*_doubts(resolved, rank, capacity), *_notes(model, gpu, resolved, parts, calibration)),
        details={
            "ranks": (rank_details(rank),), "binding_rank": 0, "needed_bytes": capacity.needed_bytes,
            "available_bytes": capacity.available_bytes, "tables": dict(parts.tables),
            "captures_largest": parts.captures_largest,
        },
    )  # fmt: skip


def _rank(
    model: ModelSpec,
    gpu: GpuSpec,
    config: EngineConfig,
    parts: CardParts,
    calibration: Calibration,
    overrides: Overrides,
) -> RankPlan:
    """The parts of one rank under what is known better, and the blocks that they leave room for."""
    total = _known(overrides.total_bytes, calibration.total_bytes, gpu.total_bytes)
    weights = _known(overrides.weights_bytes, round(parts.weights_bytes * calibration.weights_factor))
    activation = _known(overrides.activation_bytes, round(parts.activation_bytes * calibration.activation_factor))
    workspace = _known(overrides.non_torch_bytes, calibration.non_torch_bytes, parts.workspace_bytes)
    graphs = _known(overrides.cuda_graphs_bytes, round(parts.graphs_bytes * calibration.graphs_factor))
    charged = _known(overrides.cuda_graphs_bytes, round(parts.graphs_charged_bytes * calibration.graphs_factor))
    tables = _known(overrides.tables_bytes, parts.tables_bytes)
    budget = math.ceil(total * config.gpu_memory_utilization)
    left = budget - weights - tables - activation - workspace - charged
    available = _known(overrides.available_kv_bytes, config.kv_cache_memory_bytes, left)
    block_bytes = parts.layout.block_bytes
    blocks = blocks_in_pool(pool_bytes(max(0, available)), block_bytes, pool_tensors(model, config.kv_cache_dtype))
    return RankPlan(
        stage=StageLayers(0, model.num_layers, model.num_layers), total_bytes=total, budget_bytes=budget,
        outside_bytes=_outside_bytes(gpu, config, total, calibration, overrides), weights_bytes=weights,
        activation_bytes=activation, non_torch_bytes=workspace, cuda_graphs_bytes=graphs, graphs_inside=True,
        graphs_reserved_bytes=charged, available_kv_bytes=available, layout=parts.layout, num_blocks=blocks,
        tables_bytes=tables, uncertainty_bytes=_uncertainty(model, config, activation, graphs, overrides),
    )  # fmt: skip


def _known(*values: int | None) -> int:
    """The first value that is there."""
    return next(value for value in values if value is not None)


def _outside_bytes(
    gpu: GpuSpec, config: EngineConfig, total: int, calibration: Calibration, overrides: Overrides
) -> int:
    """In use before the engine takes anything: CUDA context, NCCL, other processes."""
    free = overrides.free_bytes if overrides.free_bytes is not None else gpu.free_bytes
    if free is not None:
        return max(0, total - free)
    constants = card_constants()
    shipped = constants.context_bytes if config.tensor_parallel_size == 1 else constants.context_tp_bytes
    return _known(calibration.outside_bytes, shipped)


def _uncertainty(
    model: ModelSpec, config: EngineConfig, activation: int, graphs: int, overrides: Overrides
) -> dict[str, int]:
    """± bytes of each part; 0 where the caller states it."""
    share = 0.0 if can_fuse(model) else PLAIN_UNCERTAINTY
    spread = {
        "weights": (overrides.weights_bytes, 0),
        "block_tables": (overrides.tables_bytes, 0),
        "activation": (overrides.activation_bytes, REST_BYTES + round(share * activation)),
        "cuda_graphs": (overrides.cuda_graphs_bytes, GRAPHS_UNCERTAINTY + round(share * graphs) if graphs else 0),
        "workspace": (overrides.non_torch_bytes, LIBRARY_UNCERTAINTY),
    }
    parts = {name: size if stated is None else 0 for name, (stated, size) in spread.items()}
    known = (overrides.available_kv_bytes, config.kv_cache_memory_bytes, config.num_gpu_blocks_override)
    parts["kv_cache"] = 0 if any(value is not None for value in known) else round(math.hypot(*parts.values()))
    return parts


def _capacity(model: ModelSpec, config: EngineConfig, rank: RankPlan, num_blocks: int) -> Capacity:
    """Whole blocks, all of them for requests."""
    layout, length = rank.layout, config.max_model_len or 1
    upper = max(model.max_position_embeddings, length)
    if not layout.block_bytes:
        return Capacity(0, 0, 0.0, 0, max(0, rank.available_kv_bytes), upper)
    per_request = layout.blocks_per_request(length)
    return Capacity(
        num_blocks, num_blocks * config.block_size, num_blocks / per_request, per_request * layout.block_bytes,
        num_blocks * layout.block_bytes, layout.largest_length(num_blocks, upper),
    )  # fmt: skip


def _verdict(config: EngineConfig, rank: RankPlan, capacity: Capacity) -> Verdict:
    if rank.total_bytes - rank.outside_bytes < rank.budget_bytes:
        return "does not fit"
    verdict = judge(capacity.margin_bytes, rank.uncertainty_bytes["kv_cache"])
    stated = judge_stated(rank, config, capacity.num_blocks)
    if "does not fit" in (verdict, stated):
        return "does not fit"
    return "may not fit" if "may not fit" in (verdict, stated) else "fits"


def _doubts(config: EngineConfig, rank: RankPlan, capacity: Capacity) -> tuple[str, ...]:
    """The reasons of a verdict that is not sure."""
    if _verdict(config, rank, capacity) != "may not fit":
        return ()
    spread, doubts = rank.uncertainty_bytes["kv_cache"], []
    if judge(capacity.margin_bytes, spread) == "may not fit":
        doubts.append(margin_doubt(capacity, config, spread))
    if judge_stated(rank, config, capacity.num_blocks) == "may not fit":
        doubts.append(TIGHT_POOL)
    return tuple(f"{DOUBT}{doubt}" for doubt in doubts)


def _breakdown(rank: RankPlan, num_blocks: int) -> MemoryBreakdown:
    return MemoryBreakdown(
        "predicted", rank.total_bytes, rank.weights_bytes, num_blocks * rank.layout.block_bytes, rank.tables_bytes,
        rank.activation_bytes, rank.cuda_graphs_bytes, rank.non_torch_bytes, rank.outside_bytes,
        uncertainty_bytes=rank.uncertainty_bytes,
    )  # fmt: skip


def _formulas(
    model: ModelSpec, gpu: GpuSpec, config: EngineConfig, parts: CardParts, rank: RankPlan, capacity: Capacity
) -> dict[str, str]:
    """Part → formula in words."""
    tables = ", ".join(f"{name} {memory(size)}" for name, size in parts.tables.items() if size)
    largest = count(config.max_num_batched_tokens) if parts.captures_largest else "1,024"
    texts = {
        "weights": f"tensors of one rank of {config.tensor_parallel_size} and rotary tables = "
        f"{memory(rank.weights_bytes)}",
        "block_tables": f"{tables} = {memory(rank.tables_bytes)}",
        "activation": f"what is alive at once in a step of {count(config.max_num_batched_tokens)} tokens, or while "
        f"{count(config.max_num_seqs)} rows of {count(model.vocab_size)} logits are sampled = "
        f"{memory(rank.activation_bytes)}",
        "cuda_graphs": f"no graphs: {why_eager(model, gpu, config) or 'enforce_eager'}"
        if not rank.cuda_graphs_bytes
        else f"one pool of segments for steps of up to {largest} tokens with prompts, and of up to "
        f"{count(min(config.max_num_seqs or 1, MAX_CAPTURE_SIZE))} requests = {memory(rank.cuda_graphs_bytes)}; "
        f"charged before they are captured: {memory(rank.graphs_reserved_bytes)}",
        "workspace": f"libraries, and blocks on their way to host memory = {memory(rank.non_torch_bytes)}",
        "kv_cache": f"{memory(rank.total_bytes)} × {config.gpu_memory_utilization:g} − weights "
        f"{memory(rank.weights_bytes)} − tables {memory(rank.tables_bytes)} − activation "
        f"{memory(rank.activation_bytes)} − workspace {memory(rank.non_torch_bytes)} − graphs "
        f"{memory(rank.graphs_reserved_bytes)} = {memory(rank.available_kv_bytes)}; pools over 4 GiB take whole 64 MiB",
        "outside": f"in use before the engine begins = {memory(rank.outside_bytes)}",
        "tokens": f"blocks × block size = {count(capacity.tokens)}; {capacity.concurrency:.2f} requests of "
        f"{count(config.max_model_len)} tokens",
    }
    return texts | layout_texts(rank.layout, capacity.num_blocks)


def _notes(
    model: ModelSpec, gpu: GpuSpec, config: EngineConfig, parts: CardParts, calibration: Calibration
) -> tuple[str, ...]:
    notes = list(model.notes)
    if calibration.source:
        notes.append(f"calibrated by {calibration.source}")
    if any(layer.kind == "sliding" for layer in model.layers):
        notes.append("windows are exact by mask; blocks behind a window are not freed, so every layer counts fully")
    if config.tensor_parallel_size > 1:
        notes.append(f"sizes are those of one of {config.tensor_parallel_size} ranks")
    if not can_fuse(model):
        notes.append("labkit's engine has no fused kernels for this model: its activation is known to 5 %")
    return (*notes, *card_notes(model, gpu, config))
