"""`SwapLane`: KV blocks between a card's pool and host memory, while the card computes.

Blocks that leave are copied within the card, in the order of the steps, and from there go to the host beside the next
step. Blocks that come back travel while the step before is still computed, and then take their places in order. So what
a step waits for is a copy at the card's own speed, not one over the bus.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from labkit_kernels.block_copy import SWAP_PROGRAMS, block_caches, launch_copy

if TYPE_CHECKING:
    from labkit.engine.cuda_cache import LayerCache

_POOL, _HOST, _LEAVING, _COMING = range(4)
# Copies within the card may take all of it.
_ALL_PROGRAMS = 65535
Pairs = Sequence[tuple[int, int]]


class SwapLane:
    """The copies of one cache; a swap is queued and the host goes on.

    Args:
        pool, host: the layers' blocks on the card and in host memory, which is pinned for a card.
        leaving, coming: blocks on the card through which they pass, `num_staged` each; more at once pass in turns.
    """

    def __init__(
        self,
        pool: Sequence[LayerCache],
        host: Sequence[LayerCache],
        leaving: Sequence[LayerCache],
        coming: Sequence[LayerCache],
        num_staged: int,
    ) -> None:
        self._device = pool[0].k.device
        self._num_staged = num_staged
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        places = [_by_shape(layers) for layers in (pool, host, leaving, coming)]
        self._groups = [tuple(block_caches(place[key], self._device) for place in places) for key in places[0]]
        self._left: torch.cuda.Event | None = None
        self._placed: torch.cuda.Event | None = None

    def swap_out(self, pairs: Pairs) -> None:
        """Copy (block, host block) pairs to the host."""
        for part in self._turns(pairs):
            self._wait(self._left)
            self._copy(_POOL, _LEAVING, [(block, place) for place, (block, _) in enumerate(part)], _ALL_PROGRAMS)
            with self._beside(self._mark()):
                self._copy(_LEAVING, _HOST, [(place, host) for place, (_, host) in enumerate(part)], SWAP_PROGRAMS)
                self._left = self._mark()

    def swap_in(self, pairs: Pairs) -> None:
        """Copy (block, host block) pairs to the card."""
        for part in self._turns(pairs):
            with self._beside(self._placed):
                self._copy(_HOST, _COMING, [(host, place) for place, (_, host) in enumerate(part)], SWAP_PROGRAMS)
                came = self._mark()
            self._wait(came)
            self._copy(_COMING, _POOL, [(place, block) for place, (block, _) in enumerate(part)], _ALL_PROGRAMS)
            self._placed = self._mark()

    def finish(self) -> None:
        """Wait until nothing is under way; the memory may be given up then."""
        if self._stream is not None:
            self._stream.synchronize()

    def _turns(self, pairs: Pairs) -> Iterator[Pairs]:
        return (pairs[start : start + self._num_staged] for start in range(0, len(pairs), self._num_staged))

    def _copy(self, source: int, target: int, pairs: Pairs, programs: int) -> None:
        table = torch.tensor(pairs, dtype=torch.int64)
        if self._stream is not None:
            table = table.pin_memory().to(self._device, non_blocking=True)
        for group in self._groups:
            launch_copy(group[source], group[target], table, programs)

    def _mark(self) -> torch.cuda.Event | None:
        return None if self._stream is None else torch.cuda.current_stream(self._device).record_event()

    def _wait(self, event: torch.cuda.Event | None) -> None:
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    @contextmanager
    def _beside(self, after: torch.cuda.Event | None) -> Iterator[None]:
        """On the lane's own stream, once `after` has happened."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            self._wait(after)
            yield


def _by_shape(layers: Sequence[LayerCache]) -> dict[tuple, list[torch.Tensor]]:
    """Tensors of like blocks together: one launch moves a block of all of them."""
    groups: dict[tuple, list[torch.Tensor]] = {}
    for layer in layers:
        for tensor in layer.tensors():
            groups.setdefault((tensor.dtype, tensor.shape[1:]), []).append(tensor)
    return groups
