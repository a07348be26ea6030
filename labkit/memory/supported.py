"""What labkit's engine lacks of a model or a configuration; its memory can still be planned, by vLLM's rules."""

from __future__ import annotations

from labkit.memory.weights import weight_format
from labkit.specs.engine_config import EngineConfig
from labkit.specs.model_spec import LayerSpec, ModelSpec

# How the engine stores matrices; others of these bits are refused.
PLAIN_FORMATS = ("16bit", "32bit", "gguf")
CARD_KV_DTYPES = (
    "auto", "float16", "bfloat16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2", "int8_per_token_head",
    "fp8_per_token_head",
)  # fmt: skip


def decoder_lacks(spec: ModelSpec) -> list[str]:
    """What of `spec` the decoder network does not have; empty where it runs."""
    kinds = {layer.kind for layer in spec.layers} - {"full", "sliding", "chunked", "encoder"}
    lacks = [f"{kind} layers" for kind in sorted(kinds)]
    lacks += ["a state mixer beside attention"] if any(layer.state is not None for layer in spec.layers) else []
    lacks += ["layers that share KV"] if any(layer.shares_kv_with is not None for layer in spec.layers) else []
    lacks += ["one projection for K and V"] if any(layer.shares_key_value for layer in spec.layers) else []
    lacks += ["sparse attention"] if any(layer.index_num_heads for layer in spec.layers) else []
    lacks += [f"{spec.norm} norms"] if spec.norm != "rms" else []
    lacks += ["attention sinks"] if spec.attention_sinks else []
    lacks += ["a gate on attention's output"] if spec.output_gate else []
    lacks += ["a norm across all heads"] if spec.qk_norm_full_width else []
    lacks += ["a bias of the output head"] if spec.head_bias else []
    lacks += [] if spec.norms_per_layer == (4 if spec.sandwich_norms else 2) else ["its order of norms"]
    lacks += [] if spec.final_norm else ["a missing final norm"]
    moe = spec.moe
    if moe is not None and (moe.shared_intermediate_size or moe.router_bias or moe.expert_bias or moe.dense_beside):
        lacks.append("shared or biased experts")
    return lacks


def card_lacks(spec: ModelSpec, config: EngineConfig) -> list[str]:
    """What the engine on a card does not have, the decoder's included; empty where it runs."""
    lacks = decoder_lacks(spec)
    lacks += ["kernels for its layers"] if not lacks and not all(map(_has_kernels, spec.layers)) else []
    lacks += [] if _stores(spec, config) else [f"{weight_format(spec, config.quantization).kind} weights"]
    lacks += [] if config.kv_cache_dtype in CARD_KV_DTYPES else [f"KV as {config.kv_cache_dtype}"]
    return lacks + (["pipeline stages"] if config.pipeline_parallel_size > 1 else [])


def _has_kernels(layer: LayerSpec) -> bool:
    return layer.kind in ("full", "sliding") and layer.v_head_dim in (None, layer.head_dim)


def _stores(spec: ModelSpec, config: EngineConfig) -> bool:
    """As `labkit.models.quantization.engine_format` takes them."""
    fmt = weight_format(spec, config.quantization)
    return (
        fmt.kind in PLAIN_FORMATS
        or (fmt.kind == "fp8" and fmt.group_size <= 0)
        or (fmt.kind == "awq" and fmt.bits == 4)
    )
