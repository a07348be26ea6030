"""What each rank of an engine holds: one `RankPlan` for each pipeline stage (ranks of one stage are alike)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from labkit.memory.budget import (
    activation_bytes,
    activation_uncertainty,
    constants_for,
    graph_estimate_share,
    graphs_bytes,
    has_fast_links,
    has_vision,
    non_torch_bytes,
)
from labkit.memory.dtypes import compute_dtype, kv_format, stored_kv_dtype
from labkit.memory.kv_layout import KvLayout, build_layout
from labkit.memory.rules import VersionRules
from labkit.memory.tensors import Sharing
from labkit.memory.weights import (
    StageLayers,
    absorbed_mla_bytes,
    counted_bytes,
    pipeline_stages,
    rope_cache_bytes,
    stage_weights_bytes,
    weight_format,
)
from labkit.specs.engine_config import EngineConfig
from labkit.specs.families import find_family
from labkit.specs.gpu_spec import GpuSpec
from labkit.specs.model_spec import ModelSpec

GIB = 2**30
# What the 56 start-ups in `runs/` leave unexplained: libraries' workspaces (granite), a first compilation (llama), a
# vision tower's transients while loading (gemma-3); and what V0 counted of the CUDA context on large cards (case N02).
LIBRARY_UNCERTAINTY, COMPILE_UNCERTAINTY, VISION_UNCERTAINTY, CONTEXT_UNCERTAINTY = (
    round(gib * GIB) for gib in (0.25, 0.15, 0.4, 1.5)
)
# No start-up of a model with recurrent state is among the fitted ones.
STATE_UNCERTAINTY = 0.5
# A model type that the catalogue lacks is counted as a Llama; an MLP without a gate alone is a quarter less.
UNKNOWN_LAYOUT_UNCERTAINTY = 0.25
# Total less free when vLLM 0.19 (H100) and 0.25 (H200) started: CUDA context, and NCCL with more than one card.
CONTEXT_GIB = {"alone": 0.51, "tensor": 1.54, "pipeline": 1.43}


@dataclass(frozen=True)
class Overrides:
    """What the machine or a log says instead of what the formulas give; None leaves a formula in force.

    Attributes:
        total_bytes, free_bytes: of one card.
        available_kv_bytes: of one rank; then no other part matters for capacity.
        weights_bytes, activation_bytes, non_torch_bytes, cuda_graphs_bytes: of one rank.
        tables_bytes: of one rank of labkit's engine: block tables and what else stays for all steps.
    """

    total_bytes: int | None = None
    free_bytes: int | None = None
    available_kv_bytes: int | None = None
    weights_bytes: int | None = None
    activation_bytes: int | None = None
    non_torch_bytes: int | None = None
    cuda_graphs_bytes: int | None = None
    tables_bytes: int | None = None


@dataclass(frozen=True)
class Calibration:
    """A host's own constants, taken from one of its logs: what the log says over what the plan said.

    Attributes:
        weights_factor, activation_factor, graphs_factor: multiply the formulas.
        non_torch_bytes: replaces the formula, None leaves it.
        total_bytes, outside_bytes: the card's total, and what was in use before the engine started.
        source: where the constants come from, one line.
    """

    weights_factor: float = 1.0
    activation_factor: float = 1.0
    graphs_factor: float = 1.0
    non_torch_bytes: int | None = None
    total_bytes: int | None = None
    outside_bytes: int | None = None
    source: str = ""


@dataclass(frozen=True)
class RankPlan:
    """The parts of one rank, in bytes.

    Attributes:
        stage: its layers.
        total_bytes, budget_bytes: of the card, and what the engine may take of it.
        outside_bytes: in use before the engine counts.
        graphs_inside: graph memory is subtracted from the budget, by an estimate: `graphs_reserved_bytes`.
        available_kv_bytes: what is left for the pool; negative when nothing is.
        layout: pages, groups and block bytes.
        num_blocks: blocks that fit on this rank alone.
        tables_bytes: block tables and what else stays for all steps, of labkit's engine.
        uncertainty_bytes: ± of each part.
    """

    stage: StageLayers
    total_bytes: int
    budget_bytes: int
    outside_bytes: int
    weights_bytes: int
    activation_bytes: int
    non_torch_bytes: int
    cuda_graphs_bytes: int
    graphs_inside: bool
    graphs_reserved_bytes: int
    available_kv_bytes: int
    layout: KvLayout
    num_blocks: int
    uncertainty_bytes: dict[str, int] = field(default_factory=dict)
    tables_bytes: int = 0


def rank_layout(
    model: ModelSpec, config: EngineConfig, stage: StageLayers, rules: VersionRules, dtype: str
) -> KvLayout:
    """The KV layout of one rank of `stage` under vLLM's rules."""
    caching = config.enable_prefix_caching and rules.state_prefix_caching
    return build_layout(
        model.layers,
        kv_format(stored_kv_dtype(model, config), dtype),
        dtype=dtype,
        held=range(stage.first, stage.last),
        block_size=config.block_size,
        tensor_parallel_size=config.tensor_parallel_size,
        windows=rules.hybrid_groups and not (config.disable_hybrid_kv_cache_manager and _is_mixed(model)),
        group_ratio=rules.group_ratio,
        state_blocks=2 if caching else 1,
        in_flight_tokens=(config.max_num_batched_tokens or 0)
        * rules.concurrent_batches(model, config.pipeline_parallel_size),
    )


