"""The weight tensors of a model, counted from its spec: names, elements, and how parallel ranks share them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from labkit.specs.model_spec import LayerSpec, ModelSpec

VOCAB_PADDING = 64
# vLLM's MXFP4 kernels take expert widths in these steps: gpt-oss-120b loads as 64.4 GiB, not 60.8 (case N62).
MXFP4_PADDING = 256
UNCOUNTED = "(not counted)"


@dataclass(frozen=True)
class WeightTensor:
    """One tensor as an engine allocates it, Q, K and V fused and gate and up fused.

    Attributes:
        part: "embed", "lm_head", "attention", "state", "mlp", "shared_experts", "experts", "router", "norm" or "extra".
        elements: elements in the whole model.
        rank_elements: elements on one rank.
        row_elements: elements that one output channel has (its input width), for the scales of quantised weights.
        is_matrix: False for norms and biases, which stay at 16 bit.
    """

    part: str
    elements: int
    rank_elements: int
    row_elements: int = 1
    is_matrix: bool = True


@dataclass(frozen=True)
class Sharing:
    """How many ranks share a tensor: `tp` cards share each layer, experts are spread over `experts` cards whole."""

    tp: int = 1
    dp: int = 1
    expert_parallel: bool = False

    def columns(self, width: int) -> int:
        """The columns of one rank, of `width`."""
        return math.ceil(width / self.tp)


def layer_tensors(model: ModelSpec, layer: LayerSpec, share: Sharing) -> Iterator[WeightTensor]:
    """The tensors of one decoder layer."""
    if layer.kind == "mla":
        yield from _mla_tensors(model, layer, share)
    elif layer.kind not in ("none", "state"):
        yield from _attention_tensors(model, layer, share)
    if layer.state is not None:
        elements = layer.state.num_parameters
        yield WeightTensor("state", elements, math.ceil(elements / share.tp), model.hidden_size)
    width = model.intermediate_size if layer.intermediate_size is None else layer.intermediate_size
    if layer.num_experts and model.moe is not None:
        yield from _moe_tensors(model, layer.num_experts, share)
        width = width if model.moe.dense_beside else 0
    yield from _mlp_tensors(model, width, share, "mlp")
    norms = (4 if model.sandwich_norms else model.norms_per_layer) * _norm_elements(model)
    if norms:
        yield _bias("norm", norms, norms)


def embed_tensors(model: ModelSpec, share: Sharing) -> Iterator[WeightTensor]:
    """The token embedding, its vocabulary padded as vLLM pads it before it is divided."""
    yield _vocabulary(model, share, "embed")


def head_tensors(model: ModelSpec, share: Sharing) -> Iterator[WeightTensor]:
    """The last norm and the output matrix; the matrix is the embedding itself where they are tied."""
    norms = _norm_elements(model)
    if model.final_norm and norms:
        yield _bias("norm", norms, norms)
    if not model.tie_word_embeddings and not model.is_embedding:
        yield _vocabulary(model, share, "lm_head")
    if model.head_bias:
        yield _bias("lm_head", model.vocab_size, share.columns(model.vocab_size))


def extra_tensors(model: ModelSpec, share: Sharing) -> Iterator[WeightTensor]:
    """Parts outside the decoder (vision tower, learned positions), divided like the layers."""
    for _, elements in model.extra_weights:
        yield WeightTensor("extra", elements, share.columns(elements), is_matrix=False)


def _norm_elements(model: ModelSpec) -> int:
    return {"layer": 2, "none": 0}.get(model.norm, 1) * model.hidden_size


def vocabulary_rows(vocab_size: int, tp: int) -> int:
    """Rows of one rank's share of the vocabulary, padded as vLLM pads it."""
    return math.ceil(vocab_size / (VOCAB_PADDING * tp)) * VOCAB_PADDING


def _vocabulary(model: ModelSpec, share: Sharing, part: str) -> WeightTensor:
    hidden = model.hidden_size
    return WeightTensor(part, model.vocab_size * hidden, vocabulary_rows(model.vocab_size, share.tp) * hidden, hidden)


def _matrix(part: str, inputs: int, outputs: int, share: Sharing, divided: bool = True) -> WeightTensor:
    elements = inputs * outputs
    return WeightTensor(part, elements, math.ceil(elements / share.tp) if divided else elements, inputs)


def _bias(part: str, width: int, rank_width: int) -> WeightTensor:
    return WeightTensor(part, width, rank_width, is_matrix=False)


