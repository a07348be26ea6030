"""Memory of labkit's own engine as its executors allocate it: all parts on a CPU, the pool on a card."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from labkit.errors import OutOfRangeError
from labkit.memory.dtypes import ELEMENT_BYTES, KvFormat, kv_format
from labkit.memory.kv_layout import KvLayout, build_layout
from labkit.memory.tensors import Sharing, vocabulary_rows
from labkit.memory.weights import StageLayers, stage_tensors
from labkit.specs.engine_config import EngineConfig
from labkit.specs.model_spec import LayerSpec, ModelSpec

TABLE_ENTRY_BYTES = 4
TOKEN_SCALED = ("int8_per_token_head", "fp8_per_token_head")
FIRST_POSITIONS = 8192
# As `labkit.engine.paged_attention` tiles attention with capped scores.
TILE_ROWS = 128
# As `labkit.models.linear.project_few` knows few.
FEW_ROWS = 8
# Taking 100 GiB from a card's driver and giving it back costs most of a second; pools of whole multiples find memory
# of the right size after a change of format.
POOL_MULTIPLE_BYTES, POOL_MULTIPLE_FROM_BYTES = 64 * 2**20, 4 * 2**30
POOL_ALIGNMENT_BYTES = 256


@dataclass(frozen=True)
class EngineParts:
    """Bytes of one engine on a CPU; of each rank where several processes share the model.

    Attributes:
        weights_bytes: tensors in the compute type and the rotary tables; formats of files are undone in loading.
        activation_bytes: peak of a step's temporaries.
        layout: one group of full pages: windows are exact by mask, not by freeing blocks.
    """

    weights_bytes: int
    activation_bytes: int
    layout: KvLayout


def check_shares(model: ModelSpec, size: int) -> None:
    """Whether `size` ranks can share every layer: whole heads and equal MLP columns on each.

    Raises:
        OutOfRangeError: they cannot; says the largest number below that can.
    """
    if not _is_shared(model, size):
        layer = next(layer for layer in model.layers if not _is_layer_shared(model, layer, size))
        raise OutOfRangeError(
            f"{size} ranks do not divide {layer.num_heads} heads, {layer.num_kv_heads} KV heads and an MLP of "
            f"{_mlp_width(model, layer)}",
            works=str(next(fewer for fewer in range(size - 1, 0, -1) if _is_shared(model, fewer))),
            knob="tensor_parallel_size",
        )


def _is_shared(model: ModelSpec, size: int) -> bool:
    return all(_is_layer_shared(model, layer, size) for layer in model.layers)


def _is_layer_shared(model: ModelSpec, layer: LayerSpec, size: int) -> bool:
    heads, kv_heads = layer.num_heads, max(1, layer.num_kv_heads)
    return heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0) and _mlp_width(model, layer) % size == 0


def _mlp_width(model: ModelSpec, layer: LayerSpec) -> int:
    if layer.num_experts and model.moe is not None:
        return model.moe.intermediate_size
    return layer.intermediate_size or model.intermediate_size


def model_of_rank(model: ModelSpec, size: int) -> ModelSpec:
    """`model` with the heads and the MLP columns of one rank of `size`; KV heads are repeated beyond their number."""
    if size == 1:
        return model
    moe = model.moe and replace(model.moe, intermediate_size=model.moe.intermediate_size // size)
    layers = tuple(_layer_of_rank(layer, size) for layer in model.layers)
    return model.replace(layers=layers, intermediate_size=model.intermediate_size // size, moe=moe)


def _layer_of_rank(layer: LayerSpec, size: int) -> LayerSpec:
    width = layer.intermediate_size
    return replace(
        layer,
        num_heads=layer.num_heads // size,
        num_kv_heads=max(1, layer.num_kv_heads // size),
        intermediate_size=None if width is None else width // size,
    )


def engine_parts(model: ModelSpec, config: EngineConfig) -> EngineParts:
    """The parts that do not depend on the number of blocks; `config` is resolved."""
    rank = model_of_rank(model, config.tensor_parallel_size)
    return EngineParts(
        weights_bytes=_weights_bytes(model, config),
        activation_bytes=_activation_bytes(rank, config),
        layout=build_layout(
            [layer for layer in rank.layers if layer.kind in ("full", "sliding", "chunked")],
            kv_format(config.kv_cache_dtype, config.dtype),
            dtype=config.dtype,
            block_size=config.block_size,
            windows=False,
        ),
    )


def pool_bytes(available_bytes: int) -> int:
    """What the pool takes on a card of the bytes that the other parts leave."""
    multiple = POOL_MULTIPLE_BYTES if available_bytes > POOL_MULTIPLE_FROM_BYTES else 1
    return available_bytes // multiple * multiple


def blocks_in_pool(num_bytes: int, block_bytes: int, num_tensors: int) -> int:
    """Blocks in an allocation that holds `num_tensors` tensors, each at an aligned start."""
    return max(0, num_bytes - POOL_ALIGNMENT_BYTES * num_tensors) // block_bytes if block_bytes else 0


def pool_tensors(model: ModelSpec, kv_cache_dtype: str) -> int:
    """Tensors in the pool on a card: K and V of each layer, and their scales where each token has its own."""
    return len(model.layers) * (4 if kv_cache_dtype in TOKEN_SCALED else 2)


def block_tables_bytes(config: EngineConfig, num_blocks: int) -> int:
    """One int32 entry for each block of the longest request, for each running request."""
    return (config.max_num_seqs or 0) * longest_table(config, num_blocks) * TABLE_ENTRY_BYTES


def longest_table(config: EngineConfig, num_blocks: int) -> int:
    """Blocks of the longest request that the pool can hold."""
    return min(math.ceil((config.max_model_len or 0) / config.block_size), num_blocks)


def scratch_bytes(model: ModelSpec, config: EngineConfig, num_blocks: int) -> int:
    """Buffers into which one sequence's blocks are gathered: its longest table in the compute type.

    Types stored otherwise need the raw rows beside it, their scales (int8) or table indices (fp8).
    """
    rank = model_of_rank(model, config.tensor_parallel_size)
    layers = [layer for layer in rank.layers if layer.kind in ("full", "sliding", "chunked")]
    if not layers:
        return 0
    tokens = longest_table(config, num_blocks) * config.block_size
    element = ELEMENT_BYTES[config.dtype]
    fmt = kv_format(config.kv_cache_dtype, config.dtype)
    keys = max(layer.num_kv_heads * layer.head_dim for layer in layers)
    values = max(layer.num_kv_heads * _v_dim(layer) for layer in layers)
    total = tokens * (keys + values) * element
    if fmt.name != config.dtype:
        total += tokens * (keys + values) * fmt.bits // 8
    if fmt.name == "int8_per_token_head":
        total += tokens * max(layer.num_kv_heads for layer in layers) * 4
    return total + (tokens * max(keys, values) * 4 if _is_float8(fmt) else 0)


def _is_float8(fmt: KvFormat) -> bool:
    return fmt.name in ("fp8", "fp8_e4m3", "fp8_e5m2")


def _v_dim(layer: LayerSpec) -> int:
    return layer.v_head_dim or layer.head_dim


def _weights_bytes(model: ModelSpec, config: EngineConfig) -> int:
    element = ELEMENT_BYTES[config.dtype]
    whole = StageLayers(0, model.num_layers, model.num_layers)
    norm_element, size = 4 if model.norm_offset else element, config.tensor_parallel_size
    total = sum(
        number
        # One process alone does not pad the vocabulary.
        * (tensor.rank_elements if size > 1 else tensor.elements)
        * (norm_element if tensor.part == "norm" else element)
        for tensor, number in stage_tensors(model, whole, Sharing(size))
        if tensor.part != "extra"
    )
    return total + rotary_bytes(model, config, element)


def rotary_bytes(model: ModelSpec, config: EngineConfig, element: int) -> int:
    """Tables of cos and signed sin, one for each distinct rotation."""
    positions = max(min(model.max_position_embeddings, FIRST_POSITIONS), config.max_model_len or 0)
    kinds = {
        (layer.head_dim, layer.rope_theta, layer.kind == "sliding" and model.rope_local is not None)
        for layer in model.layers
        if layer.uses_rope
    }
    widths = sum(int(head_dim * model.rope.partial_rotary_factor) for head_dim, _, _ in kinds)
    return positions * widths * 2 * element


def _activation_bytes(model: ModelSpec, config: EngineConfig) -> int:
    """The larger of two moments of a step: the widest layer, and the logits of every running request.

    In a layer these rows are alive at once (T tokens): the residual before and after attention and the normed input,
    then gate and up (2I), their product (I) and the output; or Q, K, V with their rotated copies and attention's
    results. While sampling: hidden states and float32 logits of max_num_seqs rows.
    """
    element, tokens = ELEMENT_BYTES[config.dtype], config.max_num_batched_tokens or 0
    rows = min(config.max_num_seqs or 0, tokens)
    layer_peak = max((_layer_bytes(model, layer, config) for layer in model.layers), default=0)
    logits = rows * _logit_bytes(model.vocab_size, element, rows, config.tensor_parallel_size)
    sampling = 0 if model.is_embedding else logits + (tokens + rows) * model.hidden_size * element
    return max(layer_peak, sampling)


def _logit_bytes(vocab_size: int, element: int, rows: int, size: int) -> int:
    """Bytes alive for one row of logits at the worst moment."""
    cast = 0 if element == 4 else vocab_size * (4 + element)
    if size > 1:
        # A rank's share, those of all ranks, and these put in order.
        return max(cast, (vocabulary_rows(vocab_size, size) * (1 + size) + vocab_size) * element)
    # Few rows are computed the other way round and turned (labkit.models.linear); 16-bit ones are cast.
    turned = 4 if rows <= FEW_ROWS else 0
    return cast or vocab_size * (4 + turned)


def _layer_bytes(model: ModelSpec, layer: LayerSpec, config: EngineConfig) -> int:
    """Bytes alive in the wider half of a layer, all tokens of a step.

    Capped scores are computed apart from the kernel that needs no memory for them: `TILE_ROWS` queries at a time over
    the longest request, float32 scores and weights.
    """
    element, tokens = ELEMENT_BYTES[config.dtype], config.max_num_batched_tokens or 0
    hidden, query = model.hidden_size, layer.num_heads * layer.head_dim
    keys, values = layer.num_kv_heads * layer.head_dim, layer.num_kv_heads * _v_dim(layer)
    results = (2 if model.attention_softcap is None else 1) * layer.num_heads * _v_dim(layer)
    copies = 3 if model.qk_norm else 2
    attention = (2 * hidden + (query + keys + values) + (query + keys) * copies + results) * tokens * element
    if model.attention_softcap is not None:
        weights = 8 if element == 4 else 8 + element
        attention += layer.num_heads * min(TILE_ROWS, tokens) * (config.max_model_len or 0) * weights
    width = model.intermediate_size if layer.intermediate_size is None else layer.intermediate_size
    mlp = (4 * hidden + (3 if model.gated_mlp else 2) * width) * tokens * element
    return max(attention, mlp)
