"""RMS norm, alone and fused with the residual sum; reference: `reference_ops.rms_norm`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from labkit_kernels.checks import (
    QUERY_DTYPES,
    KernelValueError,
    check_device,
    check_dtype,
    check_last_stride,
    check_out,
    check_shape,
)
from labkit_kernels.launches import Launches
from labkit_kernels.ops import begin, overlap_options
from labkit_kernels.sizes import cdiv, next_power_of_2

MAX_HIDDEN = 32768
ELEMENTS_OF_PROGRAM = 2048
MANY_ROWS = 1024
_LAUNCHES = Launches()


@dataclass(frozen=True)
class RowTiling:
    """Launch settings of a kernel that works on whole rows: rows of a program, padded row length, warps."""

    rows: int
    padded: int
    warps: int


def row_tiling(num_rows: int, hidden: int) -> RowTiling:
    """Short rows share a program where there are many of them; each thread gets about 16 elements."""
    padded = next_power_of_2(hidden)
    rows = max(1, ELEMENTS_OF_PROGRAM // padded) if num_rows >= MANY_ROWS else 1
    return RowTiling(rows, padded, max(1, min(16, rows * padded // 512)))


def check_rows(name: str, x: torch.Tensor, hidden: int | None = None) -> None:
    """Checks `[tokens, hidden]` or `[tokens, heads, D]` activations."""
    check_dtype(name, x, QUERY_DTYPES)
    if x.ndim not in (2, 3):
        raise KernelValueError(f"{name} has shape {tuple(x.shape)}; it must be (tokens, hidden) or (tokens, heads, D)")
    if not 1 <= x.shape[-1] <= MAX_HIDDEN:
        raise KernelValueError(f"{name} has {x.shape[-1]} values in a row; works: 1 to {MAX_HIDDEN}")
    if hidden is not None and x.shape[-1] != hidden:
        raise KernelValueError(f"{name} has {x.shape[-1]} values in a row; it must be {hidden}")
    check_last_stride(name, x)


def row_strides(x: torch.Tensor) -> tuple[int, int, int]:
    """Heads of a token and element strides of token and head; one head for `[tokens, hidden]`."""
    return (1, x.stride(0), 0) if x.ndim == 2 else (x.shape[1], x.stride(0), x.stride(1))


@triton.jit
def row_starts(row, heads, stride_token, stride_head):
    """Element offset of each (token, head) row; 64-bit, since activations go past 2³¹ elements."""
    row = row.to(tl.int64)
    return row // heads * stride_token + row % heads * stride_head


@triton.jit
def normalised(x, weight, eps, hidden, OFFSET: tl.constexpr):
    """Float32 rows `[rows, padded]` (zero past `hidden`) over their root mean square, times weight or 1 + weight."""
    scale = tl.rsqrt(tl.sum(x * x, 1) / hidden + eps)
    if OFFSET:
        weight += 1.0
    return x * scale[:, None] * weight[None, :]


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x, residual, weight, out, num_rows, hidden, eps, heads, x_token, x_head, r_token, r_head, o_token, o_head,
    ADD: tl.constexpr, OFFSET: tl.constexpr, ROWS: tl.constexpr, PADDED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, PADDED)
    mask = (row < num_rows)[:, None] & (d < hidden)[None, :]
    begin(OVERLAP)
    w = tl.load(weight + d, mask=d < hidden, other=0.0).to(tl.float32)
    values = tl.load(x + row_starts(row, heads, x_token, x_head)[:, None] + d[None, :], mask=mask, other=0.0)
    values = values.to(tl.float32)
    if ADD:
        at = residual + row_starts(row, heads, r_token, r_head)[:, None] + d[None, :]
        total = (values + tl.load(at, mask=mask, other=0.0).to(tl.float32)).to(residual.dtype.element_ty)
        tl.store(at, total, mask=mask)
        values = total.to(tl.float32)
    y = normalised(values, w, eps, hidden, OFFSET)
    at = out + row_starts(row, heads, o_token, o_head)[:, None] + d[None, :]
    tl.store(at, y.to(out.dtype.element_ty), mask=mask)


def _launch(x, residual, weight, eps, out, offset) -> None:
    parts, settings = (x, residual, weight, out), (eps, offset)
    if _LAUNCHES.again(parts, *settings):
        return
    check_rows("x", x)
    if residual is not None:
        check_out("residual", residual, x.shape, x.dtype, x.device)
    hidden = x.shape[-1]
    check_dtype("weight", weight, QUERY_DTYPES)
    check_device("weight", weight, x.device)
    check_shape("weight", weight, (hidden,))
    check_last_stride("weight", weight)
    if not eps > 0:
        raise KernelValueError(f"eps is {eps}; it must be positive")
    check_out("out", out, x.shape, x.dtype, x.device)
    heads, *x_strides = row_strides(x)
    num_rows = x.shape[0] * heads
    if num_rows == 0:
        return
    tiling = row_tiling(num_rows, hidden)
    other = x if residual is None else residual
    _LAUNCHES.first(
        parts, settings, _rms_norm_kernel, (cdiv(num_rows, tiling.rows),),
        x, other, weight, out, num_rows, hidden, eps, heads, *x_strides, *row_strides(other)[1:],
        *row_strides(out)[1:], ADD=residual is not None, OFFSET=offset, ROWS=tiling.rows, PADDED=tiling.padded,
        num_warps=tiling.warps, **overlap_options(x.device),
    )  # fmt: skip


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, offset: bool = False, out: torch.Tensor | None = None
) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension (arXiv 1910.07467); Gemma's 1 + weight with `offset`.

    x `[tokens, hidden]` or `[tokens, heads, D]`, any strides but the last; weight `[hidden]`. `out` may be x. Raises
    KernelValueError or KernelTypeError naming the argument.
    """
    out = torch.empty_like(x) if out is None else out
    _launch(x, None, weight, eps, out, offset)
    return out


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    offset: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """residual += x in place, rounded to its dtype, then the RMS norm of the sum; `out` may be x.

    x and residual `[tokens, hidden]` of one dtype. Raises as `rms_norm`.
    """
    out = torch.empty_like(x) if out is None else out
    _launch(x, residual, weight, eps, out, offset)
    return out