def _attention_tensors(model: ModelSpec, layer: LayerSpec, share: Sharing) -> Iterator[WeightTensor]:
    hidden, query = model.hidden_size, layer.num_heads * layer.head_dim
    gated = query * (2 if model.output_gate else 1)
    v_dim = layer.head_dim if layer.v_head_dim is None else layer.v_head_dim
    width = layer.head_dim if layer.shares_key_value else layer.head_dim + v_dim
    shares = layer.shares_kv_with is not None
    kv = 0 if shares else layer.num_kv_heads * width
    rank_qkv = share.columns(gated) + (0 if shares else max(1, layer.num_kv_heads // share.tp) * width)
    yield WeightTensor("attention", hidden * (gated + kv), hidden * rank_qkv, hidden)
    yield _matrix("attention", layer.num_heads * v_dim, hidden, share)
    if model.qkv_bias:
        yield _bias("attention", gated + kv, rank_qkv)
    if model.attention_bias:
        yield _bias("attention", hidden, hidden)
    if model.qk_norm:
        keys = 0 if shares else layer.head_dim * (layer.num_kv_heads if model.qk_norm_full_width else 1)
        queries = query if model.qk_norm_full_width else layer.head_dim
        yield _bias("norm", queries + keys, queries + keys)
    if model.attention_sinks:
        yield _bias("attention", layer.num_heads, share.columns(layer.num_heads))


def _mla_tensors(model: ModelSpec, layer: LayerSpec, share: Sharing) -> Iterator[WeightTensor]:
    hidden, heads, rank = model.hidden_size, layer.num_heads, layer.kv_lora_rank
    query = heads * (layer.qk_nope_head_dim + layer.qk_rope_head_dim)
    v_dim = layer.v_head_dim or layer.head_dim
    if layer.q_lora_rank:
        yield _matrix("attention", hidden, layer.q_lora_rank, share, divided=False)
        yield _bias("norm", layer.q_lora_rank, layer.q_lora_rank)
        yield _matrix("attention", layer.q_lora_rank, query, share)
    else:
        yield _matrix("attention", hidden, query, share)
    yield _matrix("attention", hidden, rank + layer.qk_rope_head_dim, share, divided=False)
    yield _bias("norm", rank, rank)
    yield _matrix("attention", rank, heads * (layer.qk_nope_head_dim + v_dim), share)
    yield _matrix("attention", heads * v_dim, hidden, share)
    if layer.index_num_heads:
        index = layer.index_num_heads * layer.index_head_dim
        yield _matrix("attention", layer.q_lora_rank or hidden, index, share, divided=False)
        yield _matrix("attention", hidden, layer.index_head_dim + layer.index_num_heads, share, divided=False)
        yield _bias("norm", 2 * layer.index_head_dim, 2 * layer.index_head_dim)


def _mlp_tensors(model: ModelSpec, width: int, share: Sharing, part: str) -> Iterator[WeightTensor]:
    if not width:
        return
    hidden, fused = model.hidden_size, (2 if model.gated_mlp else 1) * width
    yield _matrix(part, hidden, fused, share)
    yield _matrix(part, width, hidden, share)
    if model.mlp_bias:
        yield _bias(part, fused + hidden, share.columns(fused) + hidden)


def _moe_tensors(model: ModelSpec, num_experts: int, share: Sharing) -> Iterator[WeightTensor]:
    """Experts of one layer: spread whole over tp·dp cards, or each cut over them."""
    moe, hidden, cards = model.moe, model.hidden_size, share.tp * share.dp
    if moe is None:
        return
    width, fused = moe.intermediate_size, 2 if model.gated_mlp else 1
    on_rank = math.ceil(num_experts / cards) if share.expert_parallel else num_experts
    rank_width = width if share.expert_parallel else math.ceil(width / cards)
    if model.weight_format.kind == "mxfp4":
        rank_width = math.ceil(rank_width / MXFP4_PADDING) * MXFP4_PADDING
    for columns, rank_columns, inputs in ((fused * width, fused * rank_width, hidden), (width, rank_width, width)):
        yield WeightTensor("experts", num_experts * columns * hidden, on_rank * rank_columns * hidden, inputs)
    if moe.expert_bias:
        yield _bias("experts", num_experts * (fused * width + hidden), on_rank * (fused * rank_width + hidden))
    if moe.router_bias:
        yield _bias("router", num_experts, num_experts)
    yield _matrix("router", hidden, num_experts, share, divided=False)
    yield from _mlp_tensors(model, moe.shared_intermediate_size, share, "shared_experts")
    if moe.shared_gate:
        yield _bias("router", hidden, hidden)


def count_parameters(model: ModelSpec) -> int:
    """Parameters of the model, tied embeddings once: the sum over its tensors.

    Parts beside a catalogue's text model whose name ends in "(not counted)" are loaded but not in the count.
    """
    whole = Sharing()
    model = model.replace(extra_weights=tuple(part for part in model.extra_weights if not part[0].endswith(UNCOUNTED)))
    total = sum(tensor.elements for tensor in (*embed_tensors(model, whole), *head_tensors(model, whole)))
    total += sum(tensor.elements for tensor in extra_tensors(model, whole))
    per_layer: dict[tuple, int] = {}
    for layer in model.layers:
        key = layer_key(layer)
        if key not in per_layer:
            per_layer[key] = sum(tensor.elements for tensor in layer_tensors(model, layer, whole))
        total += per_layer[key]
    return total


def layer_key(layer: LayerSpec) -> tuple:
    """What decides the sizes of a layer's tensors; equal for equal layers."""
    return (
        layer.kind == "mla",
        layer.num_heads,
        layer.num_kv_heads,
        layer.head_dim,
        layer.v_head_dim,
        layer.kv_lora_rank,
        layer.q_lora_rank,
        layer.shares_kv_with is None,
        layer.shares_key_value,
        layer.state,
        layer.num_experts,
        layer.intermediate_size,
        layer.index_num_heads,
        layer.kind in ("none", "state"),
    )
