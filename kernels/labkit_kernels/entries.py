"""`write_entries`: single numbers of an int32 tensor, such as what is new in block tables, in one launch.

The launch is programmatic: ordinary ones between replays of a graph make the next one slower (`replays.tighten`).
Reference: `index_copy_` of the flat tensor.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from labkit_kernels.checks import KernelValueError, check_device, check_dtype
from labkit_kernels.launches import Launches
from labkit_kernels.ops import begin, overlap_options
from labkit_kernels.sizes import cdiv, next_power_of_2

TILE = 64
_LAUNCHES = Launches()


@triton.jit
def _write_kernel(table, entries, count, TILE: tl.constexpr, OVERLAP: tl.constexpr):
    begin(OVERLAP)
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    index = tl.load(entries + at)
    tl.store(table + index, tl.load(entries + count + at))


def pack_entries(indices: np.ndarray, values: np.ndarray) -> np.ndarray:
    """int32 `[2, N]`: indices and values `[n]`, 1 or more, the last repeated up to a power of two of `TILE` or more.

    Few numbers of entries, so that a launch looks like an earlier one.
    """
    count = len(indices)
    packed = np.empty((2, max(TILE, next_power_of_2(count))), np.int32)
    packed[0, :count], packed[1, :count] = indices, values
    packed[:, count:] = packed[:, count - 1 : count]
    return packed


def write_entries(table: torch.Tensor, entries: torch.Tensor) -> None:
    """`table.view(-1)[entries[0]] = entries[1]` in place.

    table int32, contiguous; entries int32 `[2, N]` as of `pack_entries`, on the same device. Of entries with equal
    indices only equal values are allowed. Raises KernelValueError or KernelTypeError naming the argument.
    """
    parts = (table, entries)
    if _LAUNCHES.again(parts):
        return
    check_dtype("table", table, (torch.int32,))
    check_dtype("entries", entries, (torch.int32,))
    check_device("entries", entries, table.device)
    if not table.is_contiguous():
        raise KernelValueError("table must be contiguous")
    if entries.ndim != 2 or entries.shape[0] != 2 or entries.shape[1] % TILE or not entries.is_contiguous():
        raise KernelValueError(f"entries is {tuple(entries.shape)}; it must be [2, N], N a multiple of {TILE}")
    if not entries.shape[1]:
        return
    _LAUNCHES.first(
        parts, (), _write_kernel, (cdiv(entries.shape[1], TILE),),
        table, entries, entries.shape[1], TILE=TILE, num_warps=1, **overlap_options(table.device),
    )  # fmt: skip
