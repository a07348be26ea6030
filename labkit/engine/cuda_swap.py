"""`SwapLane`: KV blocks between a card's pool and host memory, while the card computes.

A swapped block is a row: its keys and values of all layers, one after the other. Blocks that leave are gathered into
rows on the card, in the order of the steps, and from there go to the host beside the next steps. Blocks that come back
travel as rows while others are computed, and take their places before the step that reads them. Rows cross the bus by
the card's copy engines, so that no kernel has to share its processors: what a step waits for is a copy within the card.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING

import torch
from labkit_kernels.block_copy import BlockCaches, block_caches, launch_copy

if TYPE_CHECKING:
    from labkit.engine.cuda_cache import LayerCache

# Copies within the card may take all of it.
_ALL_PROGRAMS = 65535
# Kernels are compiled for numbers of copies that 16 divides, and for others.
_COMPILED_FOR = (1, 16)
Pairs = Sequence[tuple[int, int]]
# What, and the events of its begin and end.
SwapTimes = list[tuple[str, torch.cuda.Event, torch.cuda.Event]]


@dataclass(frozen=True)
class StagedRows:
    """Rows on the card through which blocks pass: uint8 `[places, row bytes]`, and the layers' views of them."""

    rows: torch.Tensor
    layers: Sequence[LayerCache]


@dataclass
class _Turn:
    """Blocks on their way: `blocks` of the pool and the places `start`, … of their rows, free again after `done`."""

    start: int
    blocks: list[int]
    done: torch.cuda.Event | None = None

    def overlaps(self, start: int, count: int) -> bool:
        return start < self.start + len(self.blocks) and self.start < start + count


class SwapLane:
    """The copies of one cache; a swap is queued and the host goes on.

    Attributes:
        times: a list to which the copies over the bus ("bus") and what the steps wait for ("wait") are added; None
            adds nothing.

    Args:
        pool: the layers' blocks on the card.
        host: uint8 `[host blocks, row bytes]`, pinned for a card.
        leaving, coming: rows on the card; more blocks at once pass in turns.
    """

    def __init__(self, pool: Sequence[LayerCache], host: torch.Tensor, leaving: StagedRows, coming: StagedRows) -> None:
        self._device = pool[0].k.device
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._host, self._leaving, self._coming = host, leaving, coming
        places = [_by_shape(layers) for layers in (pool, leaving.layers, coming.layers)]
        groups = [tuple(block_caches(place[key], self._device) for place in places) for key in places[0]]
        self._ways_out = [(pool, leaving) for pool, leaving, _ in groups]
        self._ways_in = [(coming, pool) for pool, _, coming in groups]
        self._left: list[_Turn] = []
        self._came: list[_Turn] = []
        self._on_their_way: list[tuple[_Turn, torch.cuda.Event | None]] = []
        self.times: SwapTimes | None = None
        if self._stream is not None:
            self._compile()

    def swap_out(self, pairs: Pairs) -> None:
        """Copy (block, host block) pairs to the host."""
        for part in self._turns(pairs, self._leaving):
            turn, free = _take(self._left, part, len(self._leaving.rows))
            table = self._table([(block, turn.start + at) for at, block in enumerate(turn.blocks)])
            with self._timed("wait"):
                self._wait(free)
                self._move(self._ways_out, table)
            with self._beside(self._mark()), self._timed("bus"):
                for place, host, count in _runs(turn.start, part):
                    self._host[host : host + count].copy_(self._leaving.rows[place : place + count], non_blocking=True)
                turn.done = self._mark()

    def swap_in(self, pairs: Pairs) -> None:
        """Begin to copy (block, host block) pairs to the card; they are there after `settle`."""
        for part in self._turns(pairs, self._coming):
            turn, free = _take(self._came, part, len(self._coming.rows))
            if any(other.overlaps(turn.start, len(part)) for other, _ in self._on_their_way):
                self.settle()
                free = self._mark()
            with self._beside(free):
                with self._timed("bus"):
                    for place, host, count in _runs(turn.start, part):
                        self._coming.rows[place : place + count].copy_(
                            self._host[host : host + count], non_blocking=True
                        )
                self._on_their_way.append((turn, self._mark()))

    def settle(self) -> None:
        """Put the blocks that are on their way to the card into their places, in stream order."""
        for turn, came in self._on_their_way:
            table = self._table([(turn.start + at, block) for at, block in enumerate(turn.blocks)])
            with self._timed("wait"):
                self._wait(came)
                self._move(self._ways_in, table)
            turn.done = self._mark()
        self._on_their_way = []

    def finish(self) -> None:
        """Wait until nothing is under way; the memory may be given up then."""
        self.settle()
        if self._stream is not None:
            self._stream.synchronize()

    def _turns(self, pairs: Pairs, staged: StagedRows) -> Iterator[Pairs]:
        """By host block, so that neighbours there travel together; half of the rows at once, so that the next turn
        need not wait for the last."""
        ordered, size = sorted(pairs, key=itemgetter(1)), max(1, len(staged.rows) // 2)
        return (ordered[start : start + size] for start in range(0, len(ordered), size))

    def _table(self, pairs: Pairs) -> torch.Tensor:
        """From where to where, on the card."""
        table = torch.tensor(pairs, dtype=torch.int64)
        return table if self._stream is None else table.pin_memory().to(self._device, non_blocking=True)

    @staticmethod
    def _move(ways: list[tuple[BlockCaches, BlockCaches]], table: torch.Tensor) -> None:
        """Within the card."""
        for source, target in ways:
            launch_copy(source, target, table, _ALL_PROGRAMS)

    def _compile(self) -> None:
        """Launch copies of nothing, so that no kernel is compiled while requests wait."""
        for count in _COMPILED_FOR:
            self._move([*self._ways_out, *self._ways_in], self._table([(-1, -1)] * count))

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

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        if self.times is None or self._stream is None:
            yield
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        yield
        end.record()
        self.times.append((what, begin, end))


def _take(turns: list[_Turn], part: Pairs, num_places: int) -> tuple[_Turn, torch.cuda.Event | None]:
    """A turn behind the last one, from the first place on where the end is near, and when its places are free.

    Turns end in their order, so that the latest one of those that had its places tells.
    """
    start = turns[-1].start + len(turns[-1].blocks) if turns else 0
    turn = _Turn(start if start + len(part) <= num_places else 0, [block for block, _ in part])
    before = [other for other in turns if other.overlaps(turn.start, len(part))]
    turns[:] = [*(other for other in turns if other not in before), turn]
    return turn, before[-1].done if before else None


def _runs(place: int, pairs: Pairs) -> Iterator[tuple[int, int, int]]:
    """(place, host block, count) of neighbours, `pairs` in the order of their places."""
    first, count = pairs[0][1], 0
    for _, host in pairs:
        if host != first + count:
            yield place, first, count
            place, first, count = place + count, host, 0
        count += 1
    yield place, first, count


def _by_shape(layers: Sequence[LayerCache]) -> dict[tuple, list[torch.Tensor]]:
    """Tensors of like blocks together: one launch moves a block of all of them."""
    groups: dict[tuple, list[torch.Tensor]] = {}
    for layer in layers:
        for tensor in layer.tensors():
            groups.setdefault((tensor.dtype, tensor.shape[1:]), []).append(tensor)
    return groups
