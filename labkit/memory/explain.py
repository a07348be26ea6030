"""Each part of a plan in words, with the numbers put in; the limit that binds; what was assumed."""

from __future__ import annotations

import math
from typing import Any

from labkit.format import count, gib, memory, number
from labkit.memory.budget import expert_workspace_bytes, has_vision
from labkit.memory.capacity import Capacity, judge_stated, stated_room_bytes
from labkit.memory.division import split_weight_block
from labkit.memory.dtypes import ELEMENT_BYTES, compute_dtype, stored_kv_dtype
from labkit.memory.kv_layout import KvLayout
from labkit.memory.records import MemoryBreakdown
from labkit.memory.rules import VersionRules
from labkit.memory.stages import Calibration, RankPlan
from labkit.specs.engine_config import EngineConfig
from labkit.specs.gpu_spec import GpuSpec
from labkit.specs.model_spec import ModelSpec

# Notes on a verdict that is not sure begin so.
DOUBT = "may not fit: "
REFUSED = "vLLM refuses "
TIGHT_POOL = "the pool of stated size and the other parts fill the card to within what the plan is sure of"
NO_SWAP_SINCE = (0, 18, 0)
# Weights that no engine makes while loading.
MADE_BEFOREHAND = (
    "awq", "auto_awq", "awq_marlin", "gptq", "gptq_marlin", "nvfp4", "modelopt_fp4", "mxfp4"
)  # fmt: skip


def formulas_vllm(
    model: ModelSpec, config: EngineConfig, rules: VersionRules, rank: RankPlan, capacity: Capacity
) -> dict[str, str]:
    """Part → formula in words, for the binding rank."""
    charged = rank.graphs_inside and rank.graphs_reserved_bytes
    graphs = f" − estimate of CUDA graphs {memory(rank.graphs_reserved_bytes)}" if charged else ""
    where = "inside the budget" if rank.graphs_inside else "outside the budget"
    as_before = _before_estimates(config, rank) if charged else ""
    layers = rank.stage.last - rank.stage.first
    texts = {
        "weights": f"{_tensors_text(model, config, layers)} = {memory(rank.weights_bytes)}",
        "activation": f"{_activation_text(model, config, rank)} = {memory(rank.activation_bytes)}",
        "workspace": f"{_workspace_text(config)} = {memory(rank.non_torch_bytes)}",
        "cuda_graphs": "no graphs in eager mode"
        if config.enforce_eager
        else f"launches of {layers} layers at each capture size, partial results of decode attention, and rows between "
        f"a layer's graphs = {memory(rank.cuda_graphs_bytes)}, {where}{as_before}",
        "kv_cache": f"{memory(rank.total_bytes)} × {config.gpu_memory_utilization:g} − weights "
        f"{memory(rank.weights_bytes)} − activation {memory(rank.activation_bytes)} − non-torch "
        f"{memory(rank.non_torch_bytes)}{graphs} = {memory(rank.available_kv_bytes)}",
        "outside": f"in use before the engine's first snapshot = {memory(rank.outside_bytes)}",
        "block_tables": f"4 B × {count(config.max_num_seqs)} requests × blocks of {count(config.max_model_len)} tokens",
    }
    return texts | layout_texts(rank.layout, capacity.num_blocks) | {"tokens": _tokens_text(config, rules, capacity)}


def _before_estimates(config: EngineConfig, rank: RankPlan) -> str:
    """The utilization that makes up for what the estimate takes of the pool, as vLLM prints it at start."""
    share = config.gpu_memory_utilization + rank.graphs_reserved_bytes / rank.total_bytes
    as_much = math.ceil(share * 10_000) / 10_000
    return f"; gpu_memory_utilization {as_much:.4f} gives as much KV as where they are not counted"


