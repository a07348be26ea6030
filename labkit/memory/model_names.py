"""Names of quantised copies: "RedHatAI/Qwen2.5-7B-Instruct-FP8" is a catalogue model in another weight format."""

from __future__ import annotations

import os
import re

from labkit.memory.weights import QUANTIZATION_FORMATS
from labkit.specs.model_catalogue import catalogue_model, find_name
from labkit.specs.model_loading import load_model
from labkit.specs.model_spec import ModelSpec, WeightFormat

_SUFFIX = re.compile(r"-(?:AWQ|GPTQ|FP8|fp8|quantized|INT8|Int8|W8A8|w8a8|W4A16|w4a16)[A-Za-z0-9._-]{0,40}$")
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


def named_or_loaded(source: str) -> ModelSpec:
    """`labkit.specs.load_model`, with names of quantised copies tried before the hub.

    Raises:
        UnknownNameError, FileFormatError: as `load_model`.
    """
    found = None if os.path.exists(source) else named_model(source)
    return found or load_model(source)
