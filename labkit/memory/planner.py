"""`plan`: what a configuration means for memory, before anything runs."""

from __future__ import annotations

from labkit.errors import UnknownNameError
from labkit.format import count, gib, memory
from labkit.memory.budget import late_growth_bytes
from labkit.memory.calibration import calibration_of, log_config
from labkit.memory.capacity import Capacity, binding_rank, capacity_of, judge, judge_stated
from labkit.memory.card_plan import plan_card
from labkit.memory.dtypes import compute_dtype
from labkit.memory.explain import (
    DOUBT,
    TIGHT_POOL,
    binding_limit,
    formulas_labkit,
    formulas_vllm,
    group_details,
    margin_doubt,
    notes_vllm,
    rank_details,
)
from labkit.memory.labkit_rules import (
    block_tables_bytes,
    engine_parts,
    scratch_bytes,
)
from labkit.memory.logs.record import LogRecord
from labkit.memory.records import MemoryBreakdown, MemoryPlan, Verdict
from labkit.memory.resolve import resolve_config
from labkit.memory.rules import VersionRules, vllm_rules
from labkit.memory.sglang import plan_sglang
from labkit.memory.stages import GIB, Calibration, Overrides, RankPlan, plan_ranks
from labkit.memory.supported import card_lacks
from labkit.specs.engine_config import EngineConfig
from labkit.specs.gpu_spec import GpuSpec
from labkit.specs.model_spec import ModelSpec
from labkit.text import nearest, plain

ENGINES = ("labkit", "vllm", "sglang")
LABKIT_VERSION = "0.1.0"


def plan(
    model: ModelSpec,
    gpu: GpuSpec,
    config: EngineConfig | None = None,
    *,
    engine: str = "labkit",
    engine_version: str = "0.33.0",
    calibration: Calibration | LogRecord | None = None,
    overrides: Overrides | None = None,
) -> MemoryPlan:
    """The memory plan of `model` on `gpu` under `config`.

    Args:
        model: what the catalogue, a folder, a config.json or a GGUF file says.
        gpu: a card; one with `is_cpu` makes labkit's engine plan its CPU executor.
        config: the knobs; None means all defaults.
        engine: "labkit", "vllm" or "sglang".
        engine_version: vLLM's version; labkit's engine on a GPU takes that version's defaults.
        calibration: the constants of a host, or one of its start-up logs (of this model) to take them from.
        overrides: parts that are known better than the formulas give them.

    Returns:
        The plan; its configuration has every None resolved, and its parts sum to the card's total exactly.

    Raises:
        UnknownNameError: no such engine.
        OutOfRangeError, UnsupportedError: a configuration that the engine refuses.
    """
    if engine not in ENGINES:
        close = nearest(engine, ENGINES)
        available = ", ".join(ENGINES)
        raise UnknownNameError(
            f"there is no engine {plain(engine, 40)!r}", available=available, works=close or available, knob="engine"
        )
    config = config or EngineConfig()
    if engine == "labkit" and gpu.is_cpu:
        return _plan_cpu(model, gpu, config)
    if engine == "sglang":
        return plan_sglang(model, gpu, config, overrides or Overrides())
    rules = vllm_rules(engine_version)
    overrides = overrides or Overrides()
    if isinstance(calibration, LogRecord):
        its_rules = vllm_rules(calibration.version) if calibration.version else rules
        its_config = log_config(calibration, its_rules.utilization)
        its_plan = _plan_vllm(model, gpu, its_config, its_rules, engine, Calibration(), Overrides())
        calibration = calibration_of(calibration, its_plan)
    calibration = calibration or Calibration()
    if engine == "labkit" and not card_lacks(model, config):
        return plan_card(model, gpu, config, rules, calibration, overrides)
    return _plan_vllm(model, gpu, config, rules, engine, calibration, overrides)