def _tensors_text(model: ModelSpec, config: EngineConfig, layers: int) -> str:
    """What is in the weights of one rank."""
    ranks = config.tensor_parallel_size
    share = f", one of {ranks} ranks' share," if ranks > 1 else ""
    latent = ", MLA's up-projections a second time" if any(layer.kind == "mla" for layer in model.layers) else ""
    tower = ", the vision tower" if has_vision(model) else ""
    return f"tensors of {layers} layers{share} rounded as torch's allocator rounds{tower}{latent}, and the rotary table"


def _activation_text(model: ModelSpec, config: EngineConfig, rank: RankPlan) -> str:
    """The moments of the peak, and what is kept beside it."""
    tokens = count(config.max_num_batched_tokens)
    samples = rank.stage.has_head and not model.is_embedding
    text = f"the widest layer over {tokens} tokens"
    if samples:
        rows = f"{count(config.max_num_seqs)} rows of {count(model.vocab_size)} logits"
        text = f"the larger of {text} and sampling {rows}"
    experts = expert_workspace_bytes(
        model, config.max_num_batched_tokens or 0, config.tensor_parallel_size,
        ELEMENT_BYTES[compute_dtype(model, config)],
    )  # fmt: skip
    text += f", + each token's copies for its experts {memory(experts)}" if experts else ""
    text += ", + rows between pipeline stages" if config.pipeline_parallel_size > 1 else ""
    return text + (", + embeddings of images" if has_vision(model) and rank.stage.first == 0 else "")


def _workspace_text(config: EngineConfig) -> str:
    """What grows outside torch while the engine profiles."""
    cards = config.tensor_parallel_size * config.pipeline_parallel_size
    if cards == 1:
        return "what libraries take outside torch"
    return f"what libraries and the exchange between {cards} cards take outside torch"


def formulas_labkit(
    model: ModelSpec, config: EngineConfig, breakdown: MemoryBreakdown, layout: KvLayout, num_blocks: int
) -> dict[str, str]:
    """Part → formula in words, for labkit's engine on a CPU."""
    texts = {
        "weights": f"parameters and rotary tables in {config.dtype} = {memory(breakdown.weights_bytes)}",
        "activation": f"the larger of the widest layer over {count(config.max_num_batched_tokens)} tokens and "
        f"{count(config.max_num_seqs)} rows of {count(model.vocab_size)} float32 logits = "
        f"{memory(breakdown.activation_bytes)}",
        "block_tables": f"4 B × {count(config.max_num_seqs)} requests × blocks of the longest = "
        f"{memory(breakdown.block_tables_bytes)}",
        "workspace": f"scratch for the longest sequence of one layer = {memory(breakdown.workspace_bytes)}",
        "kv_cache": f"{gib(config.cpu_memory_gib)} × {config.gpu_memory_utilization:g} less the other parts, in "
        f"whole blocks = {memory(breakdown.kv_cache_bytes)}",
        "cuda_graphs": "no CUDA graphs on a CPU",
        "outside": "the budget is the engine's alone",
    }
    return texts | layout_texts(layout, num_blocks)


def rank_details(rank: RankPlan) -> dict[str, Any]:
    """One rank in plain values, as `MemoryPlan.details["ranks"]` keeps it and the run store saves it."""
    names = (
        "total_bytes", "budget_bytes", "outside_bytes", "weights_bytes", "activation_bytes", "non_torch_bytes",
        "cuda_graphs_bytes", "graphs_inside", "graphs_reserved_bytes", "available_kv_bytes", "num_blocks",
        "tables_bytes",
    )  # fmt: skip
    return {
        "first_layer": rank.stage.first,
        "last_layer": rank.stage.last - 1,
        **{name: getattr(rank, name) for name in names},
        "block_bytes": rank.layout.block_bytes,
        "padding_layers": rank.layout.padding_layers,
        "state_blocks": rank.layout.state_blocks,
        "in_flight_tokens": rank.layout.in_flight_tokens,
        "groups": group_details(rank.layout),
        "uncertainty_bytes": dict(rank.uncertainty_bytes),
    }


