"""Rows in e4m3, each with a scale of its own, for fp8 products; reference: `reference_ops.quantise_rows`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from labkit_kernels.checks import QUERY_DTYPES, KernelValueError, check_dtype, check_last_stride, check_shape
from labkit_kernels.few_rows import BLOCK
from labkit_kernels.reference_ops import E4M3_MAX, SMALLEST_SCALE

MAX_TILE = 8192


@triton.jit
def _quantise_kernel(
    x, out, scales, columns, x_row, LARGEST: tl.constexpr, SMALLEST: tl.constexpr, TILE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """One row: its largest number first, then the row again, which is in L1 or L2 by then."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, TILE)
    largest = tl.zeros([TILE], tl.float32)
    for first in range(0, columns, TILE):
        y = tl.load(x + row * x_row + first + column, mask=first + column < columns, other=0.0)
        largest = tl.maximum(largest, tl.abs(y.to(tl.float32)))
    scale = tl.maximum(tl.max(largest, 0) / LARGEST, SMALLEST)
    tl.store(scales + row, scale)
    for first in range(0, columns, TILE):
        mask = first + column < columns
        source = column
        if INTERLEAVED:
            source = column // 128 * 128 + column % 4 * 32 + column % 128 // 4
        y = tl.load(x + row * x_row + first + source, mask=mask, other=0.0).to(tl.float32) / scale
        y = tl.minimum(tl.maximum(y, -LARGEST), LARGEST)
        tl.store(out + row * columns + first + column, y.to(out.dtype.element_ty), mask=mask)


def quantise_rows(x: torch.Tensor, *, interleaved: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """x `[rows, columns]` as float8_e4m3fn and float32 scales `[rows, 1]`, max |x| / 448 of each row, never 0.

    `interleaved` writes the columns, a multiple of 128, in the order of `few_rows.interleave`. Raises KernelValueError
    or KernelTypeError naming the argument.
    """
    check_dtype("x", x, QUERY_DTYPES)
    check_shape("x", x, (None, None))
    check_last_stride("x", x)
    rows, columns = x.shape
    if interleaved and columns % BLOCK:
        raise KernelValueError(f"x has {columns} columns; interleaved they must be a multiple of {BLOCK}")
    out = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    if rows:
        tile = min(MAX_TILE, triton.next_power_of_2(max(columns, 1)))
        _quantise_kernel[(rows,)](
            x, out, scales, columns, x.stride(0), LARGEST=E4M3_MAX, SMALLEST=SMALLEST_SCALE, TILE=tile,
            INTERLEAVED=interleaved, num_warps=max(1, min(16, tile // 512)),
        )  # fmt: skip
    return out, scales
