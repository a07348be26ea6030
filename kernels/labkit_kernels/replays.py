"""`tighten`: has the kernels of the graph that is replayed next follow each other more closely.

Between the kernels of a graph, an H200 (driver 580.159) waits one of two times: 0.1 µs, or 0.35 µs more, which is 3 to
10 % of a decode step. Which one hangs on what was launched last outside graphs: the shorter one after two programmatic
launches in a row, until some ordinary ones came, though not in every process; see kernels/NOTES.md. No documentation
tells why.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from labkit_kernels.launches import Launches
from labkit_kernels.ops import begin, overlap_options, overlaps_launches

# Two were enough wherever it was tried on the default stream; on a stream of its own three were not always.
NUM_LAUNCHES = 3
_LAUNCHES = Launches()


@triton.jit
def _nothing_kernel(OVERLAP: tl.constexpr):
    begin(OVERLAP)


def tighten(device: torch.device) -> None:
    """Launch programmatic kernels that do nothing, 2 µs, on the current stream; none on cards without such launches."""
    if not overlaps_launches(device):
        return
    for _ in range(NUM_LAUNCHES):
        if not _LAUNCHES.again((), device.index):
            _LAUNCHES.first((), (device.index,), _nothing_kernel, (1,), num_warps=1, **overlap_options(device))
