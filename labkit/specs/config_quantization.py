"""Weight formats from `quantization_config` in config.json or from hf_quant_config.json."""

from __future__ import annotations

from dataclasses import replace

from labkit.specs.config_fields import ConfigFields
from labkit.specs.model_spec import WeightFormat
from labkit.text import plain

_PARTS = (
    ("lm_head", ("lm_head", "output_layer")),
    ("embed", ("embed",)),
    ("vision", ("vision", "visual", "multi_modal", "image", "patch", "audio")),
    ("shared_experts", ("shared_expert", "shared_mlp")),
    ("router", ("router", "mlp.gate", "block_sparse_moe.gate", "feed_forward.gate")),
    ("state", ("linear_attn", "mamba", "conv1d", "mixer")),
    ("attention", ("self_attn", "attention", "attn")),
    ("norm", ("norm",)),
    ("experts", ("experts",)),
    ("mlp", ("mlp", "feed_forward")),
)
_ALWAYS = ("embed", "lm_head", "router", "norm")


def read_weight_format(fields: ConfigFields, dtype: str) -> tuple[WeightFormat, list[str]]:
    """The weight format that `fields` states, and notes on what was assumed.

    Args:
        fields: a config with or without `quantization_config`.
        dtype: type of what is not quantised; decides between "16bit" and "32bit".
    """
    section = fields.section("quantization_config", "quantization", "compression_config")
    plain_format = WeightFormat(kind="32bit", bits=32) if dtype == "float32" else WeightFormat()
    if section is None:
        return plain_format, []
    method = section.text("quant_method", "quant_library", default="").casefold()
    if not method and section.has("quant_algo"):
        method = "modelopt"
    readers = {
        "awq": _read_awq, "gptq": _read_gptq, "auto-round": _read_gptq, "auto_round": _read_gptq, "fp8": _read_fp8,
        "fbgemm_fp8": _read_fp8, "mxfp4": _read_mxfp4, "compressed-tensors": _read_compressed,
        "bitsandbytes": _read_bitsandbytes, "modelopt": _read_modelopt, "modelopt_fp4": _read_modelopt,
    }  # fmt: skip
    reader = readers.get(method)
    if reader is None:
        bits = section.optional_integer("bits", "w_bit", "nbits", maximum=64)
        note = f"quantisation {plain(method, 40)!r} is not known; "
        if bits not in (4, 8):
            return plain_format, [note + "weights are counted unquantised"]
        kind = "int4" if bits == 4 else "int8"
        group = section.integer("group_size", "q_group_size", default=128)
        return WeightFormat(kind, bits, group, method=plain(method, 40)), [
            note + f"{bits} bits in groups of {group} assumed"
        ]
    found, notes = reader(section)
    num_layers = fields.optional_integer("num_hidden_layers", "n_layer", "n_layers", "num_layers") or 0
    kept = _unquantized(section.section("quantization") or section, num_layers)
    return replace(found, unquantized=kept), notes


def _read_awq(section: ConfigFields) -> tuple[WeightFormat, list[str]]:
    bits = section.integer("bits", "w_bit", default=4, maximum=16)
    group = section.integer("group_size", "q_group_size", default=128, minimum=-1)
    zeros = section.flag("zero_point", default=True)
    return WeightFormat("awq", bits, max(group, 0), zeros, method="awq"), []


def _read_gptq(section: ConfigFields) -> tuple[WeightFormat, list[str]]:
    bits = section.integer("bits", default=4, maximum=16)
    group = section.integer("group_size", default=128, minimum=-1)
    # GPTQ files hold the packed zeros even where the quantisation is symmetric.
    return WeightFormat("gptq", bits, max(group, 0), True, method="gptq"), []


def _read_fp8(section: ConfigFields) -> tuple[WeightFormat, list[str]]:
    block = section.integers("weight_block_size", minimum=1, maximum=2**16, longest=2)
    if block:
        return WeightFormat("fp8", 8, block[0] * block[-1], False, scale_bytes=4, method="fp8"), []
    per_channel = section.text("quant_method") == "fbgemm_fp8"
    return WeightFormat("fp8", 8, 0 if per_channel else -1, False, scale_bytes=4, method="fp8"), []


def _read_mxfp4(section: ConfigFields) -> tuple[WeightFormat, list[str]]:
    return WeightFormat("mxfp4", 4, 32, False, scale_bytes=1, method="mxfp4"), []


