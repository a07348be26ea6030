"""torch's caching allocator on paper: which segments a card gives for a sequence of allocations.

Rules as in c10/cuda/CUDACachingAllocator.cpp, one stream: sizes are whole 512 bytes; up to 1 MiB lie in segments of
2 MiB, below 10 MiB in segments of 20 MiB, larger ones in a segment of their own in whole 2 MiB; the smallest free block
that is large enough is taken, and what is left over of it becomes a block of its own.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import Protocol

MIB = 2**20
ROUNDING_BYTES = 512
SMALL_BYTES, SMALL_SEGMENT_BYTES = MIB, 2 * MIB
LARGE_BYTES, MIDDLE_SEGMENT_BYTES, SEGMENT_STEP_BYTES = 10 * MIB, 20 * MIB, 2 * MIB


class Memory(Protocol):
    """Where the buffers of a step lie."""

    def take(self, num_bytes: int) -> int:
        """Allocate; returns what `give` takes."""
        ...

    def give(self, handle: int) -> None:
        """Free an allocation."""
        ...


def rounded(num_bytes: int) -> int:
    """Bytes of an allocation as the allocator counts it; what is too little to split off is not counted."""
    return max(ROUNDING_BYTES, -(-num_bytes // ROUNDING_BYTES) * ROUNDING_BYTES)


class PeakMeter:
    """Adds up what is alive; `peak_bytes` is the most at one moment."""

    def __init__(self) -> None:
        self.bytes = self.peak_bytes = 0
        self._sizes: list[int] = []

    def take(self, num_bytes: int) -> int:
        """See `Memory.take`."""
        self._sizes.append(rounded(num_bytes))
        self.bytes += self._sizes[-1]
        self.peak_bytes = max(self.peak_bytes, self.bytes)
        return len(self._sizes) - 1

    def give(self, handle: int) -> None:
        """See `Memory.give`."""
        self.bytes -= self._sizes[handle]


@dataclass
class _Block:
    size: int
    is_small: bool
    is_free: bool = True
    before: int | None = None
    after: int | None = None


class CachingAllocator:
    """A pool of its own, as that of captured graphs; `segment_bytes` is what it holds of the card.

    `bytes` counts what is alive as torch does, with what was too little to split off; `peak_bytes` is its most.
    """

    def __init__(self) -> None:
        self.segment_bytes = self.bytes = self.peak_bytes = 0
        self._blocks: dict[int, _Block] = {}
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        self._next_start = 0

    def take(self, num_bytes: int) -> int:
        """See `Memory.take`."""
        size = rounded(num_bytes)
        is_small = size <= SMALL_BYTES
        free = self._free[is_small]
        index = bisect.bisect_left(free, (size, -1))
        start = free.pop(index)[1] if index < len(free) else self._new_segment(size, is_small)
        block = self._blocks[start]
        block.is_free = False
        rest = block.size - size
        if rest >= ROUNDING_BYTES if is_small else rest > SMALL_BYTES:
            self._split(start, block, size)
        self.bytes += block.size
        self.peak_bytes = max(self.peak_bytes, self.bytes)
        return start

    def give(self, handle: int) -> None:
        """See `Memory.give`; free neighbours become one block."""
        start, block = handle, self._blocks[handle]
        self.bytes -= block.size
        if block.after is not None and self._blocks[block.after].is_free:
            self._join(start, block.after)
        if block.before is not None and self._blocks[block.before].is_free:
            start, later = block.before, start
            self._free[block.is_small].remove((self._blocks[start].size, start))
            self._blocks[start].is_free = False
            self._join(start, later)
        self._blocks[start].is_free = True
        bisect.insort(self._free[block.is_small], (self._blocks[start].size, start))

    def _new_segment(self, size: int, is_small: bool) -> int:
        if is_small:
            segment = SMALL_SEGMENT_BYTES
        elif size < LARGE_BYTES:
            segment = MIDDLE_SEGMENT_BYTES
        else:
            segment = -(-size // SEGMENT_STEP_BYTES) * SEGMENT_STEP_BYTES
        start = self._next_start
        self._next_start += segment
        self.segment_bytes += segment
        self._blocks[start] = _Block(segment, is_small)
        return start

    def _split(self, start: int, block: _Block, size: int) -> None:
        rest = start + size
        self._blocks[rest] = _Block(block.size - size, block.is_small, before=start, after=block.after)
        if block.after is not None:
            self._blocks[block.after].before = rest
        block.size, block.after = size, rest
        bisect.insort(self._free[block.is_small], (self._blocks[rest].size, rest))

    def _join(self, start: int, later: int) -> None:
        block, gone = self._blocks[start], self._blocks.pop(later)
        if gone.is_free:
            self._free[gone.is_small].remove((gone.size, later))
        block.size += gone.size
        block.after = gone.after
        if gone.after is not None:
            self._blocks[gone.after].before = start
