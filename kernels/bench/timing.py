"""Timing on a card: CUDA-graph replays with the L2 flushed before each, medians; and the card's own ceilings."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from labkit_kernels.cold_timing import FLUSH_BYTES, WARM_UPS, capture, graph_time_s
from labkit_kernels.cold_timing import cold_l2 as make_flush
from labkit_kernels.replays import tighten

__all__ = [
    "capture",
    "copy_ceiling",
    "make_clean_flush",
    "make_flush",
    "read_calls",
    "read_ceiling",
    "time_us",
    "times_us",
]

REPEATS = 30


def time_us(call: Callable[[], object], flush: Callable[[], object], repeats: int = REPEATS) -> float:
    """Median microseconds of one graph replay, cold L2."""
    return 1e6 * graph_time_s(call, flush, repeats)


def times_us(
    calls: list[Callable[[], object]], flush: Callable[[], object], repeats: int = REPEATS
) -> list[float]:  # fmt: skip
    """`time_us` of each of several calls, replayed in turn, so that all see the card in the same state."""
    graphs, device = [capture(call) for call in calls], torch.device("cuda", torch.cuda.current_device())
    spans: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in calls]
    for _ in range(repeats + WARM_UPS):
        for graph, row in zip(graphs, spans, strict=True):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            flush()
            tighten(device)
            begin.record()
            graph.replay()
            end.record()
            row.append((begin, end))
    torch.cuda.synchronize()
    return [statistics.median(begin.elapsed_time(end) for begin, end in row[WARM_UPS:]) * 1e3 for row in spans]


def make_clean_flush(device: str = "cuda") -> Callable[[], object]:
    """As `make_flush`, but by reading: nothing is left in the L2 that the next call's reads must write back first."""
    buffer = torch.ones(FLUSH_BYTES // 4, dtype=torch.int32, device=device)
    largest = torch.empty((), dtype=torch.int32, device=device)
    return lambda: torch.amax(buffer, 0, out=largest)


@triton.jit
def _read_kernel(x, out, num_blocks, BLOCK: tl.constexpr, UNROLL: tl.constexpr):
    total = tl.zeros([BLOCK], tl.int32)
    for i in range(tl.program_id(0), num_blocks, tl.num_programs(0) * UNROLL):
        for j in tl.static_range(UNROLL):
            at = i + j * tl.num_programs(0)
            total += tl.load(x + at.to(tl.int64) * BLOCK + tl.arange(0, BLOCK), mask=at < num_blocks, other=0)
    tl.store(out + tl.program_id(0), tl.sum(total, 0))


READ_SHAPES = (
    *((132 * n, block, unroll) for n, block, unroll in ((8, 1024, 8), (8, 2048, 4), (4, 4096, 4), (16, 1024, 4))),
    *((132 * n, 2048, 8) for n in (4, 8, 12)),
)


def read_calls(num_bytes: int) -> list[Callable[[], object]]:
    """Kernels of several shapes that only read `num_bytes`."""
    x = torch.ones(num_bytes // 4, dtype=torch.int32, device="cuda")
    out = torch.empty(8192, dtype=torch.int32, device="cuda")
    return [
        lambda p=programs, b=block, u=unroll: _read_kernel[(p,)](x, out, x.numel() // b, BLOCK=b, UNROLL=u)
        for programs, block, unroll in READ_SHAPES
    ]


def read_ceiling(flush: Callable[[], object], num_bytes: int = 2 * 1024**3) -> float:
    """GB/s of a kernel that only reads: the best of several shapes."""
    return num_bytes / min(times_us(read_calls(num_bytes), flush, 11)) / 1e3


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
