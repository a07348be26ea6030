"""`OtherRank`: rank 0's handle on another rank: its process, the socket of its steps, and a thread that leads it."""

from __future__ import annotations

import queue
import socket
import threading
from concurrent.futures import Future
from typing import Any

from labkit.experiments.frames import send
from labkit.experiments.rank_backend import RANK_BACKEND
from labkit.experiments.worker import Worker

SEND_TIMEOUT_S = 30.0


class OtherRank:
    """Commands go one after the other through a worker process's own pipe; steps, which nobody answers, beside it.

    Args:
        rank: its number, 1 or more.
        num_threads, hang_timeout_s: as of `Worker`.
    """

    def __init__(self, rank: int, *, num_threads: int, hang_timeout_s: float) -> None:
        self.rank = rank
        self._steps, self._theirs = socket.socketpair()
        self._steps.setblocking(False)
        self.worker = Worker(
            RANK_BACKEND,
            num_threads=num_threads,
            hang_timeout_s=hang_timeout_s,
            pass_fds=(self._theirs.fileno(),),
        )
        self.is_ready = threading.Event()
        self.memory_parts: dict[str, int] | None = None
        self._jobs: queue.SimpleQueue[tuple[Future, str, dict[str, Any]] | None] = queue.SimpleQueue()
        # A rank ends with the thread that started it, which therefore lives as long as this handle.
        threading.Thread(target=self._lead, daemon=True).start()

    @property
    def steps_descriptor(self) -> int:
        """Of the rank's end of the socket of steps, the same number in its process."""
        return self._theirs.fileno()

    def call(self, command: str, arguments: dict[str, Any]) -> Future:
        """Have the rank carry out a command; the future raises what `Worker.call` does."""
        future: Future = Future()
        self._jobs.put((future, command, arguments))
        return future

    def send(self, message: dict[str, Any]) -> None:
        """Send a step.

        Raises:
            WorkerError, OSError: the rank takes nothing, or is gone.
        """
        send(self._steps, message, SEND_TIMEOUT_S)

    def close(self) -> None:
        """End the process."""
        self._jobs.put(None)
        self.worker.close()
        self._steps.close()
        self._theirs.close()

    def _lead(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, command, arguments = job
            try:
                generation = self.worker.generation or None
                future.set_result(self.worker.call(command, arguments, self._take, None, generation))
            except BaseException as error:
                future.set_exception(error)

    def _take(self, event: dict[str, Any]) -> None:
        if event["type"] == "ready":
            self.is_ready.set()
        elif event["type"] == "memory_parts":
            self.memory_parts = event["parts"]
