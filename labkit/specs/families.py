"""What each model_type's own class fills in where config.json is silent, from `catalogue/families.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from labkit.specs.config_fields import ConfigFields

CATALOGUE_FOLDER = Path(__file__).parent / "catalogue"

# Model types whose layers are those of another family; their classes are not in transformers or are its copies.
_ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "deepseek_vl_v2": "deepseek_v2",
        "kimi_k2": "deepseek_v3", "kimi_k25": "deepseek_v3", "kimi_vl": "deepseek_v3", "deepseek": "deepseek_v2",
        "yi": "llama", "aquila": "llama", "solar": "llama", "smollm": "llama", "exaone": "llama", "cwm": "llama",
        "mistral3": "mistral", "pixtral": "mistral", "phi3_v": "phi3", "phi4mm": "phi3", "RefinedWeb": "falcon",
        "embedding_gemma": "gemma3_text", "gemma3_text_model": "gemma3_text", "MiniMaxText01": "minimax",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Family:
    """One model_type.

    Attributes:
        model_type: as in config.json.
        known: the family is in the catalogue; else everything silent is assumed.
        traits: layer traits; a text value names the config key that says it.
        defaults: values of absent config keys.
    """

    model_type: str
    known: bool
    traits: Mapping[str, Any]
    defaults: Mapping[str, Any]

    def flag(self, trait: str, fields: ConfigFields, default: bool = False) -> bool:
        """A yes-or-no trait, read from the config where the family says so."""
        value = self.traits.get(trait, default)
        return fields.flag(value, default=False) if isinstance(value, str) else bool(value)


@lru_cache(maxsize=1)
def _families() -> dict[str, Any]:
    return json.loads((CATALOGUE_FOLDER / "families.json").read_text("utf-8"))["families"]


def family_names() -> tuple[str, ...]:
    """Every model_type that the catalogue knows."""
    return tuple(_families())


def find_family(model_type: str) -> Family:
    """The family of `model_type`, also without its `_text` suffix; an unknown one has Llama's traits."""
    known = _families()
    alias = _ALIASES.get(model_type, model_type)
    for name in (alias, f"{alias}_text", alias.removesuffix("_text")):
        if name in known:
            return Family(model_type, True, known[name]["traits"], known[name]["defaults"])
    assumed = {"qkv_bias": "attention_bias", "attention_bias": "attention_bias", "mlp_bias": "mlp_bias"}
    return Family(model_type, False, assumed, {})
