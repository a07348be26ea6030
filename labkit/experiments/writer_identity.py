"""Who writes a run, so that a run whose writer is gone can be told from one that is still being written."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

import psutil

# Another machine's process cannot be asked, so its silence has to speak: batches come every second or so.
FOREIGN_SILENCE_S = 600.0


@dataclass(frozen=True)
class WriterIdentity:
    """A process: host with its process namespace, id, and start since boot (ids are used again, clocks are set)."""

    host: str
    pid: int
    started: float

    @classmethod
    def of_this_process(cls) -> WriterIdentity:
        """The identity of the calling process."""
        return cls(_host(), os.getpid(), _started(os.getpid()))

    def is_gone(self, silent_s: float) -> bool:
        """True when the process no longer runs; `silent_s` is how long ago it last wrote."""
        if self.host != _host():
            return silent_s > FOREIGN_SILENCE_S
        try:
            return _started(self.pid) != self.started or psutil.Process(self.pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True
        except psutil.AccessDenied:
            return False


def _started(pid: int) -> float:
    """Clock ticks from boot to the start of `pid`; where /proc is missing, seconds of the wall clock."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        return float(text.rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return psutil.Process(pid).create_time()


def _host() -> str:
    try:
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()
