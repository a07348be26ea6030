"""Rotary position embedding: frequencies of each variant, and the rotation of Q and K."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from labkit.errors import FileFormatError, UnsupportedError
from labkit.specs.model_spec import RopeSpec


def inverse_frequencies(
    rope: RopeSpec, head_dim: int, max_positions: int, model_positions: int
) -> tuple[torch.Tensor, float]:
    """Angle per position of each rotated pair, float32 `[rotary_dim / 2]`, and the factor on cos and sin.

    Formulas as transformers' modeling_rope_utils.py has them: linear (kaiokendev), dynamic NTK (bloc97, emozilla), YaRN
    (arXiv 2309.00071), Llama 3.1, LongRoPE (arXiv 2402.13753). Dynamic NTK and LongRoPE depend on the longest position
    that is planned for, not on the length of each request: so a request's numbers do not change while it grows.

    Args:
        rope: the variant and its numbers.
        head_dim: width of a head.
        max_positions: number of positions planned for.
        model_positions: `ModelSpec.max_position_embeddings`.

    Raises:
        UnsupportedError: a variant that labkit does not have.
        FileFormatError: a number of the variant is missing or out of range.
    """
    parameters = dict(rope.parameters)
    dim = int(head_dim * rope.partial_rotary_factor)
    if dim < 2 or dim % 2:
        raise FileFormatError(f"RoPE rotates {dim} of {head_dim} values, allowed is an even number from 2 up")
    theta = rope.theta
    if rope.kind == "dynamic":
        theta = _dynamic_theta(theta, parameters, dim, max(max_positions, model_positions) / model_positions)
    powers = theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
    if rope.kind in ("default", "dynamic"):
        return 1.0 / powers, 1.0
    if rope.kind == "linear":
        return (1.0 / powers) / _number(parameters, "factor"), 1.0
    if rope.kind == "factors":
        return 1.0 / (_factors(parameters, "factors", dim) * powers), 1.0
    if rope.kind == "llama3":
        return _llama3(1.0 / powers, parameters), 1.0
    if rope.kind == "yarn":
        return _yarn(powers, theta, parameters, dim)
    if rope.kind in ("longrope", "su"):
        return _longrope(powers, parameters, dim, max_positions, model_positions)
    raise UnsupportedError(
        f"RoPE of kind {rope.kind!r} is not in labkit's decoder",
        works="a model of another kind: default, linear, factors, dynamic, llama3, yarn, longrope",
    )


def _number(parameters: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = parameters.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise FileFormatError(f"RoPE parameter {name} is {value!r}, allowed is a number above 0")
    return float(value)


def _factors(parameters: Mapping[str, Any], name: str, dim: int) -> torch.Tensor:
    values = parameters.get(name) or ()
    if len(values) != dim // 2:
        raise FileFormatError(f"RoPE parameter {name} has {len(values)} values, allowed is {dim // 2}")
    return torch.tensor(values, dtype=torch.float32)


def _dynamic_theta(theta: float, parameters: Mapping[str, Any], dim: int, stretch: float) -> float:
    factor = _number(parameters, "factor")
    return theta * (factor * stretch - (factor - 1)) ** (dim / max(dim - 2, 1))


def _llama3(frequencies: torch.Tensor, parameters: Mapping[str, Any]) -> torch.Tensor:
    factor, low, high = (_number(parameters, name) for name in ("factor", "low_freq_factor", "high_freq_factor"))
    original = _number(parameters, "original_max_position_embeddings")
    wavelengths = 2 * math.pi / frequencies
    scaled = torch.where(wavelengths > original / low, frequencies / factor, frequencies)
    smooth = (original / wavelengths - low) / (high - low)
    medium = ~(wavelengths < original / high) & ~(wavelengths > original / low)
    return torch.where(medium, (1 - smooth) * scaled / factor + smooth * scaled, scaled)


def _yarn(powers: torch.Tensor, theta: float, parameters: Mapping[str, Any], dim: int) -> tuple[torch.Tensor, float]:
    factor, original = _number(parameters, "factor"), _number(parameters, "original_max_position_embeddings")

    def magnitude(scale: float, weight: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * weight * math.log(scale) + 1.0

    def dimension(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(_number(parameters, "beta_fast", 32)), dimension(_number(parameters, "beta_slow", 1))
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high += 0.001 if low == high else 0
    keep = 1 - torch.clamp((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    frequencies = (1.0 / (factor * powers)) * (1 - keep) + (1.0 / powers) * keep
    attention = parameters.get("attention_factor")
    if attention is None and parameters.get("mscale") and parameters.get("mscale_all_dim"):
        scales = (_number(parameters, "mscale"), _number(parameters, "mscale_all_dim"))
        return frequencies, magnitude(factor, scales[0]) / magnitude(factor, scales[1])
    return frequencies, magnitude(factor) if attention is None else _number(parameters, "attention_factor")


def _longrope(
    powers: torch.Tensor, parameters: Mapping[str, Any], dim: int, max_positions: int, model_positions: int
) -> tuple[torch.Tensor, float]:
    original = _number(parameters, "original_max_position_embeddings")
    name = "long_factor" if max_positions > original else "short_factor"
    factor = _number(parameters, "factor", max(model_positions / original, 1.0))
    default = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return 1.0 / (_factors(parameters, name, dim) * powers), _number(parameters, "attention_factor", default)


class RotaryTable:
    """cos and sin of all positions, and the rotation of heads by them.

    Args:
        rope: the variant.
        head_dim: width of a head.
        max_positions: rows of the table.
        model_positions: `ModelSpec.max_position_embeddings`.
        dtype, device: of Q and K.
    """

    def __init__(
        self,
        rope: RopeSpec,
        head_dim: int,
        max_positions: int,
        model_positions: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        frequencies, factor = inverse_frequencies(rope, head_dim, max_positions, model_positions)
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
        cos, sin = angles.cos() * factor, angles.sin() * factor
        self.rotary_dim = 2 * frequencies.shape[0]
        self.is_partial = self.rotary_dim < head_dim
        self.cos = torch.cat((cos, cos), dim=-1).to(device, dtype)
        # The minus sign of rotate_half is in the table: x * cos + roll(x, half) * sin is then the whole rotation.
        self.sin = torch.cat((-sin, sin), dim=-1).to(device, dtype)

    def rows(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and signed sin of `positions` (int64 `[T]`), each `[T, 1, rotary_dim]`."""
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)

    def rotate(self, heads: torch.Tensor, rows: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """`heads` `[T, H, head_dim]` rotated by `rows`, as a new tensor."""
        cos, sin = rows
        if self.is_partial:
            turned = heads[..., : self.rotary_dim]
            turned = torch.addcmul(turned * cos, turned.roll(self.rotary_dim // 2, -1), sin)
            return torch.cat((turned, heads[..., self.rotary_dim :]), dim=-1)
        return torch.addcmul(heads * cos, heads.roll(self.rotary_dim // 2, -1), sin)
