"""`ModelSpec`: the facts of a model that memory planning and the decoder network need; no weights, no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from labkit.text import brief

AttentionKind = Literal["full", "sliding", "chunked", "mla", "state", "encoder", "none"]


@dataclass(frozen=True)
class StateSpec:
    """Recurrent state that a Mamba or gated-delta-net layer keeps for each request instead of KV.

    Attributes:
        kind: "mamba1", "mamba2", "gdn", "short_conv" or "linear".
        shapes: one shape per state tensor of one request on one rank before tensor parallelism.
        dtypes: storage type of each state tensor, "auto" being the model's.
        tp_axes: for each tensor the axis that tensor parallelism divides, or None.
        num_parameters: weights of the mixer that keeps this state, norms of the layer not included.
    """

    kind: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    tp_axes: tuple[int | None, ...]
    num_parameters: int = 0


@dataclass(frozen=True)
class LayerSpec:
    """Token mixing of one decoder layer.

    Attributes:
        kind: "full", "sliding" (window of `window` tokens, itself included), "chunked" (local chunks of `window`
            tokens), "mla", "state" (recurrent, see `state`), "encoder" (bidirectional, no cache), "none" (no mixer).
        num_heads, num_kv_heads, head_dim: query heads, KV heads and head width. Never guessed from hidden size.
        v_head_dim: width of V where it differs from `head_dim`.
        window: tokens, for "sliding" and "chunked".
        kv_lora_rank, qk_rope_head_dim, qk_nope_head_dim, q_lora_rank: multi-head latent attention.
        shares_kv_with: index of the earlier layer whose KV this one reads; it stores none of its own.
        state: recurrent state; beside "full" for layers that run attention and a state mixer in parallel (Falcon-H1).
        num_experts: routed experts of this layer's MLP; 0 for a dense one.
        intermediate_size: width of this layer's dense MLP where it is not the model's; 0 for a layer without MLP.
        shares_key_value: V is K, so there is one projection (Gemma 4); both are still cached.
        index_head_dim, index_num_heads: the sparse-attention indexer of DeepSeek V3.2, which caches one key a token.
        rope_theta: this layer's own base (Gemma 3 has two), None for the model's.
        uses_rope: False for layers without position (NoPE).
    """

    kind: AttentionKind
    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    v_head_dim: int | None = None
    window: int | None = None
    kv_lora_rank: int = 0
    qk_rope_head_dim: int = 0
    qk_nope_head_dim: int = 0
    q_lora_rank: int | None = None
    shares_kv_with: int | None = None
    state: StateSpec | None = None
    num_experts: int = 0
    intermediate_size: int | None = None
    shares_key_value: bool = False
    index_head_dim: int = 0
    index_num_heads: int = 0
    rope_theta: float | None = None
    uses_rope: bool = True


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding.

    Attributes:
        theta: base of the frequencies.
        kind: "default", "linear", "dynamic", "llama3", "yarn", "longrope" or "su".
        parameters: the variant's own numbers under their config.json names (factor, low_freq_factor, …).
        partial_rotary_factor: share of the head that is rotated.
    """

    theta: float = 10000.0
    kind: str = "default"
    parameters: tuple[tuple[str, Any], ...] = ()
    partial_rotary_factor: float = 1.0


@dataclass(frozen=True)
class MoeSpec:
    """Mixture of experts, the same in every MoE layer.

    Attributes:
        num_experts, num_experts_per_tok: routed experts and how many a token visits.
        intermediate_size: width of one routed expert.
        shared_intermediate_size: total width of the experts that every token visits; 0 for none.
        shared_gate: a one-number gate scales the shared experts (Qwen 2 MoE, Qwen 3 Next).
        router_bias, expert_bias: biases of the router and of the experts' projections (gpt-oss).
        dense_beside: a MoE layer also runs the dense MLP (Gemma 4).
    """

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    shared_intermediate_size: int = 0
    shared_gate: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    dense_beside: bool = False


