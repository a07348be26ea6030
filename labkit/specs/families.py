"""What each model_type's own class fills in where config.json is silent, from `catalogue/families.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from labkit.specs.config_fields import ConfigFields

CATALOGUE_FOLDER = Path(__file__).parent / "catalogue"


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
    for name in (model_type, f"{model_type}_text", model_type.removesuffix("_text")):
        if name in known:
            return Family(model_type, True, known[name]["traits"], known[name]["defaults"])
    assumed = {"qkv_bias": "attention_bias", "attention_bias": "attention_bias", "mlp_bias": "mlp_bias"}
    return Family(model_type, False, assumed, {})
