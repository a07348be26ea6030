"""`DecodeGraphs`: captured decode steps for bucketed numbers of sequences; a step runs padded in the next larger."""

from __future__ import annotations

import bisect
from collections.abc import Callable

import torch

LARGEST_CAPTURE = 512


def capture_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, every 8 up to 64, every 16 up to 256, every 32 up to 512; none above what may run, which is the last."""
    largest = min(max_num_seqs, LARGEST_CAPTURE)
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, LARGEST_CAPTURE + 1, 32)]
    return [size for size in sizes if size < largest] + [largest]


class DecodeGraphs:
    """Graphs of one allocation, in one memory pool; the largest is captured first, the others reuse its memory.

    Args:
        prepare: brings a padding step of so many sequences to the staging buffer and returns what computes it.
        stream: on which to warm up and capture; libraries keep their workspace for it from one capture to the next.
    """

    def __init__(self, prepare: Callable[[int], Callable[[], torch.Tensor]], stream: torch.cuda.Stream) -> None:
        self._prepare = prepare
        self._stream = stream
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._sizes: list[int] = []

    @property
    def sizes(self) -> tuple[int, ...]:
        """Captured sizes, smallest first."""
        return tuple(self._sizes)

    def capture(self, size: int, *, warm_up: bool) -> None:
        """Capture the step of `size` sequences; warming up compiles and loads what it launches."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            compute = self._prepare(size)
            if warm_up:
                compute()
            self._stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                tokens = compute()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        self._graphs[size] = (graph, tokens)
        bisect.insort(self._sizes, size)

    def size_for(self, num_seqs: int) -> int:
        """The captured size that takes `num_seqs` sequences; 0 where none does."""
        index = bisect.bisect_left(self._sizes, num_seqs)
        return self._sizes[index] if index < len(self._sizes) else 0

    def replay(self, size: int) -> torch.Tensor:
        """Run the graph; its tokens int64 [size], valid until the next replay."""
        graph, tokens = self._graphs[size]
        graph.replay()
        return tokens