def _is_mixed(model: ModelSpec) -> bool:
    """Whether layers differ in what they keep; where all have one window, there is nothing to unify."""
    kinds = {(layer.kind, layer.window) for layer in model.layers if layer.kind not in ("encoder", "none")}
    return len(kinds) > 1


def rank_weights(model: ModelSpec, config: EngineConfig, stage: StageLayers, dtype: str) -> int:
    """Bytes that loading takes on one rank: tensors, the rotary table, MLA's absorbed copies."""
    share = Sharing(config.tensor_parallel_size, config.data_parallel_size, config.enable_expert_parallel)
    fmt = weight_format(model, config.quantization)
    counted = stage_weights_bytes(model, stage, share, fmt, dtype)
    stated = model.weights_bytes
    if stated and fmt is model.weight_format and config.dtype in ("auto", model.dtype):
        counted = round(counted * stated / counted_bytes(model, fmt, dtype))
    return (
        counted
        + rope_cache_bytes(model, dtype, config.max_model_len or 0)
        + absorbed_mla_bytes(model, stage, share, dtype)
    )


def plan_ranks(
    model: ModelSpec,
    gpu: GpuSpec,
    config: EngineConfig,
    rules: VersionRules,
    overrides: Overrides,
    calibration: Calibration,
) -> list[RankPlan]:
    """One `RankPlan` for each pipeline stage of a resolved configuration."""
    stages = pipeline_stages(model.num_layers, config.pipeline_parallel_size)
    return [_plan_rank(model, gpu, config, rules, stage, overrides, calibration) for stage in stages]


