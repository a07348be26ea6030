"""Rotary embedding from config.json: `rope_parameters` (transformers 5) and `rope_theta` with `rope_scaling`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from labkit.errors import FileFormatError
from labkit.specs.config_fields import ConfigFields
from labkit.specs.families import Family
from labkit.specs.model_spec import RopeSpec
from labkit.text import plain

_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")
_ALIASES = {"su": "longrope", "mrope": "default", "deepseek_yarn": "yarn"}
_NUMBERS = (
    "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings", "beta_fast", "beta_slow",
    "mscale", "mscale_all_dim", "attention_factor", "short_mscale", "long_mscale",
)  # fmt: skip
_LISTS = ("short_factor", "long_factor")


def read_rope(fields: ConfigFields, family: Family, head_dim: int) -> tuple[RopeSpec, RopeSpec | None, list[str]]:
    """The model's rotary embedding, that of its sliding layers where it differs, and notes.

    Args:
        fields: the text model's config.
        family: its defaults are used where the config is silent.
        head_dim: head width, for configs that give the rotated width as `rotary_dim`.
    """
    notes: list[str] = []
    full, sliding = _sections(fields, family)
    rope = _read_one(full, fields, head_dim, notes)
    return rope, None if sliding is None else _read_one(sliding, fields, head_dim, notes), notes


def _sections(fields: ConfigFields, family: Family) -> tuple[ConfigFields, ConfigFields | None]:
    own = fields.section("rope_parameters")
    defaults: Mapping[str, Any] = family.defaults.get("rope_parameters") or {}
    default_full, default_sliding = _by_layer_type(ConfigFields(defaults, "the class defaults"))
    local = fields.optional_number("rope_local_base_freq", "swa_rope_theta", minimum=1e-3)
    theta = fields.optional_number("rope_theta", "rotary_emb_base", minimum=1e-3)
    if own is not None:
        full, sliding = _by_layer_type(own)
        full = full.with_fallback(default_full if theta is None else ConfigFields({"rope_theta": theta}, fields.where))
        if sliding is not None and local is not None:
            sliding = sliding.with_fallback(ConfigFields({"rope_theta": local}, fields.where))
        elif sliding is not None and default_sliding is not None:
            sliding = sliding.with_fallback(default_sliding.only("rope_theta"))
        return full, sliding
    scaling = fields.section("rope_scaling")
    full = ConfigFields({}, fields.where) if scaling is None else scaling
    if theta is not None:
        full = full.with_values(rope_theta=theta)
    keeps_default_kind = scaling is None and theta is None
    kept = default_full if keeps_default_kind else default_full.only("rope_theta", "partial_rotary_factor")
    if local is not None:
        return full.with_fallback(kept), ConfigFields({"rope_theta": local}, fields.where)
    return full.with_fallback(kept), default_sliding


def _by_layer_type(section: ConfigFields) -> tuple[ConfigFields, ConfigFields | None]:
    full, sliding = section.section("full_attention"), section.section("sliding_attention")
    if full is None:
        return sliding or section, None
    return full, sliding


def _read_one(section: ConfigFields, fields: ConfigFields, head_dim: int, notes: list[str]) -> RopeSpec:
    stated = section.text("rope_type", "type", default="default")
    kind = _ALIASES.get(stated, stated)
    if kind not in _KINDS:
        notes.append(f"rope type {plain(stated, 40)!r} is not known; plain RoPE is assumed")
        kind = "default"
    parameters: list[tuple[str, Any]] = []
    for name in _NUMBERS:
        value = section.optional_number(name)
        if value is None and name == "original_max_position_embeddings" and kind == "longrope":
            value = fields.optional_number(name)
        if value is not None and kind != "default":
            parameters.append((name, int(value) if value == int(value) and "max_position" in name else value))
    for name in _LISTS:
        values = section.raw(name)
        if values is not None and kind == "longrope":
            parameters.append((name, _numbers(values, name, section.where)))
    if section.raw("truncate") is not None and kind == "yarn":
        parameters.append(("truncate", section.flag("truncate")))
    theta = section.number("rope_theta", default=fields.number("rope_theta", default=10000.0), minimum=1e-3)
    return RopeSpec(theta, kind, tuple(parameters), _partial(section, fields, head_dim))


def _partial(section: ConfigFields, fields: ConfigFields, head_dim: int) -> float:
    names = ("partial_rotary_factor", "rotary_pct", "rope_percentage", "rope_pct")
    own = section.own(*names)
    width = fields.optional_integer("rotary_dim", maximum=2**16)
    if own is None and width and head_dim:
        return min(1.0, width / head_dim)
    stated = fields.optional_number(*names, minimum=0.0, maximum=1.0) if own is None else None
    return stated if stated is not None else section.number(*names, default=1.0, minimum=0.0, maximum=1.0)


def _numbers(values: Any, name: str, where: str) -> tuple[float, ...]:
    correct = isinstance(values, list) and len(values) <= 4096
    if not correct or not all(isinstance(entry, (int, float)) and abs(entry) < 1e30 for entry in values):
        raise FileFormatError(
            f"{name} in {where} is {plain(repr(values), 80)}", needed="a list of at most 4096 numbers"
        )
    return tuple(float(entry) for entry in values)
