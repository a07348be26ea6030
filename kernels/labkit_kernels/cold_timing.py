"""Time of a call on a card: replays of its CUDA graph, each with a cold L2."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from labkit_kernels.replays import tighten

# Several times the largest L2.
FLUSH_BYTES = 256 * 2**20
REPEATS, WARM_UPS = 7, 3


def cold_l2() -> Callable[[], object]:
    """A call that fills the L2 with what nobody reads again."""
    return torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda").zero_


def capture(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """`call` as a graph, after one warm-up on a side stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def graph_time_s(call: Callable[[], object], flush: Callable[[], object], repeats: int = REPEATS) -> float:
    """Median seconds of `repeats` graph replays of `call`, after a few that warm up; `flush` runs before each.

    Its kernels follow each other as closely as in a replayed step of an engine.
    """
    graph, device = capture(call), torch.device("cuda", torch.cuda.current_device())
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats + WARM_UPS)
    ]
    for begin, end in events:
        flush()
        tighten(device)
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events[WARM_UPS:]) / 1e3
