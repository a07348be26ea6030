"""Small model folders: a good one of each kind, and a way to break it."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16, "intermediate_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 12,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16", "bos_token_id": 0,
    "eos_token_id": 1, "tie_word_embeddings": False, "rope_theta": 10000.0,
}  # fmt: skip
TOKENS = ["<s>", "</s>", *"abcdefgh"]
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 123\n"


def tokenizer_json(tokens: list[str] | None = None) -> dict[str, Any]:
    tokens = tokens or TOKENS
    added = [{"id": index, "content": tokens[index], "special": True} for index in range(2)]
    return {
        "version": "1.0", "added_tokens": added,
        "model": {"type": "BPE", "vocab": {token: index for index, token in enumerate(tokens)}, "merges": []},
    }  # fmt: skip


def shapes(num_layers: int = 2) -> dict[str, list[int]]:
    found = {"model.embed_tokens.weight": [12, 16], "lm_head.weight": [12, 16], "model.norm.weight": [16]}
    for index in range(num_layers):
        layer = f"model.layers.{index}."
        found |= {
            layer + "self_attn.q_proj.weight": [16, 16], layer + "self_attn.k_proj.weight": [8, 16],
            layer + "self_attn.v_proj.weight": [8, 16], layer + "self_attn.o_proj.weight": [16, 16],
            layer + "mlp.gate_proj.weight": [32, 16], layer + "mlp.up_proj.weight": [32, 16],
            layer + "mlp.down_proj.weight": [16, 32], layer + "input_layernorm.weight": [16],
            layer + "post_attention_layernorm.weight": [16],
        }  # fmt: skip
    return found


def write_shard(path: Path, tensors: dict[str, list[int]], dtype: str = "BF16") -> int:
    """A safetensors file of zeros; returns the bytes of its tensors."""
    width = {"BF16": 2, "F16": 2, "F32": 4, "I32": 4}[dtype]
    header, offset = {}, 0
    for name, shape in tensors.items():
        size = width
        for length in shape:
            size *= length
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(offset))
    return offset


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def good_folder(folder: Path, *, sharded: bool = False) -> Path:
    """A complete model of two layers."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", CONFIG)
    write_json(folder / "generation_config.json", {"eos_token_id": [1]})
    write_json(folder / "tokenizer.json", tokenizer_json())
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": "{{ messages }}"}
    write_json(folder / "tokenizer_config.json", settings)
    tensors = shapes()
    if not sharded:
        write_shard(folder / "model.safetensors", tensors)
        return folder
    names = list(tensors)
    parts = {"model-00001-of-00002.safetensors": names[:9], "model-00002-of-00002.safetensors": names[9:]}
    total = sum(write_shard(folder / file, {name: tensors[name] for name in own}) for file, own in parts.items())
    mapping = {name: file for file, own in parts.items() for name in own}
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": mapping})
    return folder


def change_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; None removes one."""
    values = json.loads(path.read_text()) | changes
    write_json(path, {key: value for key, value in values.items() if value is not None})
