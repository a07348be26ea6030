"""Bytes of a model's weights on one rank, by weight format, as torch's allocator holds them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from labkit.memory.dtypes import ELEMENT_BYTES
from labkit.memory.tensors import (
    Sharing,
    WeightTensor,
    embed_tensors,
    extra_tensors,
    head_tensors,
    layer_key,
    layer_tensors,
)
from labkit.specs.model_spec import ModelSpec, WeightFormat
from labkit.specs.quantized_names import QUANTIZATION_FORMATS

MIB = 2**20


@dataclass(frozen=True)
class StageLayers:
    """The layers `first` up to `last` (not included) of one pipeline stage, of `count` layers."""

    first: int
    last: int
    count: int

    @property
    def has_embedding(self) -> bool:
        """True for the stage that embeds tokens."""
        return self.first == 0

    @property
    def has_head(self) -> bool:
        """True for the stage that makes logits and samples."""
        return self.last == self.count


def pipeline_stages(num_layers: int, stages: int) -> list[StageLayers]:
    """Layers of each stage as vLLM divides them: the rest goes to the stages before the last, from the back.

    Source: `get_pp_indices` of vLLM's distributed utilities.
    """
    sizes = [num_layers // stages] * stages
    for index in range(2, num_layers % stages + 2):
        sizes[-index] += 1
    edges = [sum(sizes[:index]) for index in range(stages + 1)]
    return [StageLayers(edges[index], edges[index + 1], num_layers) for index in range(stages)]


def tensor_bytes(tensor: WeightTensor, fmt: WeightFormat, dtype: str) -> int:
    """Bytes of one rank's part of `tensor`, scales and zero points included."""
    plain_bytes = tensor.rank_elements * ELEMENT_BYTES[dtype]
    if not tensor.is_matrix or fmt.kind in ("16bit", "32bit") or tensor.part in fmt.unquantized:
        return plain_bytes
    content = math.ceil(tensor.rank_elements * fmt.bits / 8)
    scales = _num_scales(tensor, fmt)
    zeros = math.ceil(scales * fmt.bits / 8) if fmt.has_zero_points else 0
    return content + scales * fmt.scale_bytes + zeros


def _num_scales(tensor: WeightTensor, fmt: WeightFormat) -> int:
    if fmt.group_size > 0:
        return math.ceil(tensor.rank_elements / fmt.group_size)
    return 1 if fmt.group_size < 0 else math.ceil(tensor.rank_elements / tensor.row_elements)


def allocated_bytes(num_bytes: int) -> int:
    """What torch's caching allocator counts for one tensor of `num_bytes`.

    A large request takes a segment rounded up to 2 MiB, and a rest of 1 MiB or less is not split off but counted
    with the tensor (c10/cuda/CUDACachingAllocator.cpp: kMinLargeAlloc, kRoundLarge, kSmallSize).
    """
    if num_bytes < 10 * MIB:
        return math.ceil(num_bytes / 512) * 512
    rest = -num_bytes % (2 * MIB)
    return num_bytes + (rest if rest <= MIB else 0)


def stage_tensors(model: ModelSpec, stage: StageLayers, share: Sharing) -> list[tuple[WeightTensor, int]]:
    """The tensors of one rank of one stage, each with how often it occurs."""
    counted: dict[tuple, int] = {}
    first_of: dict[tuple, int] = {}
    for index in range(stage.first, stage.last):
        key = layer_key(model.layers[index])
        counted[key] = counted.get(key, 0) + 1
        first_of.setdefault(key, index)
    tensors = [
        (tensor, counted[key])
        for key, index in first_of.items()
        for tensor in layer_tensors(model, model.layers[index], share)
    ]
    tied_copy = stage.has_head and model.tie_word_embeddings and not stage.has_embedding
    if stage.has_embedding or tied_copy:
        tensors += [(tensor, 1) for tensor in embed_tensors(model, share)]
    if stage.has_embedding:
        tensors += [(tensor, 1) for tensor in extra_tensors(model, share)]
    if stage.has_head:
        tensors += [(tensor, 1) for tensor in head_tensors(model, share)]
    return tensors


def weight_format(model: ModelSpec, quantization: str | None) -> WeightFormat:
    """The format of the matrices: what the model says, else what `--quantization` makes of 16-bit weights."""
    if quantization is None or model.weight_format.kind not in ("16bit", "32bit"):
        return model.weight_format
    return QUANTIZATION_FORMATS.get(quantization, model.weight_format)


def counted_bytes(model: ModelSpec, fmt: WeightFormat, dtype: str) -> int:
    """Bytes of the whole model as its files hold it, counted from the spec."""
    whole = StageLayers(0, model.num_layers, model.num_layers)
    return sum(tensor_bytes(tensor, fmt, dtype) * number for tensor, number in stage_tensors(model, whole, Sharing()))


def stage_weights_bytes(
    model: ModelSpec, stage: StageLayers, share: Sharing, fmt: WeightFormat, dtype: str, *, allocator: bool = True
) -> int:
    """Bytes of the weights on one rank of `stage`; `allocator` adds what torch's allocator rounds up."""
    total = 0
    for tensor, number in stage_tensors(model, stage, share):
        num_bytes = tensor_bytes(tensor, fmt, dtype)
        total += number * (allocated_bytes(num_bytes) if allocator else num_bytes)
    return total


def rope_cache_bytes(model: ModelSpec, dtype: str, max_model_len: int) -> int:
    """The table of cosines and sines that an engine keeps beside the weights, one for each distinct rotation."""
    widths = {
        (layer.qk_rope_head_dim or layer.head_dim, layer.kind == "sliding" and model.rope_local is not None)
        for layer in model.layers
        if layer.kind not in ("state", "none", "encoder") and layer.uses_rope
    }
    positions = max(model.max_position_embeddings, max_model_len)
    rotated = sum(int(width * model.rope.partial_rotary_factor) for width, _ in widths)
    return positions * rotated * ELEMENT_BYTES[dtype]


def absorbed_mla_bytes(model: ModelSpec, stage: StageLayers, share: Sharing, dtype: str) -> int:
    """The copies of MLA's up-projections that decode uses absorbed into Q and O, made after loading."""
    total = 0
    for layer in model.layers[stage.first : stage.last]:
        if layer.kind == "mla":
            heads = share.columns(layer.num_heads)
            total += heads * layer.kv_lora_rank * (layer.qk_nope_head_dim + (layer.v_head_dim or layer.head_dim))
    return total * ELEMENT_BYTES[dtype]