def _read_bitsandbytes(section: ConfigFields) -> tuple[WeightFormat, list[str]]:
    if section.flag("load_in_8bit") and not section.flag("load_in_4bit"):
        return WeightFormat("int8", 8, 0, False, scale_bytes=4, method="bitsandbytes"), []
    double = section.flag("bnb_4bit_use_double_quant")
    return WeightFormat("int4", 4, 64, False, scale_bytes=1 if double else 4, method="bitsandbytes"), []


def _read_modelopt(section: ConfigFields) -> tuple[WeightFormat, list[str]]:
    inner = section.section("quantization") or section
    algorithm = inner.text("quant_algo", default="").upper()
    if "FP4" in algorithm:
        return WeightFormat(
            "nvfp4", 4, inner.integer("group_size", default=16), False, scale_bytes=1, method="modelopt"
        ), []
    if "W4A16" in algorithm or "AWQ" in algorithm:
        return WeightFormat("int4", 4, inner.integer("group_size", default=128), False, method="modelopt"), []
    notes = [] if "FP8" in algorithm else [f"modelopt algorithm {plain(algorithm, 40)!r} is not known; FP8 assumed"]
    return WeightFormat("fp8", 8, -1, False, scale_bytes=4, method="modelopt"), notes


def _read_compressed(section: ConfigFields) -> tuple[WeightFormat, list[str]]:
    method = "compressed-tensors"
    groups = section.section("config_groups")
    first = groups.section(*groups.keys()[:1]) if groups is not None and groups.keys() else None
    weights = first.section("weights") if first is not None else None
    if groups is None or weights is None:
        return WeightFormat(method=method), ["compressed-tensors without weight groups: counted unquantised"]
    notes = [] if len(groups.keys()) == 1 else ["several groups of weight formats: the first is used for all weights"]
    bits = weights.integer("num_bits", default=8, maximum=16)
    strategy = weights.text("strategy", default="channel")
    group = {"tensor": -1, "channel": 0}.get(strategy, 128)
    if strategy == "block":
        block = weights.integers("block_structure", minimum=1, maximum=2**16, longest=2) or (128, 128)
        group = block[0] * block[-1]
    elif strategy in ("group", "tensor_group"):
        group = weights.integer("group_size", default=128, minimum=1)
    is_float = weights.text("type", default="int") == "float"
    if bits == 4 and is_float:
        kind, scale = ("mxfp4", 1) if group == 32 else ("nvfp4", 1)
    elif bits == 8 and is_float:
        kind, scale = "fp8", 2 if group == 0 else 4
    else:
        kind, scale = ("int4", 2) if bits <= 4 else ("int8", 2)
    zeros = not is_float and not weights.flag("symmetric", default=True)
    return WeightFormat(kind, bits, group, zeros, scale_bytes=scale, method=method), notes


def _unquantized(section: ConfigFields, num_layers: int = 0) -> tuple[str, ...]:
    """Parts named by the list of modules that stay at the model's dtype.

    A part that is named layer by layer counts when at least half of the layers are named.
    """
    names = ("modules_to_not_convert", "ignore", "ignored_layers", "exclude_modules", "llm_int8_skip_modules")
    listed = section.raw(*names)
    patterns = [entry for entry in listed if isinstance(entry, str)] if isinstance(listed, list) else []
    parts = set(_ALWAYS)
    layers: dict[str, set[str]] = {}
    for pattern in patterns[:100_000]:
        lowered = pattern[:500].casefold()
        part = _part_of(lowered)
        number = _layer_number(lowered)
        if part is None:
            continue
        if number and part in ("attention", "mlp", "experts", "state", "shared_experts"):
            layers.setdefault(part, set()).add(number)
        else:
            parts.add(part)
    parts.update(part for part, named in layers.items() if num_layers and 2 * len(named) >= num_layers)
    return tuple(sorted(parts))


def _part_of(pattern: str) -> str | None:
    if pattern == "gate":
        return "router"
    return next((part for part, words in _PARTS if any(word in pattern for word in words)), None)


def _layer_number(pattern: str) -> str:
    """The number of the one layer that a pattern names; "" for a pattern over all layers."""
    pieces = pattern.replace("\\.", ".").split(".")
    return next((piece for piece in pieces if piece.isdigit()), "")
