"""Writes the defaults in `labkit/specs/catalogue/families.json` anew from transformers' classes; traits stay.

Run by hand when transformers changes: `python tests/specs/make_families.py`. A new family is a new entry with its
traits and empty defaults.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

TARGET = Path(__file__).parent.parent.parent / "labkit" / "specs" / "catalogue" / "families.json"
# Doubling one of these shows which defaults a class derives from it; a derived value is no default.
PROBES = (
    "hidden_size", "num_attention_heads", "num_hidden_layers", "n_embd", "n_head", "d_model", "max_position_embeddings",
    "intermediate_size",
)  # fmt: skip
NEVER = ("head_dim",)


def class_defaults(model_type: str, keys: list[str]) -> dict[str, Any]:
    """What the class of `model_type` fills in for `keys`, without what it derives from other keys."""
    cls = CONFIG_MAPPING[model_type]
    base = cls().to_dict()
    derived = set()
    for probe in PROBES:
        if isinstance(base.get(probe), int):
            changed = _with(cls, {probe: base[probe] * 2})
            derived |= {
                key for key in keys if key != probe and changed is not None and changed.get(key) != base.get(key)
            }
    kept = {key: base[key] for key in keys if key in base and key not in derived and _is_plain(base[key])}
    if "kv_lora_rank" in kept:
        kept = {key: value for key, value in kept.items() if key not in NEVER}
    return {**kept, "rope_parameters": base["rope_parameters"]} if base.get("rope_parameters") else kept


def _with(cls: Any, changes: dict[str, Any]) -> dict[str, Any] | None:
    try:
        return cls(**changes).to_dict()
    except Exception:
        # Some classes refuse the doubled value: then this probe says nothing.
        return None


def _is_plain(value: Any) -> bool:
    return isinstance(value, (int, float, str, bool))


def main() -> None:
    """Writes the file, one trait line and one line of defaults a family."""
    catalogue = json.loads(TARGET.read_text())
    keys = sorted({key for entry in catalogue["families"].values() for key in entry["defaults"]} - {"rope_parameters"})
    blocks = []
    for name, entry in sorted(catalogue["families"].items()):
        defaults = class_defaults(name, keys) if name in CONFIG_MAPPING else entry["defaults"]
        lines = [f'      "traits": {json.dumps(entry["traits"])},', f'      "defaults": {json.dumps(defaults)}']
        blocks.append(f"    {json.dumps(name)}: {{\n" + "\n".join(lines) + "\n    }")
    about = json.dumps(catalogue["_about"])
    TARGET.write_text(f'{{\n  "_about": {about},\n  "families": {{\n' + ",\n".join(blocks) + "\n  }\n}\n")


if __name__ == "__main__":
    main()
