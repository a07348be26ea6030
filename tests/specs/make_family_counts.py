"""Writes `data/family_counts.json`: a small config of each family and the parameters that transformers counts in it.

Run by hand when transformers changes: `python tests/specs/make_family_counts.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModel, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from labkit.specs.families import family_names

SMALL: dict[str, Any] = {
    "num_hidden_layers": 8, "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4,
    "intermediate_size": 320, "vocab_size": 1000, "pad_token_id": 0,
}  # fmt: skip
# Old classes have names of their own and would keep these beside them, unused.
UNUSED: dict[str, Any] = dict.fromkeys(
    ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")
)
OVERRIDES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"first_k_dense_replace": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 96},
    "deepseek_v3": {"n_routed_experts": 16, "moe_intermediate_size": 96},
    "glm4_moe": {"n_routed_experts": 16, "moe_intermediate_size": 96, "attention_bias": True, "use_qk_norm": True},
    "glm4_moe_lite": {"n_routed_experts": 16, "moe_intermediate_size": 96},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "gpt2": {"n_layer": 4, "n_head": 4, "n_embd": 64, **UNUSED},
    "gpt_bigcode": {"n_layer": 4, "n_head": 4, "n_embd": 64, **UNUSED},
    "bloom": {**UNUSED, "n_layer": 4, "n_head": 4, "hidden_size": 64},
    "gptj": {"n_layer": 4, "n_head": 4, "n_embd": 64, "rotary_dim": 8, **UNUSED},
    "codegen": {"n_layer": 4, "n_head": 4, "n_embd": 64, "rotary_dim": 8, **UNUSED},
    "mpt": {"n_layers": 4, "n_heads": 4, "d_model": 64, **UNUSED},
    "distilbert": {"n_layers": 3, "n_heads": 4, "dim": 64, "hidden_dim": 128, **UNUSED},
    "opt": {"ffn_dim": 320, "word_embed_proj_dim": 256, "intermediate_size": None, "num_key_value_heads": None},
    "falcon": {"intermediate_size": None, "num_key_value_heads": None},
    **{name: {"num_key_value_heads": None} for name in ("gpt_neox", "bert", "roberta", "xlm-roberta", "nomic_bert")},
    "hunyuan_v1_dense": {"head_dim": 32}, "hunyuan_v1_moe": {"head_dim": 32, "num_experts": 4, "moe_topk": 2},
    "ministral": {"head_dim": 32}, "nemotron": {"head_dim": 32},
    "zamba2": {"layers_block_type": ["mamba", "mamba", "hybrid", "mamba"] * 2, "n_mamba_heads": 8},
    "modernbert": {"num_key_value_heads": None, "cls_token_id": 1, "sep_token_id": 2},
    "deepseek_v32": {"n_routed_experts": 16, "moe_intermediate_size": 96, "index_n_heads": 8},
    "glm_moe_dsa": {"n_routed_experts": 16, "moe_intermediate_size": 96, "index_n_heads": 8},
    "qwen3_moe": {"num_experts": 16, "moe_intermediate_size": 96},
    "nemotron_h": {
        "layers_block_type": ["mamba", "moe", "attention", "mlp"] * 2, "mamba_num_heads": 8, "n_groups": 2,
        "num_hidden_layers": None,
    },
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 64, "attn_layer_indices": [2, 5]},
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_ssm": 256},
    "granitemoehybrid": {"mamba_n_heads": 8, "layer_types": ["mamba", "attention"] * 4},
    "jamba": {"attn_layer_period": 4, "attn_layer_offset": 2, "num_experts": 4},
    "mamba2": {"num_heads": 8, "head_dim": 64, "n_groups": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 4, "num_experts": 8, "moe_intermediate_size": 96},
    "gemma3n_text": {"num_kv_shared_layers": 3, "vocab_size_per_layer_input": 1000, "hidden_size_per_layer_input": 16},
    "gemma4_text": {
        "num_kv_shared_layers": 2, "vocab_size_per_layer_input": 1000, "hidden_size_per_layer_input": 16,
    },
    "kimi_linear": {"num_experts": 16, "moe_intermediate_size": 96, "linear_num_heads": 8, "linear_head_dim": 32},
    "longcat_flash": {
        "num_layers": 4, "num_hidden_layers": None, "intermediate_size": None, "n_routed_experts": 16,
        "zero_expert_num": 4, "expert_ffn_hidden_size": 96,
    },
    "ernie4_5_moe": {"moe_num_experts": 8, "moe_layer_end_index": 7},
    "recurrent_gemma": {"lru_width": 256},
    "llama4_text": {"num_local_experts": 4, "intermediate_size_mlp": 640, "interleave_moe_layer_step": 2},
    "qwen3_next": {"num_experts": 16, "moe_intermediate_size": 96, "shared_expert_intermediate_size": 96},
    "qwen3_5_moe_text": {"num_experts": 16, "moe_intermediate_size": 96, "shared_expert_intermediate_size": 96},
}  # fmt: skip


def count(model_type: str) -> dict[str, Any] | None:
    """The small config of `model_type` and the parameters of the model that it makes."""
    values = {key: value for key, value in {**SMALL, **OVERRIDES.get(model_type, {})}.items() if value is not None}
    config = CONFIG_MAPPING[model_type](**values)
    chosen = AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModel
    is_encoder = model_type in ("bert", "roberta", "xlm-roberta", "distilbert", "modernbert", "nomic_bert")
    with torch.device("meta"):
        model = (AutoModel if is_encoder else chosen).from_config(config)
    parameters = sum(weight.numel() for weight in model.parameters())
    if chosen is AutoModel and not is_encoder and not getattr(config, "tie_word_embeddings", False):
        parameters += config.vocab_size * config.hidden_size
    saved = {key: value for key, value in config.to_diff_dict().items() if not key.startswith("_")}
    return {"config": saved, "parameters": parameters}


def main() -> None:
    """Writes the file."""
    found: dict[str, Any] = {"_about": f"counted by transformers {transformers.__version__} on the meta device"}
    for name in family_names():
        if name not in CONFIG_MAPPING:
            continue
        try:
            found[name] = count(name)
        except Exception as error:
            print(name, type(error).__name__, str(error)[:200])
    target = Path(__file__).parent / "data" / "family_counts.json"
    target.write_text(json.dumps(found, indent=1, sort_keys=True, default=str) + "\n")


if __name__ == "__main__":
    main()
