"""Names of quantised copies: "RedHatAI/Qwen2.5-7B-Instruct-FP8" is a catalogue model in another weight format."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from labkit.specs.model_catalogue import catalogue_model, find_name
from labkit.specs.model_spec import ModelSpec, WeightFormat

# vLLM's names of `--quantization` → how the matrices are stored where the model folder does not say it.
QUANTIZATION_FORMATS: Mapping[str, WeightFormat] = MappingProxyType(
    {
        "fp8": WeightFormat("fp8", 8, 0, scale_bytes=4),
        "fp8_per_tensor": WeightFormat("fp8", 8, -1, scale_bytes=4),
        "fp8_per_channel": WeightFormat("fp8", 8, 0, scale_bytes=4),
        "fp8_per_block": WeightFormat("fp8", 8, 128 * 128, scale_bytes=4),
        "int8": WeightFormat("int8", 8, 0, scale_bytes=4),
        "awq": WeightFormat("awq", 4, 128, True),
        "auto_awq": WeightFormat("awq", 4, 128, True),
        "awq_marlin": WeightFormat("awq", 4, 128, True),
        "gptq": WeightFormat("gptq", 4, 128, True),
        "gptq_marlin": WeightFormat("gptq", 4, 128, True),
        "mxfp4": WeightFormat(
            "mxfp4", 4, 32, scale_bytes=1, unquantized=("embed", "lm_head", "router", "norm", "attention", "mlp")
        ),
        "nvfp4": WeightFormat("nvfp4", 4, 16, scale_bytes=1),
        "modelopt_fp4": WeightFormat("nvfp4", 4, 16, scale_bytes=1),
    }
)
_SUFFIX = re.compile(r"-(?:awq|gptq|fp8|quantized|int8|w8a8|w4a16)[a-z0-9._-]{0,40}$", re.IGNORECASE)
_FORMATS = (
    ("awq", "awq"), ("gptq-int8", "int8"), ("gptq", "gptq"), ("fp8", "fp8"), ("quantized.w4a16", "gptq"),
    ("w4a16", "gptq"), ("quantized.w8a8", "int8"), ("int8", "int8"), ("w8a8", "int8"),
)  # fmt: skip


def named_model(name: str) -> ModelSpec | None:
    """The catalogue's model of that name, or of the name without its quantisation, in that format; None for neither.

    Organisations that publish copies differ, so the name after the organisation decides.
    """
    found = find_name(name)
    if found is not None:
        return catalogue_model(found)
    base = _SUFFIX.sub("", name)
    found = find_name(base) or find_name(base.rpartition("/")[2])
    if found is None:
        return None
    if base == name:
        return catalogue_model(found)
    fmt = _format(name[len(base) :].lstrip("-").casefold())
    return None if fmt is None else catalogue_model(found).replace(name=name, weight_format=fmt, weights_bytes=None)


def _format(suffix: str) -> WeightFormat | None:
    return next((QUANTIZATION_FORMATS[kind] for start, kind in _FORMATS if suffix.startswith(start)), None)