@dataclass(frozen=True)
class WeightFormat:
    """How the weights are stored.

    Attributes:
        kind: "16bit", "32bit", "fp8", "int8", "int4" (compressed-tensors, bitsandbytes and others), "awq", "gptq",
            "mxfp4", "nvfp4" or "gguf".
        bits: bits of a quantised weight.
        group_size: weights that share one scale (128 × 128 = 16384 for block fp8); 0 for one per output channel,
            -1 for one per tensor.
        scale_bytes: bytes of one scale.
        has_zero_points: a zero point of `bits` bits is stored beside each scale.
        unquantized: parts kept at the model's dtype: "embed", "lm_head", "router", "norm", "attention",
            "shared_experts", "experts", "mlp", "state", "vision".
        method: the word in the file, such as "compressed-tensors".
    """

    kind: str = "16bit"
    bits: int = 16
    group_size: int = 0
    has_zero_points: bool = False
    unquantized: tuple[str, ...] = ("embed", "lm_head", "router", "norm")
    scale_bytes: int = 2
    method: str = ""


@dataclass(frozen=True)
class ModelSpec:
    """A decoder (or encoder) as config.json, a GGUF file or the catalogue describes it.

    Attributes:
        name: catalogue name, hub id or folder name; text from outside, escape before showing.
        architecture: the class in config.json's `architectures`, such as "LlamaForCausalLM".
        model_type: config.json's `model_type`, such as "llama", "qwen3", "gemma3_text".
        layers: one `LayerSpec` per decoder layer.
        intermediate_size: width of the dense MLP; `moe` describes the routed one.
        dtype: the type in which the weights are published: "bfloat16", "float16" or "float32".
        max_position_embeddings: longest position, in tokens.
        weights_bytes: bytes of all weights where files or the catalogue state them, else None (then counted).
        num_parameters: parameters where stated, tied embeddings once, else None.
        hidden_act: "silu", "gelu", "gelu_pytorch_tanh", ….
        attention_bias, mlp_bias, qkv_bias: biases of the output projection and of Q, K, V.
        qk_norm: RMS norm on each head of Q and K (Qwen3, Gemma 3).
        qk_norm_full_width: that norm spans all heads at once (OLMo 2).
        output_gate: the query projection also makes a gate for the attention's output (Qwen 3 Next, Qwen 3.5).
        norm: "rms", "layer" (with bias), "layer_no_bias" or "none" (no weights).
        norms_per_layer: norms over the hidden size in one layer; 4 with sandwich norms, 1 for parallel blocks.
        final_norm: a norm after the last layer.
        head_bias: the output head has a bias (Phi, GPT-J).
        sandwich_norms: extra norms after attention and MLP (Gemma 2 and 3).
        norm_offset: the norm multiplies by (1 + weight) (Gemma).
        scale_embeddings: embeddings are multiplied by sqrt(hidden_size) (Gemma).
        attention_softcap, final_softcap: tanh caps of scores and logits.
        attention_scale: multiplier of Q·K where it is not head_dim**-0.5.
        rope_local: RoPE of sliding layers where it differs (Gemma 3).
        is_embedding, pooling: an embedding model, with "last" or "mean" pooling.
        extra_weights: named parameter counts outside the decoder (vision tower, MTP layer, …).
        notes: what was assumed or not understood, one sentence each.
    """

    name: str
    architecture: str
    model_type: str
    layers: tuple[LayerSpec, ...]
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    dtype: str = "bfloat16"
    tie_word_embeddings: bool = False
    rope: RopeSpec = RopeSpec()
    rope_local: RopeSpec | None = None
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    qkv_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    qk_norm_full_width: bool = False
    output_gate: bool = False
    norm: str = "rms"
    norms_per_layer: int = 2
    final_norm: bool = True
    head_bias: bool = False
    sandwich_norms: bool = False
    norm_offset: bool = False
    scale_embeddings: bool = False
    attention_softcap: float | None = None
    final_softcap: float | None = None
    attention_scale: float | None = None
    attention_sinks: bool = False
    gated_mlp: bool = True
    moe: MoeSpec | None = None
    weight_format: WeightFormat = WeightFormat()
    weights_bytes: int | None = None
    num_parameters: int | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    is_embedding: bool = False
    pooling: str = "last"
    extra_weights: tuple[tuple[str, int], ...] = ()
    source: str = ""
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return brief(self, "name", "architecture", "num_layers", "hidden_size", "max_position_embeddings", "dtype")

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layers)

    def replace(self, **changes: Any) -> ModelSpec:
        """A variant with `changes`."""
        return replace(self, **changes)
