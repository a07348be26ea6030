"""Timing on a card: CUDA-graph replays with the L2 flushed before each, medians; and the card's own ceilings."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from labkit_kernels.cold_timing import capture, graph_time_s
from labkit_kernels.cold_timing import cold_l2 as make_flush

__all__ = ["capture", "copy_ceiling", "make_flush", "read_ceiling", "time_us"]

REPEATS = 30


def time_us(call: Callable[[], object], flush: Callable[[], object], repeats: int = REPEATS) -> float:
    """Median microseconds of one graph replay, cold L2."""
    return 1e6 * graph_time_s(call, flush, repeats)


@triton.jit
def _read_kernel(x, out, num_blocks, BLOCK: tl.constexpr, UNROLL: tl.constexpr):
    total = tl.zeros([BLOCK], tl.int32)
    for i in range(tl.program_id(0), num_blocks, tl.num_programs(0) * UNROLL):
        for j in tl.static_range(UNROLL):
            at = i + j * tl.num_programs(0)
            total += tl.load(x + at.to(tl.int64) * BLOCK + tl.arange(0, BLOCK), mask=at < num_blocks, other=0)
    tl.store(out + tl.program_id(0), tl.sum(total, 0))


def read_ceiling(flush: Callable[[], object], num_bytes: int = 2 * 1024**3) -> float:
    """GB/s of a kernel that only reads: the best of several shapes."""
    x = torch.ones(num_bytes // 4, dtype=torch.int32, device="cuda")
    out = torch.empty(8192, dtype=torch.int32, device="cuda")
    best = 0.0
    shapes = [
        (132 * n, block, unroll) for n, block, unroll in ((8, 1024, 8), (8, 2048, 4), (4, 4096, 4), (16, 1024, 4))
    ]
    shapes += [(132 * n, 2048, 8) for n in (4, 8, 12)]
    for programs, block, unroll in shapes:
        us = time_us(
            lambda p=programs, b=block, u=unroll: _read_kernel[(p,)](x, out, x.numel() // b, BLOCK=b, UNROLL=u),
            flush,
            11,
        )
        best = max(best, num_bytes / us / 1e3)
    return best


@triton.jit
def _copy_kernel(x, y, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at))


def copy_ceiling(flush: Callable[[], object], num_bytes: int = 2 * 1024**3) -> float:
    """GB/s of a device copy, bytes read plus bytes written: the better of torch's own and plain kernels."""
    source = torch.ones(num_bytes // 4, dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    calls = [lambda: target.copy_(source), lambda: torch.add(source, 0, out=target)]
    calls += [lambda b=b: _copy_kernel[(source.numel() // b,)](source, target, BLOCK=b) for b in (2048, 8192)]
    return 2 * num_bytes / min(time_us(call, flush, 11) for call in calls) / 1e3
