"""`StepGraphs`: captured steps of a few shapes; a step runs padded in the next larger one.

Steps that only decode have a graph for many numbers of sequences. Steps in which prompts are computed beside them have
one for several numbers of tokens: which of its rows decode is read on the device.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable

import torch
from labkit_kernels.replays import tighten

from labkit.memory.step_shapes import StepShape


def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """torch's own stream for captures, since libraries keep a workspace for each stream that they ever ran on."""
    stream = torch.cuda.graph(torch.cuda.CUDAGraph()).capture_stream
    if stream is not None and device.index in (None, stream.device.index):
        return stream
    return torch.cuda.Stream(device)


class StepGraphs:
    """Graphs of one allocation, in one memory pool; the largest is captured first, the others reuse its memory.

    Args:
        prepare: brings a padding step of a shape to the staging buffer and returns what computes it.
        stream: on which to warm up and capture; libraries keep their workspace for it from one capture to the next.
        padded_tokens: see `next_larger`.
    """

    def __init__(
        self,
        prepare: Callable[[StepShape], Callable[[], torch.Tensor]],
        stream: torch.cuda.Stream,
        padded_tokens: int = 0,
    ) -> None:
        self._prepare = prepare
        self._stream = stream
        self._padded_tokens = padded_tokens
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[StepShape, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._shapes: tuple[list[StepShape], list[StepShape]] = ([], [])

    def capture(self, shape: StepShape, *, warm_up: bool) -> None:
        """Capture the step of a shape; warming up compiles and loads what it launches."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            compute = self._prepare(shape)
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
        self._graphs[shape] = (graph, tokens)
        bisect.insort(self._shapes[shape.num_prompts > 0], shape)

    def shape_for(self, filled: StepShape) -> StepShape | None:
        """The captured shape that takes a step; None where none does."""
        return next_larger(self._shapes[filled.num_prompts > 0], filled, self._padded_tokens)

    def replay(self, shape: StepShape) -> torch.Tensor:
        """Run the graph; its tokens int64 [places], valid until the next replay."""
        graph, tokens = self._graphs[shape]
        tighten(self._stream.device)
        graph.replay()
        return tokens


def next_larger(shapes: list[StepShape], filled: StepShape, padded_tokens: int = 0) -> StepShape | None:
    """The first of `shapes`, smallest first, that has room for `filled`; None where none has.

    Args:
        padded_tokens: of the largest shape that is taken for its places alone, past one with room for the tokens.
    """
    first = bisect.bisect_left(shapes, filled.num_tokens, key=lambda shape: shape.num_tokens)
    for index in range(first, len(shapes)):
        if index > first and shapes[index].num_tokens > padded_tokens:
            break
        if shapes[index].num_prompts >= filled.num_prompts:
            return shapes[index]
    return None
