"""`StepCost`: the bytes and products of one engine step on one card, counted from model and configuration."""

from __future__ import annotations

from dataclasses import dataclass

from labkit.memory.dtypes import ELEMENT_BYTES, compute_dtype, kv_format, stored_kv_dtype
from labkit.memory.kv_layout import pages_of
from labkit.memory.tensors import Sharing, WeightTensor
from labkit.memory.weights import StageLayers, stage_tensors, tensor_bytes, weight_format
from labkit.specs.engine_config import EngineConfig
from labkit.specs.model_spec import LayerSpec, ModelSpec

_HEAD, _EXPERTS = "head", "experts"


@dataclass(frozen=True)
class MatrixCost:
    """Weights of one kind on one card: bytes read, and elements that each token is multiplied with."""

    num_bytes: float = 0.0
    num_elements: float = 0.0


@dataclass(frozen=True)
class Matrix:
    """Weights of one shape on one card: outputs and inputs of each, how many a step multiplies with, and whether they
    make logits. Cards that share a matrix are taken to share its outputs."""

    outputs: float
    inputs: float
    number: int
    is_head: bool


@dataclass(frozen=True)
class KvCost:
    """Attention layers of one kind on one card.

    Attributes:
        num_layers: layers of this kind.
        token_bytes: bytes read for one token of context in one layer.
        window: tokens that a query sees at most, 0 for all.
        decode_flops: FLOP of one query with one token of context in one layer, from the cache (MLA: in the latent).
        prefill_flops: the same in prefill, where K and V are whole.
    """

    num_layers: int
    token_bytes: float
    window: int
    decode_flops: float
    prefill_flops: float


@dataclass(frozen=True)
class StepCost:
    """What one step reads and multiplies on one card, per token and per request.

    Attributes:
        dense: layers without routed experts. head: output matrix, used by rows that give a token. experts: all
            routed experts that live on the card.
        weight_kind: the matrices' format, such as "16bit", "fp8", "awq".
        num_experts, experts_per_tok: of a layer; 0 without.
        matrices: the same products as `dense` and `head`, one by one.
        elementwise_bytes: read and written for each token by norms, rotations and activations of all layers.
        kv: attention layers by kind.
        num_layers, num_moe_layers, vocab_size: of the model; hidden_bytes: of one token's activations.
        tensor_parallel_size: cards that share each layer.
    """

    dense: MatrixCost
    head: MatrixCost
    experts: MatrixCost
    weight_kind: str
    num_experts: int
    experts_per_tok: int
    kv: tuple[KvCost, ...]
    num_layers: int
    num_moe_layers: int
    vocab_size: int
    hidden_bytes: int
    tensor_parallel_size: int
    kv_is_quantized: bool
    matrices: tuple[Matrix, ...] = ()
    elementwise_bytes: float = 0.0


def step_cost(model: ModelSpec, config: EngineConfig) -> StepCost:
    """The cost of `model` under `config` (tensor parallelism, dtype, KV dtype, quantization); other knobs are read
    by the scheduler."""
    dtype = compute_dtype(model, config)
    form = weight_format(model, config.quantization)
    share = Sharing(config.tensor_parallel_size, 1, config.enable_expert_parallel)
    sums: dict[str, list[float]] = {"dense": [0.0, 0.0], _HEAD: [0.0, 0.0], _EXPERTS: [0.0, 0.0]}
    matrices: dict[tuple[float, float, bool], int] = {}
    for tensor, number in stage_tensors(model, StageLayers(0, model.num_layers, model.num_layers), share):
        for name in _uses(tensor, model):
            sums[name][0] += number * tensor_bytes(tensor, form, dtype)
            sums[name][1] += number * tensor.rank_elements if tensor.is_matrix else 0
            if tensor.is_matrix and name != _EXPERTS:
                inputs = float(tensor.row_elements)
                key = (tensor.rank_elements / inputs, inputs, name == _HEAD)
                matrices[key] = matrices.get(key, 0) + number
    moe = model.moe
    fmt = kv_format(stored_kv_dtype(model, config), dtype)
    return StepCost(
        dense=MatrixCost(*sums["dense"]),
        head=MatrixCost(*sums[_HEAD]),
        experts=MatrixCost(*sums[_EXPERTS]),
        weight_kind=form.kind,
        num_experts=moe.num_experts if moe else 0,
        experts_per_tok=moe.num_experts_per_tok if moe else 0,
        kv=_kv_costs(model, config, dtype),
        num_layers=model.num_layers,
        num_moe_layers=sum(1 for layer in model.layers if layer.num_experts),
        vocab_size=model.vocab_size,
        hidden_bytes=model.hidden_size * ELEMENT_BYTES[dtype],
        tensor_parallel_size=config.tensor_parallel_size,
        kv_is_quantized=fmt.bits < 16,
        matrices=tuple(Matrix(*key[:2], number, key[2]) for key, number in matrices.items()),
        elementwise_bytes=float(ELEMENT_BYTES[dtype] * sum(_elementwise(model, layer) for layer in model.layers))
        / config.tensor_parallel_size,
    )


def _elementwise(model: ModelSpec, layer: LayerSpec) -> int:
    """Numbers that a layer's kernels between products read and write for one token: two norms with their sum, the
    heads' rotation, and the gated activation."""
    heads = layer.num_heads + 2 * layer.num_kv_heads
    width = model.intermediate_size if layer.intermediate_size is None else layer.intermediate_size
    return 8 * model.hidden_size + 2 * heads * layer.head_dim + 3 * (width or 0)


def _uses(tensor: WeightTensor, model: ModelSpec) -> tuple[str, ...]:
    """Which part of a step reads the tensor; of the embedding only a few rows are read, unless it is the head too."""
    if tensor.part == "lm_head":
        return (_HEAD,)
    if tensor.part == "embed":
        return (_HEAD,) if model.tie_word_embeddings and not model.is_embedding else ()
    if tensor.part == "extra":
        return ()
    return (_EXPERTS,) if tensor.part == "experts" else ("dense",)


def _kv_costs(model: ModelSpec, config: EngineConfig, dtype: str) -> tuple[KvCost, ...]:
    fmt = kv_format(stored_kv_dtype(model, config), dtype)
    tp = config.tensor_parallel_size
    counted: dict[tuple[float, int, float, float], int] = {}
    for layer in model.layers:
        if layer.kind in ("none", "state"):
            continue
        pages = pages_of(layer, fmt, config.block_size, tp, windows=True)
        key = (float(sum(page.token_bytes for page in pages)), int(layer.window or 0), *_attention_flops(layer, tp))
        counted[key] = counted.get(key, 0) + 1
    return tuple(KvCost(number, *key) for key, number in counted.items())


def _attention_flops(layer: LayerSpec, tp: int) -> tuple[float, float]:
    """FLOP of one query with one token of context: Q·K and scores·V, over the heads of one card."""
    heads = -(-layer.num_heads // tp)
    v_dim = layer.head_dim if layer.v_head_dim is None else layer.v_head_dim
    whole = 2.0 * heads * (layer.head_dim + v_dim)
    if layer.kind != "mla":
        return whole, whole
    return 2.0 * heads * (2 * layer.kv_lora_rank + layer.qk_rope_head_dim), whole