def group_details(layout: KvLayout) -> tuple[dict[str, Any], ...]:
    """The groups of a layout in plain values."""
    return tuple(
        {
            "kind": group.page.kind,
            "num_layers": group.num_layers,
            "block_tokens": group.page.block_tokens,
            "token_bytes": group.page.token_bytes,
            "page_bytes": group.page.page_bytes,
            "window": group.page.window,
        }
        for group in layout.groups
    )


def layout_texts(layout: KvLayout, num_blocks: int) -> dict[str, str]:
    """One block, and how many, in words."""
    if not layout.groups:
        return {"block": "no layer keeps KV"}
    kinds = ", ".join(
        f"{group.num_layers} {group.page.kind} layers of {memory(group.page.page_bytes)} "
        f"({group.page.block_tokens} tokens)"
        for group in dict.fromkeys(layout.groups)
    )
    waste = f", {layout.padding_layers} padding layers" if layout.padding_layers else ""
    return {
        "block": f"{len(layout.groups)} group(s): {kinds}{waste}; one block = {memory(layout.block_bytes)}",
        "blocks": f"pool / block, rounded down = {count(num_blocks)}",
    }


def _tokens_text(config: EngineConfig, rules: VersionRules, capacity: Capacity) -> str:
    how = {
        "blocks": "blocks × block size",
        "groups": "blocks / groups, rounded down, × smallest block",
        "concurrency": "concurrency × max_model_len",
    }[rules.printed_tokens]
    return (
        f"{how} = {count(capacity.tokens)}; {number(capacity.concurrency)} requests of "
        f"{count(config.max_model_len)} tokens, as vLLM {rules.text} prints"
    )


def binding_limit(config: EngineConfig, ranks: list[RankPlan], binding: int, capacity: Capacity) -> str:
    """The part or knob that sets the capacity."""
    rank = ranks[binding]
    room = stated_room_bytes(rank, config, capacity.num_blocks)
    if room is not None and judge_stated(rank, config, capacity.num_blocks) == "does not fit":
        knob = "kv_cache_memory_bytes" if config.num_gpu_blocks_override is None else "num_gpu_blocks_override"
        return f"{knob}: the pool and the other parts take {memory(-room)} more than the card has"
    if config.num_gpu_blocks_override is not None:
        return "num_gpu_blocks_override sets the number of KV blocks"
    free = rank.total_bytes - rank.outside_bytes
    if free < rank.budget_bytes:
        asked = f"asks for {memory(rank.budget_bytes)}, more than is free on the card: {memory(max(0, free))}"
        return f"gpu_memory_utilization {asked}"
    if not rank.layout.block_bytes:
        return "no KV: requests are computed whole, max_num_batched_tokens bounds them"
    layers = f"layers {rank.stage.first} to {rank.stage.last - 1}"
    stage = f" on pipeline stage {binding} of {len(ranks)} ({layers})" if len(ranks) > 1 else ""
    if rank.available_kv_bytes <= 0:
        missing, budget = memory(-rank.available_kv_bytes), memory(rank.budget_bytes)
        return f"weights and activations leave nothing for KV{stage}: they take {missing} more than the budget {budget}"
    needed, there = memory(capacity.needed_bytes), memory(max(0, capacity.available_bytes))
    if capacity.margin_bytes < 0:
        return f"max_model_len: one request needs {needed} of KV and there are {there}{stage}"
    if capacity.concurrency > (config.max_num_seqs or 0):
        return f"max_num_seqs: KV would hold {number(capacity.concurrency)} requests of max_model_len{stage}"
    most = count(config.max_num_seqs)
    return f"KV blocks{stage}: {number(capacity.concurrency)} requests of max_model_len, max_num_seqs allows {most}"


def margin_doubt(capacity: Capacity, config: EngineConfig, spread_bytes: int) -> str:
    """Why a margin is no answer."""
    one = f"one request of {count(config.max_model_len)} tokens"
    spare = "leaves" if capacity.margin_bytes >= 0 else "lacks"
    size = memory(abs(capacity.margin_bytes))
    return f"{one} {spare} {size} of KV, and the plan is sure to ± {memory(spread_bytes)}"


