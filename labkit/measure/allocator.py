"""Torch's CUDA allocator over time: allocated, active, reserved, and what lies between them.

Everything comes from torch's own live answers; the file for torch's memory viewer is written, and never read here.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.errors import FileFormatError, OutOfRangeError, UnsupportedError
from labkit.text import plain

MAX_TRACE_ENTRIES = 100_000
_NO_CARD = "torch's allocator keeps no account on a CPU"


@dataclass(frozen=True)
class AllocatorState:
    """The allocator at one moment, in bytes.

    Attributes:
        time_s: since the timeline began.
        allocated_bytes: in tensors.
        active_bytes: these and what waits for another stream.
        reserved_bytes: taken from the driver.
        unused_split_bytes: free pieces of segments that are partly in use, which cannot go back to the driver.
    """

    time_s: float
    allocated_bytes: int
    active_bytes: int
    reserved_bytes: int
    unused_split_bytes: int = 0

    @property
    def fragmentation(self) -> float:
        """Share of the reserved bytes that is free and stuck, 0 to 1."""
        return self.unused_split_bytes / self.reserved_bytes if self.reserved_bytes else 0.0


class AllocatorTimeline:
    """Collects the allocator's state whenever `look` is called; None of it where there is no card.

    Args:
        stats: gives torch's `memory_stats`; None takes the current card's.
        clock: monotonic seconds.
    """

    def __init__(
        self, stats: Callable[[], Mapping[str, int]] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stats, self._clock = stats or _torch_stats, clock
        self._start_s = clock()
        self._states: list[AllocatorState] = []
        self.reason = ""

    @property
    def states(self) -> tuple[AllocatorState, ...]:
        """What was seen so far."""
        return tuple(self._states)

    def look(self) -> AllocatorState | None:
        """The state now; None, with `reason`, where the allocator does not say."""
        try:
            stats = self._stats()
            values = [int(stats[f"{name}_bytes.all.current"])
                      for name in ("allocated", "active", "reserved", "inactive_split")]  # fmt: skip
        except (UnsupportedError, KeyError) as error:
            self.reason = f"not available: {plain(error, 160)}"
            return None
        state = AllocatorState(self._clock() - self._start_s, *values)
        self._states.append(state)
        return state


def _torch_stats() -> Mapping[str, int]:
    import torch

    if not torch.cuda.is_available():
        raise UnsupportedError(_NO_CARD, works="a card")
    return torch.cuda.memory_stats()


def trace_timeline(
    entries: Sequence[Mapping[str, Any]], end: AllocatorState | None = None
) -> tuple[AllocatorState, ...]:
    """The states between the events of one device's trace in `torch.cuda.memory._snapshot()["device_traces"]`.

    Args:
        entries: events in order, each with `action`, `size` and `time_us`; actions that move no bytes are passed over.
        end: the state after the last event, from which those before are counted back; None begins at zero.

    Raises:
        FileFormatError: an event without a size or time.
    """
    moves = {
        "alloc": (1, 1, 0), "free_requested": (-1, 0, 0), "free_completed": (0, -1, 0),
        "segment_alloc": (0, 0, 1), "segment_free": (0, 0, -1), "segment_map": (0, 0, 1), "segment_unmap": (0, 0, -1),
    }  # fmt: skip
    rows, totals = [], [0, 0, 0]
    for entry in entries:
        signs = moves.get(str(entry.get("action")))
        if signs is None:
            continue
        size, time_us = entry.get("size"), entry.get("time_us")
        if not isinstance(size, int) or size < 0 or not isinstance(time_us, int):
            raise FileFormatError("an event of torch's allocator has no size or time", needed="torch 2.1 or later")
        totals = [total + sign * size for total, sign in zip(totals, signs, strict=True)]
        rows.append((time_us, *totals))
    if not rows:
        return () if end is None else (end,)
    last = (end.allocated_bytes, end.active_bytes, end.reserved_bytes) if end is not None else tuple(totals)
    offsets = [after - total for after, total in zip(last, totals, strict=True)]
    first_us = rows[0][0]
    return tuple(
        AllocatorState(
            (time_us - first_us) / 1e6, *(value + offset for value, offset in zip(row, offsets, strict=True))
        )
        for time_us, *row in rows
    )


@contextmanager
def recorded_allocations(max_entries: int = MAX_TRACE_ENTRIES) -> Iterator[None]:
    """Torch's allocator keeps its events, without stacks, while the block runs.

    Raises:
        UnsupportedError: no card.
    """
    import torch

    if not torch.cuda.is_available():
        raise UnsupportedError(_NO_CARD, works="a card")
    torch.cuda.memory._record_memory_history("all", context=None, max_entries=max_entries)
    try:
        yield
    finally:
        torch.cuda.memory._record_memory_history(None)


@contextmanager
def torch_snapshot(path: str | os.PathLike[str]) -> Iterator[None]:
    """Records the allocator's events while the block runs and writes its snapshot to `path` at the end.

    Raises:
        UnsupportedError, FileFormatError: as `write_torch_snapshot`.
    """
    with recorded_allocations():
        yield
        write_torch_snapshot(path)


def write_torch_snapshot(path: str | os.PathLike[str], dump: Callable[[str], None] | None = None) -> Path:
    """Write the allocator's snapshot as torch's own viewer (pytorch.org/memory_viz) opens it; whole or not at all.

    Args:
        dump: writes the snapshot to a file name; None takes torch's `_dump_snapshot`.

    Raises:
        UnsupportedError: no card.
        FileFormatError: the folder cannot be written.
    """
    target = Path(path)
    if dump is None:
        import torch

        if not torch.cuda.is_available():
            raise UnsupportedError(_NO_CARD, works="a card")
        dump = torch.cuda.memory._dump_snapshot
    temporary = ""
    try:
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        os.close(handle)
        dump(temporary)
        os.replace(temporary, target)
    except OSError as error:
        raise FileFormatError(f"{plain(target, 200)} cannot be written: {plain(error, 160)}") from error
    finally:
        if temporary and os.path.exists(temporary):
            os.unlink(temporary)
    return target


@dataclass(frozen=True)
class DeviceParts:
    """The device's used bytes as NVML says, split by difference; the parts sum to `used_bytes`.

    Attributes:
        weights_bytes, pool_bytes: what the engine says that it keeps in tensors.
        other_tensors_bytes: allocated beyond these.
        cached_bytes: reserved by torch and free.
        context_bytes: CUDA context, libraries and graphs: this process less what torch reserved.
        other_processes_bytes: used by everyone else.
    """

    used_bytes: int
    weights_bytes: int
    pool_bytes: int
    other_tensors_bytes: int
    cached_bytes: int
    context_bytes: int
    other_processes_bytes: int


def split_device(
    used_bytes: int, state: AllocatorState, *, weights_bytes: int, pool_bytes: int, process_bytes: int | None
) -> DeviceParts:
    """NVML's used bytes by difference.

    Args:
        used_bytes: of the whole device, from NVML.
        process_bytes: of this process, from NVML; None where it does not say: then nothing is counted for others.

    Raises:
        OutOfRangeError: parts larger than what holds them.
    """
    other_tensors = state.allocated_bytes - weights_bytes - pool_bytes
    cached = state.reserved_bytes - state.allocated_bytes
    mine = used_bytes if process_bytes is None else process_bytes
    context, others = mine - state.reserved_bytes, used_bytes - mine
    for name, value in (("tensors", other_tensors), ("cache", cached), ("context", context), ("processes", others)):
        if value < 0:
            raise OutOfRangeError(
                f"the measured {name} part would be {value:,} bytes", needed="amounts that were read at the same moment"
            )
    return DeviceParts(used_bytes, weights_bytes, pool_bytes, other_tensors, cached, context, others)
