"""Memory of labkit's own engine on a card, part by part: every buffer of `CudaExecutor` with its formula.

What no formula gives is in `labkit_card_constants.json`, measured on cards: what libraries and the driver take.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources

from labkit.memory.caching_allocator import SMALL_BYTES, SMALL_SEGMENT_BYTES, CachingAllocator, PeakMeter
from labkit.memory.dtypes import ELEMENT_BYTES, compute_dtype, kv_format
from labkit.memory.kernel_settings import architecture, attention_settings, sm_count
from labkit.memory.kv_layout import KvLayout, build_layout
from labkit.memory.labkit_rules import TABLE_ENTRY_BYTES, rotary_bytes
from labkit.memory.step_buffers import INDEX_BYTES, StepBuffers, StepModel, can_fuse, rotations_of, step_model
from labkit.memory.step_shapes import MANY_PROMPTS, StepShape, graph_shapes, prompt_shape
from labkit.memory.tensors import Sharing, WeightTensor, embed_tensors, head_tensors, layer_tensors
from labkit.memory.weights import StageLayers, stage_tensors, tensor_bytes, weight_format
from labkit.specs.engine_config import EngineConfig
from labkit.specs.gpu_spec import GpuSpec
from labkit.specs.model_spec import LayerSpec, ModelSpec, WeightFormat

MIB = 2**20
# As `labkit.engine.cuda_inputs.Staging`: token id, position and slot of a token; what a sequence needs; alignment.
TOKEN_INPUT_BYTES, SEQUENCE_INPUT_BYTES, INPUT_ALIGNMENT_BYTES = 24, 96, 512
# As `labkit_kernels.decode_plan`: int32 fields of a work item, float32 of a partial result.
ITEM_BYTES, PARTIAL_BYTES, PLAN_HEADER_BYTES = 28, 4, 16
FEWEST_ROWS = 16
# On the card for swapped blocks on their way, in each direction; a request of 1,000 tokens has about so much KV.
STAGED_BYTES = 128 * MIB
SPLIT_TABLES = "split of decode attention"
# Kernels of a layer: of the fused forward pass, and of one operator after another.
FUSED_LAUNCHES, PLAIN_LAUNCHES = 9, 20
# Of a step beside its layers: rows, tables, sampling.
STEP_LAUNCHES = 35
# On which steps run, and on which they are captured.
NUM_STREAMS = 2
# Weight formats that the engine keeps on a card.
KEPT_FORMATS = ("fp8", "awq")
# As `labkit.models.moe`: from this capability on, and for such widths, the product of all experts needs no host.
GROUPED_FROM, GROUPED_MULTIPLE = 90, 8


@dataclass(frozen=True)
class CardConstants:
    """What a driver and its libraries take, which no formula gives; see the file for where each was measured.

    Attributes:
        context_bytes: in use before the engine allocates: CUDA context, what made the weights.
        context_tp_bytes: the same with more than one card (NCCL).
        workspace_bytes: of the matrix library, inside torch, for each of the two streams that it runs on.
        modules_bytes: kept free for kernels, which the driver loads when they are first launched: at any time.
        graph_driver_bytes: what the driver keeps for one captured graph.
        launch_s: the host's time for one kernel launch from Python.
        flops_share: of the data sheet's FLOP/s that the largest step of a small model reaches.
    """

    context_bytes: int
    context_tp_bytes: int
    workspace_bytes: int
    modules_bytes: int
    graph_driver_bytes: int
    launch_s: float
    flops_share: float


@lru_cache(maxsize=1)
def card_constants() -> CardConstants:
    """The shipped constants."""
    text = resources.files("labkit.memory").joinpath("labkit_card_constants.json").read_text(encoding="utf-8")
    return CardConstants(**json.loads(text)["constants"])


@dataclass(frozen=True)
class CardParts:
    """Bytes of one rank of the engine on a card.

    Attributes:
        weights_bytes: tensors as loaded, and rotary tables in the model's type.
        tables: name → bytes of what stays for all steps: block tables, inputs of a step, last tokens, the split of
            decode attention, rotary tables of the fused kernels.
        activation_bytes: peak of the largest step of prompts over all that.
        graphs_bytes: what captured graphs hold; `graphs_charged_bytes` is the engine's estimate of it before its pool.
        workspace_bytes: libraries, and swapped blocks on their way.
        layout: one group of full pages: windows are exact by mask, not by freeing blocks.
        captures_largest: the largest step has a graph too.
    """

    weights_bytes: int
    tables: dict[str, int]
    activation_bytes: int
    graphs_bytes: int
    graphs_charged_bytes: int
    workspace_bytes: int
    layout: KvLayout
    captures_largest: bool

    @property
    def tables_bytes(self) -> int:
        """Bytes of all tables."""
        return sum(self.tables.values())


def card_parts(model: ModelSpec, gpu: GpuSpec, config: EngineConfig) -> CardParts:
    """The parts that do not depend on the number of blocks; `config` is resolved."""
    facts = step_model(model, gpu, config)
    largest = captures_largest(model, gpu, config)
    has_graphs = not config.enforce_eager and not why_eager(model, gpu, config)
    graphs, charged = graphs_bytes(facts, largest) if has_graphs else (0, 0)
    layout = card_layout(model, config)
    return CardParts(
        weights_bytes=card_weights_bytes(model, config),
        tables=table_bytes(facts),
        activation_bytes=activation_bytes(facts),
        graphs_bytes=graphs,
        graphs_charged_bytes=charged,
        workspace_bytes=library_bytes() + staged_bytes(config, layout.block_bytes),
        layout=layout,
        captures_largest=has_graphs and largest,
    )


def card_layout(model: ModelSpec, config: EngineConfig) -> KvLayout:
    """Pages of every layer, windows not used."""
    dtype = compute_dtype(model, config)
    return build_layout(
        model.layers, kv_format(config.kv_cache_dtype, dtype), dtype=dtype, block_size=config.block_size,
        tensor_parallel_size=config.tensor_parallel_size, windows=False,
    )  # fmt: skip


def card_weights_bytes(model: ModelSpec, config: EngineConfig) -> int:
    """Tensors of one rank as `Decoder.num_bytes` counts them, and the rotary tables.

    fp8 and AWQ stay as they are, other formats of files are undone in loading; the heads' norm is kept for each head.
    """
    dtype, size = compute_dtype(model, config), config.tensor_parallel_size
    element, fmt = ELEMENT_BYTES[dtype], weight_format(model, config.quantization)
    whole = StageLayers(0, model.num_layers, model.num_layers)
    total = 0
    for tensor, number in stage_tensors(model, whole, Sharing(size)):
        if tensor.part == "norm":
            elements = tensor.rank_elements if size > 1 else tensor.elements
            total += number * elements * (4 if model.norm_offset else element)
        elif tensor.part != "extra":
            total += number * _kept_bytes(tensor, fmt, dtype, size)
    return total + _head_norm_bytes(model, size, element) + rotary_bytes(model, config, element)


def _head_norm_bytes(model: ModelSpec, size: int, element: int) -> int:
    """What the heads' norm takes over its two vectors: it is kept for each head of the rank."""
    if not model.qk_norm:
        return 0
    heads = sum(layer.num_heads // size + max(1, layer.num_kv_heads // size) - 2 for layer in model.layers)
    return heads * model.layers[0].head_dim * (4 if model.norm_offset else element)


def table_bytes(facts: StepModel) -> dict[str, int]:
    """What stays for all steps, by name."""
    config = facts.config
    seqs, tokens = int(config.max_num_seqs or 1), int(config.max_num_batched_tokens or 1)
    return {
        "block tables": (seqs + 1) * facts.table_blocks * TABLE_ENTRY_BYTES,
        "inputs of a step": TOKEN_INPUT_BYTES * tokens
        + SEQUENCE_INPUT_BYTES * (seqs + MANY_PROMPTS + 1)
        + INPUT_ALIGNMENT_BYTES,
        "last tokens": (seqs + 1) * INDEX_BYTES,
        SPLIT_TABLES: sum(_decode_split_bytes(facts, layer) for layer in _attention_kinds(facts.model)),
        "rotary tables of fused kernels": rotary_bytes(facts.whole, config, 4) // 2 if can_fuse(facts.whole) else 0,
    }


def _attention_kinds(model: ModelSpec) -> list[LayerSpec]:
    """A layer of each head layout and window, which share a plan and its scratch."""
    kinds: dict[tuple, LayerSpec] = {}
    for layer in model.layers:
        window = layer.window if layer.kind == "sliding" else None
        kinds.setdefault((layer.num_heads, layer.num_kv_heads, layer.head_dim, window), layer)
    return list(kinds.values())


def _decode_split_bytes(facts: StepModel, layer: LayerSpec) -> int:
    """`DecodeWorkspace`: work items, counters, and float32 partial results with their log-sum-exp."""
    config, group = facts.config, layer.num_heads // layer.num_kv_heads
    seqs = int(config.max_num_seqs or 1)
    use = attention_settings(facts.gpu, "decode", config.kv_cache_dtype, layer.head_dim, group, seqs)
    slots = max(1.0, sm_count(facts.gpu) * use.get("ctas_per_sm", 2) / layer.num_kv_heads)
    tiles = -(-int(config.max_model_len or 1) // use.get("tile", 64))
    items = min(seqs - 1 + int(slots), seqs * max(tiles, 1))
    rows = max(FEWEST_ROWS, 1 << (group - 1).bit_length())
    partial = items * layer.num_kv_heads * rows * (layer.head_dim + 1) * PARTIAL_BYTES
    return PLAN_HEADER_BYTES + items * ITEM_BYTES + seqs * layer.num_kv_heads * TABLE_ENTRY_BYTES + partial


@lru_cache(maxsize=256)
def activation_bytes(facts: StepModel, account: type[PeakMeter | CachingAllocator] = CachingAllocator) -> int:
    """The peak of the second of two largest steps, which finds the first one's block tables and segments.

    `account` is how torch counts: on a card with what is too little to split off a block, so that it matters which
    pieces of segments are free beside what is there before.
    """
    meter = account()
    for num_bytes in _held_before(facts):
        meter.take(num_bytes)
    buffers, shape = StepBuffers(facts, meter), prompt_shape(facts.config)
    buffers.run(shape)
    # The first step's token ids are gone by then.
    before = meter.bytes - rounded_ids(shape)
    meter.peak_bytes = 0
    buffers.run(shape)
    return max(0, meter.peak_bytes - rounded_ids(shape) - before)


def _held_before(facts: StepModel) -> list[int]:
    """Sizes of what torch has allocated before the first step: weights, rotary tables, then the executor's tables."""
    config = facts.config
    rotations = 2 * max(1, len(rotations_of(facts.model)))
    rotary = [rotary_bytes(facts.model, config, facts.element) // rotations] * rotations
    tables = {name: size for name, size in table_bytes(facts).items() if name != SPLIT_TABLES}
    split = [_decode_split_bytes(facts, layer) for layer in _attention_kinds(facts.model)]
    loaded = _loaded_bytes(
        facts.whole, compute_dtype(facts.whole, config), config.quantization, config.tensor_parallel_size
    )
    return [*loaded, *rotary, *tables.values(), *split]


@lru_cache(maxsize=64)
def _loaded_bytes(model: ModelSpec, dtype: str, quantization: str | None, size: int) -> tuple[int, ...]:
    """Of each weight of a rank that has a place in a large segment, in the order of loading."""
    sharing, fmt = Sharing(size), weight_format(model, quantization)
    tensors = [*embed_tensors(model, sharing)]
    for layer in model.layers:
        tensors += layer_tensors(model, layer, sharing)
    tensors += head_tensors(model, sharing)
    sizes = (_kept_bytes(tensor, fmt, dtype, size) for tensor in tensors if tensor.part not in ("norm", "extra"))
    return tuple(num_bytes for num_bytes in sizes if num_bytes > SMALL_BYTES)


def _kept_bytes(tensor: WeightTensor, fmt: WeightFormat, dtype: str, size: int) -> int:
    """Bytes of a tensor of one of `size` ranks as it is kept on a card."""
    # One process alone does not pad the vocabulary.
    own = tensor if size > 1 else replace(tensor, rank_elements=tensor.elements)
    return tensor_bytes(own, fmt, dtype) if fmt.kind in KEPT_FORMATS else own.rank_elements * ELEMENT_BYTES[dtype]


def rounded_ids(shape: StepShape) -> int:
    """Bytes of a step's token ids."""
    meter = PeakMeter()
    meter.take(INDEX_BYTES * shape.num_samples)
    return meter.bytes


@lru_cache(maxsize=256)
def graphs_bytes(facts: StepModel, largest: bool) -> tuple[int, int]:
    """What all graphs hold, and what the engine's estimate of it is: from the two largest of each kind.

    They share a pool of segments, the largest captured first; a graph of few requests finds room in it. The driver
    keeps something for each beside it.
    """
    prompts, decodes = (shapes[::-1] for shapes in graph_shapes(facts.config, largest=largest))
    all_held, first_held = [*prompts, *decodes[:2]], [*prompts[:2], *decodes[:2]]
    each, count = card_constants().graph_driver_bytes, len(prompts) + len(decodes)
    held, first = _pool_bytes(facts, all_held), _pool_bytes(facts, first_held)
    return held + count * each, first + (count - len(first_held)) * each


def _pool_bytes(facts: StepModel, shapes: list[StepShape]) -> int:
    """Segments that graphs of `shapes`, captured in this order, share; one more is the capture's own."""
    allocator = CachingAllocator()
    buffers = StepBuffers(facts, allocator)
    for shape in shapes:
        buffers.run(shape)
    return allocator.segment_bytes + SMALL_SEGMENT_BYTES


def library_bytes() -> int:
    """What the engine charges for libraries: workspaces of both streams, and kernels that are or will be loaded."""
    constants = card_constants()
    return NUM_STREAMS * constants.workspace_bytes + constants.modules_bytes


def staged_bytes(config: EngineConfig, block_bytes: int) -> int:
    """On the card for swapped blocks on their way, both directions."""
    swapped = int(config.swap_space * 2**30) // block_bytes if block_bytes else 0
    if not swapped:
        return 0
    return 2 * min(swapped, max(1, STAGED_BYTES // block_bytes)) * block_bytes


def why_eager(model: ModelSpec, gpu: GpuSpec, config: EngineConfig) -> str:
    """Why no graph can hold this model's steps; "" where one can. As `labkit.models.moe.reads_on_host`."""
    if model.moe is None or not any(layer.num_experts for layer in model.layers):
        return ""
    if weight_format(model, config.quantization).kind in KEPT_FORMATS:
        return "experts that are not stored in 16 bit are visited one by one"
    if compute_dtype(model, config) != "bfloat16" or architecture(gpu) < GROUPED_FROM:
        return "the product of all experts at once takes bfloat16 and compute capability 9.0"
    width = model.moe.intermediate_size // config.tensor_parallel_size
    if width % GROUPED_MULTIPLE or model.hidden_size % GROUPED_MULTIPLE:
        return f"the product of all experts at once takes widths that are multiples of {GROUPED_MULTIPLE}"
    return ""


def captures_largest(model: ModelSpec, gpu: GpuSpec, config: EngineConfig) -> bool:
    """Whether the largest step has a graph: where launching it kernel by kernel takes longer than computing it.

    From the data sheet and two shipped constants, not from a clock: the same settings always give the same pool.
    """
    flops, constants = gpu.bf16_flops or gpu.fp16_flops, card_constants()
    if not flops or config.tensor_parallel_size > 1:
        return False
    return num_launches(model) * constants.launch_s > step_flops(model, config) / (flops * constants.flops_share)


def padded_tokens(model: ModelSpec, gpu: GpuSpec, config: EngineConfig) -> int:
    """Tokens up to which a step that lacks places for its prompts is padded to a larger graph: as many as the card
    computes while the host launches a step kernel by kernel. Weights are read first, then tokens multiplied with them.

    From the data sheet, as `captures_largest`; 0 where it says too little, or where ranks share a layer.
    """
    flops, bandwidth, constants = gpu.bf16_flops or gpu.fp16_flops, gpu.mem_bandwidth_bytes_per_s, card_constants()
    if not flops or not bandwidth or config.tensor_parallel_size > 1:
        return 0
    left_s = num_launches(model) * constants.launch_s - card_weights_bytes(model, config) / bandwidth
    return max(
        0, int(left_s * flops * constants.flops_share / sum(_token_flops(model, layer) for layer in model.layers))
    )


def num_launches(model: ModelSpec) -> int:
    """Kernels of a step that is launched one by one."""
    return STEP_LAUNCHES + model.num_layers * (FUSED_LAUNCHES if can_fuse(model) else PLAIN_LAUNCHES)


def step_flops(model: ModelSpec, config: EngineConfig) -> float:
    """FLOP of the largest step of prompts: products of all layers, of the sampled rows' logits, and attention."""
    shape = prompt_shape(config)
    length = min(shape.num_tokens, int(config.max_model_len or 1))
    total = 2.0 * shape.num_samples * model.hidden_size * model.vocab_size
    for layer in model.layers:
        seen = min(length / 2, layer.window or length) if layer.kind == "sliding" else length / 2
        total += shape.num_tokens * (_token_flops(model, layer) + 4.0 * layer.num_heads * layer.head_dim * seen)
    return total


def _token_flops(model: ModelSpec, layer: LayerSpec) -> float:
    """FLOP of a token's products in a layer."""
    heads, keys = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    moe = model.moe if layer.num_experts else None
    width = (
        moe.num_experts_per_tok * moe.intermediate_size if moe else layer.intermediate_size or model.intermediate_size
    )
    return 2.0 * model.hidden_size * (2 * heads + 2 * keys + (3 if model.gated_mlp else 2) * width)