def notes_vllm(
    model: ModelSpec,
    gpu: GpuSpec,
    config: EngineConfig,
    rules: VersionRules,
    rank: RankPlan,
    calibration: Calibration,
) -> tuple[str, ...]:
    """What was assumed, one sentence each."""
    notes = [*_refusals(model, gpu, config, rules), *model.notes]
    if rules.note:
        notes.append(rules.note)
    if config.gpu_memory_utilization == 0.92 != rules.utilization:
        notes.append(f"planned with utilization 0.92; the default of vLLM {rules.text} is {rules.utilization:g}")
    if calibration.source:
        notes.append(f"calibrated by {calibration.source}")
    blocks = {group.page.block_tokens for group in rank.layout.groups}
    if blocks and blocks != {config.block_size}:
        sizes = " and ".join(count(size) for size in sorted(blocks))
        notes.append(f"block_size {config.block_size} is only a wish here: pages are unified to {sizes} tokens")
    if rank.layout.padding_layers:
        notes.append(f"{rank.layout.padding_layers} padding layers take pages and hold nothing")
    notes += _flag_notes(model, config, rules)
    return (*notes, *card_notes(model, gpu, config))


def _refusals(model: ModelSpec, gpu: GpuSpec, config: EngineConfig, rules: VersionRules) -> list[str]:
    """Flags with which vLLM does not start, whatever the memory."""
    notes = []
    why = "" if gpu.is_cpu else rules.refused_block_size(config.block_size)
    if why:
        notes.append(f"{REFUSED}block_size {config.block_size}: {why}")
    if (config.max_model_len or 0) > model.max_position_embeddings:
        notes.append(
            f"{REFUSED}max_model_len {count(config.max_model_len)} is over the model's "
            f"{count(model.max_position_embeddings)} positions, unless VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 is set"
        )
    split = split_weight_block(model, config)
    if split:
        notes.append(f"{REFUSED}tensor_parallel_size {config.tensor_parallel_size}: {split}")
    has_states = any(layer.state is not None for layer in model.layers)
    has_attention = any(layer.kind in ("full", "mla", "sliding", "chunked") for layer in model.layers)
    if config.disable_hybrid_kv_cache_manager and has_states and has_attention:
        notes.append(
            f"{REFUSED}disable_hybrid_kv_cache_manager: recurrent states and attention need groups of their own"
        )
    return notes


def _flag_notes(model: ModelSpec, config: EngineConfig, rules: VersionRules) -> list[str]:
    """Flags that do nothing, or that ask for other files than the model's."""
    notes = []
    if config.swap_space and rules.version >= NO_SWAP_SINCE:
        notes.append(f"vLLM {rules.text} has no --swap-space: preempted requests are computed again")
    is_plain = model.weight_format.kind in ("16bit", "32bit")
    if config.quantization in MADE_BEFOREHAND and is_plain:
        notes.append(
            f"{model.name} is stored in 16 bit, and {config.quantization} weights are made beforehand: this plans a "
            "copy that is stored so; --quantization alone does not make one"
        )
    if config.enable_expert_parallel and model.moe is None:
        notes.append("--enable-expert-parallel changes nothing: the model has no experts")
    if has_vision(model):
        notes.append(
            "what the vision tower computes while profiling is not planned; --language-model-only or "
            "--limit-mm-per-prompt '{\"image\": 0}' leaves it out"
        )
    return notes


def card_notes(model: ModelSpec, gpu: GpuSpec, config: EngineConfig) -> list[str]:
    """What the card's generation does not do."""
    if gpu.compute_capability is None:
        return []
    generation = float(gpu.compute_capability)
    notes = []
    if generation < 8 and compute_dtype(model, config) == "bfloat16":
        notes.append(f"{gpu.name} has no bfloat16: add --dtype half, the bytes are the same")
    stored = stored_kv_dtype(model, config)
    if generation < 8.9 and stored.startswith("fp8"):
        notes.append(f"{gpu.name} has no fp8 units: whether {stored} KV works depends on the attention backend")
    return notes
