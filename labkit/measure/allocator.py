"""Torch's CUDA allocator over time: allocated, active, reserved, and what lies between them.

Everything comes from torch's own live answers; the file for torch's memory viewer is written, and never read here.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from labkit.errors import FileFormatError, UnsupportedError
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


@contextmanager
def torch_snapshot(path: str | os.PathLike[str]) -> Iterator[None]:
    """Records the allocator's events, without stacks, while the block runs; writes its snapshot to `path` at the end.

    Raises:
        UnsupportedError, FileFormatError: as `write_torch_snapshot`.
    """
    import torch

    if not torch.cuda.is_available():
        raise UnsupportedError(_NO_CARD, works="a card")
    torch.cuda.memory._record_memory_history("all", context=None, max_entries=MAX_TRACE_ENTRIES)
    try:
        yield
        write_torch_snapshot(path)
    finally:
        torch.cuda.memory._record_memory_history(None)


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
