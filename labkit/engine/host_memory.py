"""Host memory for swapped blocks: what there is, and a refusal before the machine runs out of it."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from labkit.errors import DoesNotFitError
from labkit.format import GIB, memory

# What the machine keeps for everything else.
KEPT_FREE_BYTES = 512 * 2**20
_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def available_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int | None:
    """Bytes that the machine and the control group of this process still give; None where neither says."""
    known = [value for value in (_of_machine(meminfo), _of_group(cgroup)) if value is not None]
    return min(known, default=None)


def _of_machine(meminfo: Path) -> int | None:
    try:
        lines = meminfo.read_text(encoding="ascii").splitlines()
        return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
    except (OSError, ValueError, IndexError):
        return None


def _of_group(cgroup: Path) -> int | None:
    """Limit less use; pages of files count as free, since the kernel drops them first."""
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
        fields = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        return max(0, limit - used + int(fields.get("inactive_file", 0)))
    except (OSError, ValueError):
        return None


def check_swap_room(num_bytes: int) -> None:
    """Refuse a swap pool that the host has no room for.

    Raises:
        DoesNotFitError: with the largest `swap_space` that works.
    """
    available = available_bytes()
    if num_bytes and available is not None and num_bytes > available - KEPT_FREE_BYTES:
        raise _no_room(num_bytes, available)


def swap_pool(num_bytes: int, *, pinned: bool) -> torch.Tensor:
    """Host memory for swapped blocks, uint8 `[num_bytes]`; pinned, so that a card copies it on its own.

    Raises:
        DoesNotFitError: there is no room, or the system gives no such memory.
    """
    check_swap_room(num_bytes)
    try:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
    except RuntimeError as error:
        raise _no_room(num_bytes, available_bytes()) from error


def _no_room(needed: int, available: int | None) -> DoesNotFitError:
    works = math.floor(10 * max(0, (available or 0) - KEPT_FREE_BYTES) / GIB) / 10
    return DoesNotFitError(
        "the host has no room for the KV of preempted requests",
        needed=memory(needed),
        available=memory(available),
        works=f"swap_space = {works:g}" + ("" if works else ", preemption_mode = 'recompute'"),
        knob="swap_space",
    )