def _plan_rank(
    model: ModelSpec,
    gpu: GpuSpec,
    config: EngineConfig,
    rules: VersionRules,
    stage: StageLayers,
    overrides: Overrides,
    calibration: Calibration,
) -> RankPlan:
    dtype, runner = compute_dtype(model, config), rules.model_runner(model)
    total = _first(overrides.total_bytes, calibration.total_bytes, gpu.total_bytes)
    weights = _first(
        overrides.weights_bytes, round(rank_weights(model, config, stage, dtype) * calibration.weights_factor)
    )
    activation = _first(
        overrides.activation_bytes,
        round(activation_bytes(model, config, stage, rules, dtype) * calibration.activation_factor),
    )
    non_torch = _first(
        overrides.non_torch_bytes, calibration.non_torch_bytes, non_torch_bytes(config, gpu, rules, runner)
    )
    graphs = _first(
        overrides.cuda_graphs_bytes,
        round(graphs_bytes(model, gpu, config, stage, rules) * calibration.graphs_factor),
    )
    inside = rules.graphs_in_budget == "all" or (rules.graphs_in_budget == "runner1" and runner == 1)
    budget = math.ceil(total * config.gpu_memory_utilization)
    reserved = _graphs_reserved(model, config, rules, graphs) if inside else 0
    outside = _outside(gpu, config, total, overrides, calibration, rules)
    available = budget - weights - activation - non_torch - reserved - (outside if rules.charges_others else 0)
    if config.kv_cache_memory_bytes is not None:
        available = config.kv_cache_memory_bytes
    available = _first(overrides.available_kv_bytes, available)
    layout = rank_layout(model, config, stage, rules, dtype)
    rank = RankPlan(
        stage=stage,
        total_bytes=total,
        budget_bytes=budget,
        outside_bytes=outside,
        graphs_reserved_bytes=reserved,
        weights_bytes=weights,
        activation_bytes=activation,
        non_torch_bytes=non_torch,
        cuda_graphs_bytes=graphs,
        graphs_inside=inside,
        available_kv_bytes=available,
        layout=layout,
        num_blocks=max(0, available // layout.block_bytes) if layout.block_bytes else 0,
    )
    return replace(rank, uncertainty_bytes=_uncertainty(rank, model, gpu, config, rules, overrides, calibration))


def _graphs_reserved(model: ModelSpec, config: EngineConfig, rules: VersionRules, graphs: int) -> int:
    """What the estimate of graph memory takes from the budget."""
    estimate = round(graphs * graph_estimate_share(model, rules))
    has_state = any(layer.state is not None for layer in model.layers)
    if not graphs or not has_state or rules.model_runner(model) == 2:
        return estimate
    return max(estimate, rules.state_graph_transient_kib * 1024 * (config.max_num_batched_tokens or 0))


def _first(*values: int | None) -> int:
    """The first value that is there."""
    return next(value for value in values if value is not None)


def _outside(
    gpu: GpuSpec,
    config: EngineConfig,
    total: int,
    overrides: Overrides,
    calibration: Calibration,
    rules: VersionRules,
) -> int:
    """Bytes in use before the engine takes its first snapshot: CUDA context, NCCL, other processes."""
    free = overrides.free_bytes if overrides.free_bytes is not None else gpu.free_bytes
    if free is not None:
        return max(0, total - free)
    if calibration.outside_bytes is not None:
        return calibration.outside_bytes
    if rules.charges_others:
        return 0  # the context is in the non-torch constant of these versions
    # NCCL's buffers are those of fast links: over PCIe it takes little, as non-torch memory has it.
    kind = "alone"
    if has_fast_links(gpu):
        kind = "tensor" if config.tensor_parallel_size > 1 else kind
        kind = "pipeline" if kind == "alone" and config.pipeline_parallel_size > 1 else kind
    return round(CONTEXT_GIB[kind] * GIB)


def _weights_share(model: ModelSpec) -> float:
    """± of the weights as a share: what is counted for a model type that nobody has described is a guess."""
    is_counted = model.weights_bytes is None
    return UNKNOWN_LAYOUT_UNCERTAINTY if is_counted and not find_family(model.model_type).known else 0.01


def _uncertainty(
    rank: RankPlan,
    model: ModelSpec,
    gpu: GpuSpec,
    config: EngineConfig,
    rules: VersionRules,
    overrides: Overrides,
    calibration: Calibration,
) -> dict[str, int]:
    """± bytes of each part; halved where a log of the same host calibrates it, 0 where the caller states it."""
    share = 0.5 if calibration.source else 1.0
    constants = constants_for(rules.version, rules.model_runner(model))
    dtype = compute_dtype(model, config)
    weights = _weights_share(model) * rank.weights_bytes + (VISION_UNCERTAINTY if has_vision(model) else 0)
    activation = rank.activation_bytes * activation_uncertainty(model, config, rank.stage, rules, dtype)
    activation += 0 if config.enforce_eager else COMPILE_UNCERTAINTY
    if any(layer.state is not None for layer in model.layers):
        activation += STATE_UNCERTAINTY * rank.activation_bytes
    unsure_context = rules.charges_others and has_fast_links(gpu)
    workspace = CONTEXT_UNCERTAINTY if unsure_context else max(LIBRARY_UNCERTAINTY, 0.15 * rank.non_torch_bytes)
    graphs = constants.graph_uncertainty_gib * GIB if rank.cuda_graphs_bytes else 0
    spread = {"weights": weights, "activation": activation, "cuda_graphs": graphs, "workspace": workspace}
    stated = {
        "weights": overrides.weights_bytes, "activation": overrides.activation_bytes,
        "cuda_graphs": overrides.cuda_graphs_bytes, "workspace": overrides.non_torch_bytes,
    }  # fmt: skip
    parts = {name: 0 if stated[name] is not None else round(size * share) for name, size in spread.items()}
    inside = [parts[name] for name in parts if name != "cuda_graphs" or rank.graphs_inside]
    known = (overrides.available_kv_bytes, config.kv_cache_memory_bytes, config.num_gpu_blocks_override)
    parts["kv_cache"] = 0 if any(value is not None for value in known) else round(math.hypot(*inside))
    return parts
