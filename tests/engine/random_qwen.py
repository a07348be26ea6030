"""Checkpoints of small Qwen models with random weights, as Hugging Face stores them."""

from __future__ import annotations

import json
import random
from pathlib import Path

from safetensors.torch import save_file


def qwen_config(rng: random.Random, kind: str, heads: int, kv_heads: int, **sizes) -> dict:
    """A config.json as of Qwen2 or Qwen3, its sizes at random where they are not given."""
    return {
        "architectures": [f"{kind.capitalize()}ForCausalLM"], "model_type": kind, "torch_dtype": "float32",
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": rng.choice((8, 16)),
        "hidden_size": heads * 16 if kind == "qwen2" else 48, "num_hidden_layers": 2, "rope_theta": 10000.0,
        "intermediate_size": 8 * heads * rng.choice((1, 2)), "vocab_size": rng.randrange(90, 300),
        "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "hidden_act": "silu", "eos_token_id": 0,
        "tie_word_embeddings": rng.random() < 0.5, **({"head_dim": 16} if kind == "qwen2" else {}), **sizes,
    }  # fmt: skip


def save_random_qwen(folder: Path, seed: int, kind: str, heads: int, kv_heads: int, **sizes) -> None:
    """Such a model with random weights, large enough to keep greedy choices apart; biases are random as well."""
    import torch

    config = qwen_config(random.Random(seed), kind, heads, kv_heads, **sizes)
    (folder / "config.json").write_text(json.dumps(config))
    hidden, width, vocab, dim = (
        config[name] for name in ("hidden_size", "intermediate_size", "vocab_size", "head_dim")
    )
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    for index in range(config["num_hidden_layers"]):
        rows = {"q_proj": heads * dim, "k_proj": kv_heads * dim, "v_proj": kv_heads * dim}
        attention, mlp = f"model.layers.{index}.self_attn.", f"model.layers.{index}.mlp."
        shapes |= {f"{attention}{name}.weight": (count, hidden) for name, count in rows.items()}
        shapes |= {f"{attention}{name}.bias": (count,) for name, count in rows.items() if kind == "qwen2"}
        shapes |= {f"{attention}{name}_norm.weight": (dim,) for name in "qk" if kind == "qwen3"}
        shapes |= {f"{attention}o_proj.weight": (hidden, heads * dim), f"{mlp}down_proj.weight": (hidden, width)}
        shapes |= {f"{mlp}{name}.weight": (width, hidden) for name in ("gate_proj", "up_proj")}
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.layers.{index}.{name}.weight"] = (hidden,)
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(shape, generator=generator) * shape[-1] ** -0.5 for name, shape in shapes.items()}
    save_file(
        {name: 1 + value if "norm" in name else value for name, value in tensors.items()}, folder / "model.safetensors"
    )
