"""Whether the cards of vLLM can divide a model: what its layers assert of heads, columns, stages and weight blocks."""

from __future__ import annotations

import math
from collections.abc import Iterator

from labkit.errors import OutOfRangeError
from labkit.memory.weights import weight_format
from labkit.specs.engine_config import EngineConfig
from labkit.specs.model_spec import LayerSpec, ModelSpec, WeightFormat

# Formats whose groups lie along one axis of a matrix; MXFP4's widths are padded instead.
GROUPED_FORMATS = ("awq", "gptq", "int4", "nvfp4")


def check_division(model: ModelSpec, config: EngineConfig) -> None:
    """Whether every card gets whole heads and equal columns, and every pipeline stage a layer.

    Raises:
        OutOfRangeError: they do not; says the largest number of cards or stages below that does.
    """
    stages, cards = config.pipeline_parallel_size, config.tensor_parallel_size
    if stages > model.num_layers:
        raise OutOfRangeError(
            f"{model.num_layers} layers are too few for {stages} pipeline stages",
            needed="a layer for each stage", works=str(model.num_layers), knob="pipeline_parallel_size",
        )  # fmt: skip
    why = _undivided(model, config, cards)
    if why:
        fewer = [size for size in range(cards - 1, 0, -1) if not _undivided(model, config, size)]
        if not fewer:
            raise OutOfRangeError(why, works="--enable-expert-parallel", knob="data_parallel_size")
        raise OutOfRangeError(why, works=str(fewer[0]), knob="tensor_parallel_size")


def split_weight_block(model: ModelSpec, config: EngineConfig) -> str:
    """Why vLLM does not load quantised weights on so many cards: a card would get part of a block; "" where it loads.

    Source: `create_weights` of its block-fp8, AWQ and GPTQ layers.
    """
    cards = config.tensor_parallel_size
    why = _split_block(model, config, cards)
    if not why:
        return ""
    sizes = (size for size in range(cards - 1, 1, -1) if not _undivided(model, config, size))
    fewer = next((size for size in sizes if not _split_block(model, config, size)), 1)
    others = " or --enable-expert-parallel" if "expert" in why and not config.enable_expert_parallel else ""
    return f"{why}; {fewer}{others} works"


def _undivided(model: ModelSpec, config: EngineConfig, cards: int) -> str:
    """Which part of `model` cannot be divided over `cards`, "" where all can."""
    if cards * config.data_parallel_size == 1:
        return ""
    for layer in dict.fromkeys(model.layers):
        if layer.num_heads % cards:
            return f"{layer.num_heads} attention heads cannot be divided over {cards} cards"
        kv_heads = 0 if layer.kind == "mla" else layer.num_kv_heads
        if kv_heads and kv_heads % cards and cards % kv_heads:
            return f"{kv_heads} KV heads can neither be divided over {cards} cards nor be repeated evenly on them"
        for word, width, over in _widths(model, config, layer, cards):
            if width % over:
                return f"an MLP of {width:,} {word}columns cannot be divided over {over} cards"
    return ""


def _split_block(model: ModelSpec, config: EngineConfig, cards: int) -> str:
    fmt = weight_format(model, config.quantization)
    block = _block_width(fmt)
    if not block or cards == 1:
        return ""
    for layer in dict.fromkeys(model.layers):
        for word, width, over in _widths(model, config, layer, cards):
            is_kept = ("experts" if word == "expert " else "mlp") in fmt.unquantized
            if not is_kept and over > 1 and width / over % block:
                share = f"{width:,} {word}columns over {over} cards are {width / over:g}"
                return f"{share}, no multiple of the weights' blocks of {block}"
    return ""


def _widths(
    model: ModelSpec, config: EngineConfig, layer: LayerSpec, cards: int
) -> Iterator[tuple[str, int, int]]:  # fmt: skip
    """The MLPs of a layer: a word for them, their columns, and over how many cards these are divided."""
    moe = model.moe
    dense = model.intermediate_size if layer.intermediate_size is None else layer.intermediate_size
    if not layer.num_experts or moe is None:
        yield "", dense, cards
        return
    if moe.dense_beside:
        yield "", dense, cards
    yield "shared ", moe.shared_intermediate_size, cards
    # Data-parallel ranks cut the experts further, unless they lie whole on them; MXFP4's are padded.
    if not config.enable_expert_parallel and weight_format(model, config.quantization).kind != "mxfp4":
        yield "expert ", moe.intermediate_size, cards * config.data_parallel_size


def _block_width(fmt: WeightFormat) -> int:
    """Columns that share a scale, 0 where any number can be cut off."""
    if fmt.kind == "fp8" and fmt.group_size > 0:
        return math.isqrt(fmt.group_size)
    is_grouped = fmt.kind in GROUPED_FORMATS and fmt.method != "bitsandbytes"
    return max(fmt.group_size, 0) if is_grouped else 0
