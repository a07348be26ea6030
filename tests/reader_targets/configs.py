"""config.json: small configs of every family and wrappers with quantisation, mutated as JSON and as bytes."""

from __future__ import annotations

import json
import random
from functools import lru_cache
from pathlib import Path
from typing import Any

from labkit.specs.config_fields import read_config_file
from labkit.specs.families import find_family
from labkit.specs.model_config import model_from_config
from tests.reader_fuzz import ReaderTarget, mutate_bytes, mutate_json

_EXTRA_KEYS = (
    "text_config", "vision_config", "rope_scaling", "rope_parameters", "rope_theta", "quantization_config",
    "layer_types",
    "hybrid_override_pattern", "per_layer_config", "no_rope_layers", "moe_layers", "moe_layer_freq", "attn_type_list",
    "linear_attn_config", "eos_token_id", "dtype", "torch_dtype", "is_encoder_decoder", "auto_map", "model_type",
    "partial_rotary_factor", "num_kv_shared_layers", "sliding_window_pattern", "use_bidirectional_attention",
)  # fmt: skip
_QUANTIZATIONS: tuple[dict[str, Any], ...] = (
    {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "modules_to_not_convert": ["gate"]},
    {"quant_method": "fp8", "weight_block_size": [128, 128]},
    {"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4", "group_size": 16}},
    {
        "quant_method": "compressed-tensors", "ignore": ["lm_head"],
        "config_groups": {"g": {"weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}}},
    },
)  # fmt: skip


@lru_cache(maxsize=1)
def _seeds() -> tuple[dict[str, Any], ...]:
    counts = json.loads((Path(__file__).parent.parent / "specs" / "data" / "family_counts.json").read_text())
    plain = [entry["config"] for name, entry in counts.items() if not name.startswith("_")]
    wrapped = [
        {"model_type": "wrapper", "text_config": config, "vision_config": {"hidden_size": 64, "depth": 2}}
        for config in plain[::5]
    ]
    quantised = [{**config, "quantization_config": section} for config in plain[::7] for section in _QUANTIZATIONS]
    return (*plain, *wrapped, *quantised)


@lru_cache(maxsize=256)
def _names(model_type: str) -> tuple[str, ...]:
    return (*_EXTRA_KEYS, *find_family(model_type).defaults)


def make(rng: random.Random) -> bytes:
    """One mutated config.json."""
    config: Any = rng.choice(_seeds())
    names = _names(str(config.get("model_type")))
    for _ in range(rng.randint(1, 3)):
        config = mutate_json(config, rng, names)
    data = json.dumps(config).encode()
    return mutate_bytes(data, rng) if rng.random() < 0.2 else data


def read(path: Path) -> object:
    """As `load_model` reads a config.json."""
    return model_from_config(read_config_file(path), path.name)


TARGETS = (ReaderTarget("config.json", make, read, ".json"),)