def _plan_vllm(
    model: ModelSpec,
    gpu: GpuSpec,
    config: EngineConfig,
    rules: VersionRules,
    engine: str,
    calibration: Calibration,
    overrides: Overrides,
) -> MemoryPlan:
    resolved = resolve_config(model, gpu, config, rules)
    ranks = plan_ranks(model, gpu, resolved, rules, overrides, calibration)
    binding = binding_rank(ranks)
    rank = ranks[binding]
    num_blocks = resolved.num_gpu_blocks_override or rank.num_blocks
    upper = max(model.max_position_embeddings, resolved.max_model_len or 0)
    capacity = capacity_of(rank, num_blocks, resolved, rules, upper)
    verdict, doubts = _verdict(model, resolved, rules, rank, capacity)
    return MemoryPlan(
        model=model, gpu=gpu, config=resolved, engine=engine, engine_version=rules.text,
        breakdown=_breakdown(rank, num_blocks, resolved),
        block_bytes=rank.layout.block_bytes, num_gpu_blocks=num_blocks,
        num_swap_blocks=_swap_blocks(resolved, rank.layout.block_bytes),
        kv_cache_tokens=capacity.tokens, max_concurrency=capacity.concurrency,
        max_model_len_that_fits=capacity.largest_length, verdict=verdict, margin_bytes=capacity.margin_bytes,
        binding_limit=binding_limit(resolved, ranks, binding, capacity),
        formulas=formulas_vllm(model, resolved, rules, rank, capacity),
        notes=(*_lacking(engine, model, config), *doubts, *notes_vllm(model, gpu, resolved, rules, rank, calibration)),
        details={
            "ranks": tuple(rank_details(entry) for entry in ranks), "binding_rank": binding,
            "needed_bytes": capacity.needed_bytes, "available_bytes": capacity.available_bytes,
        },
    )  # fmt: skip


def _lacking(engine: str, model: ModelSpec, config: EngineConfig) -> tuple[str, ...]:
    """Why labkit's engine is planned by vLLM's rules."""
    lacks = card_lacks(model, config) if engine == "labkit" else []
    return (f"labkit's engine lacks {', '.join(lacks)}, so this is planned by vLLM's rules",) if lacks else ()


def _verdict(
    model: ModelSpec, config: EngineConfig, rules: VersionRules, rank: RankPlan, capacity: Capacity
) -> tuple[Verdict, tuple[str, ...]]:
    """The fit check, whether the card has the budget free, and room outside it for what comes after the pool; with
    the reasons for a doubt."""
    spread = rank.uncertainty_bytes["kv_cache"]
    verdict = judge(capacity.margin_bytes, spread)
    if not rules.charges_others and rank.total_bytes - rank.outside_bytes < rank.budget_bytes:
        return "does not fit", ()
    stated = judge_stated(rank, config, capacity.num_blocks)
    if "does not fit" in (verdict, stated):
        return "does not fit", ()
    room = rank.total_bytes - rank.budget_bytes - (0 if rules.charges_others else rank.outside_bytes)
    later = rank.cuda_graphs_bytes - rank.graphs_reserved_bytes + late_growth_bytes(model, config, rules)
    lacks_states = any(group.page.kind == "state" for group in rank.layout.groups) and (
        capacity.num_blocks < (config.max_num_seqs or 0)
    )
    doubts = [margin_doubt(capacity, config, spread)] if verdict == "may not fit" else []
    if later > room:
        doubts.append(
            f"after the pool the engine takes {memory(later)} more, and {memory(max(0, room))} is left for it"
        )
    if stated == "may not fit":
        doubts.append(TIGHT_POOL)
    if lacks_states:
        doubts.append(f"each of {count(config.max_num_seqs)} requests needs a state, and there are fewer blocks")
    if rules.is_older_than_known:
        doubts.append(f"the rules of vLLM {rules.text} are not known, those of the nearest version were used")
    return "may not fit" if doubts else verdict, tuple(f"{DOUBT}{doubt}" for doubt in doubts)


def _breakdown(rank: RankPlan, num_blocks: int, config: EngineConfig) -> MemoryBreakdown:
    return MemoryBreakdown(
        kind="predicted",
        total_bytes=rank.total_bytes,
        weights_bytes=rank.weights_bytes,
        kv_cache_bytes=num_blocks * rank.layout.block_bytes,
        block_tables_bytes=block_tables_bytes(config, num_blocks),
        activation_bytes=rank.activation_bytes,
        cuda_graphs_bytes=rank.cuda_graphs_bytes,
        workspace_bytes=rank.non_torch_bytes,
        outside_bytes=rank.outside_bytes,
        uncertainty_bytes=rank.uncertainty_bytes,
    )


def _swap_blocks(config: EngineConfig, block_bytes: int) -> int:
    return int(config.swap_space * GIB) // block_bytes if block_bytes else 0


