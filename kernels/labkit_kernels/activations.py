"""Gated activations: SiLU(gate) · up and GELU(gate) · up; references: `reference_ops.silu_and_mul`, `gelu_and_mul`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from labkit_kernels.checks import QUERY_DTYPES, KernelValueError, check_dtype, check_last_stride, check_out, check_shape
from labkit_kernels.launches import Launches
from labkit_kernels.ops import begin, overlap_options
from labkit_kernels.sizes import cdiv, next_power_of_2

MAX_TILE = 2048
FEW_PROGRAMS = 264
_LAUNCHES = Launches()


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp2(x * -1.4426950408889634))


@triton.jit
def _gelu_tanh(x):
    """x · sigmoid(2y) with y = √(2/π) (x + 0.044715 x³), which is 0.5 x (1 + tanh y)."""
    y = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    return x / (1.0 + tl.exp2(y * -2.8853900817779268))


@triton.jit
def _gated_kernel(
    x, out, inner, tiles, x_token, o_token, KIND: tl.constexpr, TILE: tl.constexpr, OVERLAP: tl.constexpr
):
    token = (tl.program_id(0) // tiles).to(tl.int64)
    d = tl.program_id(0) % tiles * TILE + tl.arange(0, TILE)
    mask = d < inner
    begin(OVERLAP)
    gate = tl.load(x + token * x_token + d, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + token * x_token + inner + d, mask=mask, other=0.0).to(tl.float32)
    y = _silu(gate) if KIND == "silu" else _gelu_tanh(gate)
    tl.store(out + token * o_token + d, (y * up).to(out.dtype.element_ty), mask=mask)


def _tile(num_tokens: int, inner: int) -> int:
    """Columns of a program: large, but small enough that few tokens still fill a card."""
    tile = min(MAX_TILE, next_power_of_2(inner))
    while tile > 256 and num_tokens * cdiv(inner, tile) < FEW_PROGRAMS:
        tile //= 2
    return tile


def _gated(x: torch.Tensor, out: torch.Tensor | None, kind: str) -> torch.Tensor:
    if out is None and x.ndim == 2:
        out = torch.empty(x.shape[0], x.shape[1] // 2, dtype=x.dtype, device=x.device)
    if not _LAUNCHES.again((x, out), kind):
        _first(x, out, kind)
    return out


def _first(x: torch.Tensor, out: torch.Tensor, kind: str) -> None:
    check_dtype("x", x, QUERY_DTYPES)
    check_shape("x", x, (None, None))
    check_last_stride("x", x)
    if x.shape[1] % 2 or x.shape[1] == 0:
        raise KernelValueError(f"x has {x.shape[1]} columns; it must hold gate and up side by side, an even number")
    num_tokens, inner = x.shape[0], x.shape[1] // 2
    check_out("out", out, (num_tokens, inner), x.dtype, x.device)
    if num_tokens == 0:
        return
    tile = _tile(num_tokens, inner)
    tiles = cdiv(inner, tile)
    _LAUNCHES.first(
        (x, out), (kind,), _gated_kernel, (num_tokens * tiles,),
        x, out, inner, tiles, x.stride(0), out.stride(0), KIND=kind, TILE=tile, num_warps=max(1, tile // 512),
        **overlap_options(x.device),
    )  # fmt: skip


def silu_and_mul(x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """silu(x[:, :n]) · x[:, n:] of x `[tokens, 2n]`, in float32, rounded once (SwiGLU, arXiv 2002.05202).

    Raises KernelValueError or KernelTypeError naming the argument.
    """
    return _gated(x, out, "silu")


def gelu_and_mul(x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """gelu(x[:, :n]) · x[:, n:] with the tanh form of GELU (arXiv 1606.08415), as Gemma has it; else `silu_and_mul`."""
    return _gated(x, out, "gelu")
