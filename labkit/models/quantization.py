"""Which weight format the engine keeps for a model and a `quantization`; without torch, so that a refusal is free."""

from __future__ import annotations

from labkit.errors import OutOfRangeError, UnsupportedError
from labkit.memory.weights import weight_format
from labkit.specs.model_spec import ModelSpec, WeightFormat
from labkit.specs.quantized_names import QUANTIZATION_FORMATS
from labkit.text import plain

# Made of 16-bit weights while they are loaded.
ONLINE = ("fp8", "fp8_per_tensor", "fp8_per_channel")
AWQ_NAMES = ("awq", "auto_awq", "awq_marlin")
_PLAIN_KINDS = ("16bit", "32bit", "gguf")
AWQ_GROUP_SIZES = (0, 32, 64, 128)


def engine_format(spec: ModelSpec, quantization: str | None, load_format: str = "auto") -> WeightFormat:
    """How labkit's engine stores the matrices of `spec` under `quantization`, vLLM's word or None.

    Raises:
        UnsupportedError: a format that the engine does not have, by name.
        OutOfRangeError: a `quantization` that is not what the model's files hold.
    """
    stored = spec.weight_format
    if quantization is None:
        return _checked(spec, stored, load_format)
    wanted = QUANTIZATION_FORMATS.get(quantization)
    if quantization not in (*ONLINE, *AWQ_NAMES) or wanted is None:
        raise UnsupportedError(
            f"labkit's engine has no {plain(quantization, 40)} weights; their memory can be planned",
            works=", ".join((*ONLINE, *AWQ_NAMES)),
            knob="quantization",
        )
    if stored.kind in _PLAIN_KINDS and quantization in AWQ_NAMES and load_format != "dummy":
        raise OutOfRangeError(
            f"{plain(spec.name, 80)} is stored as {stored.kind}; 4-bit AWQ weights are made beforehand, with AutoAWQ",
            works="a folder with AWQ weights, quantization='fp8', or load_format='dummy'",
            knob="quantization",
        )
    if stored.kind == "gguf" or (stored.kind not in _PLAIN_KINDS and stored.kind != wanted.kind):
        raise OutOfRangeError(
            f"{plain(spec.name, 80)} is stored as {stored.kind}, which is not {plain(quantization, 40)}",
            works="quantization=None",
            knob="quantization",
        )
    return _checked(spec, weight_format(spec, quantization), load_format, is_online=stored.kind in _PLAIN_KINDS)


def _checked(spec: ModelSpec, fmt: WeightFormat, load_format: str, *, is_online: bool = False) -> WeightFormat:
    if fmt.kind in _PLAIN_KINDS:
        return fmt
    if fmt.kind == "awq" and fmt.bits == 4 and fmt.has_zero_points and fmt.group_size in AWQ_GROUP_SIZES:
        return fmt
    # Random weights of a model that is published in fp8 are made like those that are quantised at loading.
    if fmt.kind == "fp8" and fmt.group_size <= 0 and (is_online or load_format == "dummy"):
        return fmt
    form = f"{fmt.kind} weights of {fmt.bits} bits in groups of {fmt.group_size}"
    raise UnsupportedError(
        f"labkit's engine does not load {form}, as {plain(spec.name, 80)} is stored; their memory can be planned",
        works="the 16-bit model (quantization='fp8' halves it), 4-bit AWQ with zero points, or GGUF",
        knob="quantization",
    )