def _plan_cpu(model: ModelSpec, gpu: GpuSpec, config: EngineConfig) -> MemoryPlan:
    resolved = resolve_config(model, gpu, config, None)
    if resolved.dtype == "auto":
        resolved = resolved.replace(dtype=cpu_dtype(model, config))
    parts = engine_parts(model, resolved)
    layout = parts.layout
    total = int(resolved.cpu_memory_gib * GIB)
    budget = int(total * resolved.gpu_memory_utilization)
    left = budget - parts.weights_bytes - parts.activation_bytes
    if resolved.kv_cache_memory_bytes is not None:
        left = resolved.kv_cache_memory_bytes
    num_blocks = resolved.num_gpu_blocks_override or _cpu_blocks(model, resolved, layout.block_bytes, left)
    tables, scratch = block_tables_bytes(resolved, num_blocks), scratch_bytes(model, resolved, num_blocks)
    length = resolved.max_model_len or 1
    breakdown = MemoryBreakdown(
        "predicted", total, parts.weights_bytes, num_blocks * layout.block_bytes, tables, parts.activation_bytes,
        0, scratch, 0,
        uncertainty_bytes={
            "weights": parts.weights_bytes // 50, "kv_cache": 0, "block_tables": 0,
            "activation": parts.activation_bytes // 10, "workspace": scratch // 50,
        },
    )  # fmt: skip
    margin = num_blocks * layout.block_bytes - layout.request_bytes(length)
    upper = max(model.max_position_embeddings, length)
    overrun = breakdown.free_bytes < 0
    return MemoryPlan(
        model=model, gpu=gpu, config=resolved, engine="labkit", engine_version=LABKIT_VERSION, breakdown=breakdown,
        block_bytes=layout.block_bytes, num_gpu_blocks=num_blocks,
        num_swap_blocks=_swap_blocks(resolved, layout.block_bytes),
        kv_cache_tokens=num_blocks * resolved.block_size,
        max_concurrency=num_blocks / max(1, layout.blocks_per_request(length)),
        max_model_len_that_fits=layout.largest_length(num_blocks, upper),
        verdict="does not fit" if overrun or num_blocks == 0 else judge(margin, 0), margin_bytes=margin,
        binding_limit=_cpu_limit(resolved, margin, num_blocks),
        formulas=formulas_labkit(model, resolved, breakdown, layout, num_blocks),
        notes=_cpu_notes(model, resolved), details={"groups": group_details(layout)},
    )  # fmt: skip


def cpu_dtype(model: ModelSpec, config: EngineConfig) -> str:
    """The compute type of labkit's engine on a CPU: float32 unless set, as 16-bit matrices are slower there."""
    return "float32" if config.dtype == "auto" else compute_dtype(model, config)


def _cpu_blocks(model: ModelSpec, config: EngineConfig, block_bytes: int, left: int) -> int:
    """Blocks that fit with their tables and scratch, which grow with the pool up to the longest request."""
    if not block_bytes or left <= 0:
        return 0
    low, high = 0, left // block_bytes
    while low < high:
        middle = (low + high + 1) // 2
        beside = block_tables_bytes(config, middle) + scratch_bytes(model, config, middle)
        if middle * block_bytes + beside <= left:
            low = middle
        else:
            high = middle - 1
    return low


def _cpu_limit(config: EngineConfig, margin: int, num_blocks: int) -> str:
    if config.num_gpu_blocks_override is not None:
        return "num_gpu_blocks_override sets the number of KV blocks"
    if num_blocks == 0:
        return "weights and activations: they leave nothing of cpu_memory_gib times utilization for KV blocks"
    if margin < 0:
        return "cpu_memory_gib: the pool holds less than one request of max_model_len"
    return "KV blocks: cpu_memory_gib times utilization, less weights and activations"


def _cpu_notes(model: ModelSpec, config: EngineConfig) -> tuple[str, ...]:
    notes = list(model.notes)
    if any(layer.kind in ("sliding", "chunked") for layer in model.layers):
        notes.append("windows are exact by mask; blocks behind a window are not freed yet, so every layer counts fully")
    if config.tensor_parallel_size > 1:
        ranks, total = config.tensor_parallel_size, config.tensor_parallel_size * config.cpu_memory_gib
        notes.append(f"sizes are those of one of {ranks} ranks, processes that may take {gib(total)} together")
    if config.kv_cache_dtype not in ("auto", config.dtype):
        notes.append("8-bit KV saves memory on a CPU, not time: it is read back into the compute type")
    return tuple(notes)
