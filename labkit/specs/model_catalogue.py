"""The models that labkit knows without any file: `catalogue/models.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from labkit.errors import FileFormatError
from labkit.specs.families import CATALOGUE_FOLDER
from labkit.specs.model_config import model_from_config
from labkit.specs.model_spec import ModelSpec
from labkit.text import plain

_NEEDED = ("config", "total_params", "source")
_ALLOWED = (*_NEEDED, "unverified", "note", "is_embedding", "pooling", "aliases", "weights_bytes", "vision_parameters")


@lru_cache(maxsize=1)
def _entries() -> dict[str, Any]:
    entries = json.loads((CATALOGUE_FOLDER / "models.json").read_text("utf-8"))["models"]
    for name, entry in entries.items():
        check_entry(name, entry)
    return entries


def model_names() -> tuple[str, ...]:
    """Every catalogue name, in the catalogue's order."""
    return tuple(_entries())


def check_entry(name: str, entry: Any) -> None:
    """Whether `entry` is a catalogue entry that makes a `ModelSpec`; the rules of `catalogue/models.schema.json`.

    Raises:
        FileFormatError: a key is missing, unknown or of the wrong type, or the config makes no model.
    """
    where = f"the catalogue entry {plain(name, 80)}"
    if not isinstance(entry, Mapping):
        raise FileFormatError(f"{where} is no JSON object")
    missing = [key for key in _NEEDED if key not in entry]
    unknown = [plain(key, 40) for key in entry if key not in _ALLOWED]
    if missing or unknown:
        raise FileFormatError(f"{where} lacks {missing} or has unknown keys {unknown}", works=", ".join(_ALLOWED))
    if not isinstance(entry["total_params"], int) or entry["total_params"] < 1:
        raise FileFormatError(f"total_params of {where} is no positive whole number")
    if not isinstance(entry["source"], str) or not entry["source"]:
        raise FileFormatError(f"source of {where} is empty")


def find_name(name: str) -> str | None:
    """The catalogue name that `name` means: itself, in another case, without the organisation, or an alias."""
    wanted = name.casefold().strip("/")
    by_name: dict[str, str] = {}
    for full, entry in _entries().items():
        for alias in (full, *entry.get("aliases", ())):
            by_name.setdefault(alias.casefold(), full)
            by_name.setdefault(alias.rpartition("/")[2].casefold(), full)
    return by_name.get(wanted)


@lru_cache(maxsize=128)
def catalogue_model(name: str) -> ModelSpec:
    """The `ModelSpec` of catalogue entry `name`, spelled as in the catalogue."""
    entry = _entries()[name]
    spec = model_from_config(entry["config"], name, source="catalogue")
    notes = [f"not verified: {text}" for text in entry.get("unverified", ())]
    vision = entry.get("vision_parameters")
    extra = (("vision tower (not counted)", vision),) if vision else ()
    return spec.replace(
        extra_weights=(*spec.extra_weights, *extra),
        num_parameters=entry["total_params"],
        weights_bytes=entry.get("weights_bytes"),
        is_embedding=entry.get("is_embedding", spec.is_embedding),
        pooling=entry.get("pooling", spec.pooling),
        notes=(*spec.notes, *notes),
    )
