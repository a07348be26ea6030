"""Which models labkit's decoder runs; without torch, so that a refusal costs nothing."""

from __future__ import annotations

from labkit.errors import UnsupportedError
from labkit.specs.model_spec import ModelSpec


def check_supported(spec: ModelSpec) -> None:
    """Say what of `spec` this network lacks.

    Raises:
        UnsupportedError: with all of it in one message.
    """
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
    if lacks:
        raise UnsupportedError(
            f"labkit's decoder does not run {spec.model_type}: it lacks {', '.join(lacks)}; its memory can be planned",
            works="Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE, Gemma 2, Gemma 3",
        )
