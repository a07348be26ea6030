"""The worker process: takes commands from a socket that it inherited, answers in JSON, ends when its parent does.

Started as `python -P -m labkit.experiments.worker_process <descriptor> <backend> <memory limit> <threads>`, a fresh
interpreter: it never runs the notebook's or script's own `__main__` again, and inherits no lock, thread or handle.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import queue
import resource
import socket
import sys
import threading
import time
from typing import Any

from labkit.experiments.backend import Backend, describe_error, is_lost_context, make_backend
from labkit.experiments.frames import FrameReader, encode

HEARTBEAT_S = 0.5
LOST_CONTEXT_EXIT = 70
COMMANDS = ("load", "configure", "run")


class WorkerProcess:
    """Runs commands one after another in the main thread; a second thread listens for Cancel and the end."""

    def __init__(self, connection: socket.socket, backend_path: str) -> None:
        self._connection = connection
        self._backend_path = backend_path
        self._backend: Backend | None = None
        self._commands: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._cancelled: set[int] = set()
        self._current_id = 0
        self._heard_at = 0.0
        self._send_lock = threading.Lock()

    def serve(self) -> None:
        """Work until told to shut down or until the parent is gone."""
        threading.Thread(target=self._listen, daemon=True).start()
        threading.Thread(target=self._beat, daemon=True).start()
        while True:
            command = self._commands.get()
            if command["type"] == "shutdown":
                if self._backend is not None:
                    self._backend.close()
                return
            self._execute(command)

    def _execute(self, command: dict[str, Any]) -> None:
        self._current_id, self._heard_at = command["id"], time.monotonic()
        lost = False
        try:
            reply = {"type": "reply", "answer": self._answer(command)}
        except BaseException as error:
            # tokenizers' panics are no Exception, and the worker must answer to every command.
            reply = describe_error(error)
            lost = is_lost_context(error)
            error.__traceback__ = None
            del error
        if not lost:
            gc.collect()
        self._send(reply)
        if lost:
            os._exit(LOST_CONTEXT_EXIT)
        self._current_id = 0
        self._cancelled.discard(command["id"])

    def _answer(self, command: dict[str, Any]) -> dict[str, Any]:
        if self._backend is None:
            self._backend = make_backend(self._backend_path)
        method = getattr(self._backend, command["type"])
        return method(command["arguments"], self._emit, lambda: command["id"] in self._cancelled)

    def _emit(self, message: dict[str, Any]) -> None:
        self._heard_at = time.monotonic()
        self._send(message)

    def _send(self, message: dict[str, Any]) -> None:
        data = encode({**message, "id": self._current_id})
        with self._send_lock:
            self._connection.sendall(data)

    def _listen(self) -> None:
        reader = FrameReader()
        try:
            while data := self._connection.recv(1 << 16):
                for message in reader.feed(data):
                    if message["type"] == "cancel":
                        self._cancelled.add(message["id"])
                    elif message["type"] in (*COMMANDS, "shutdown"):
                        self._commands.put(message)
        finally:
            # The parent is gone: whatever the main thread computes, nobody waits for it.
            os._exit(0)

    def _beat(self) -> None:
        while True:
            time.sleep(HEARTBEAT_S)
            if self._current_id:
                # Beats go on while the main thread waits for a card that never answers; how long it has is in them.
                self._send({"type": "heartbeat", "quiet_s": time.monotonic() - self._heard_at})


def _volunteer_for_the_memory_killer() -> None:
    """When the machine runs out of memory, the kernel ends this process rather than the notebook's."""
    try:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write("500")
    except OSError:
        return


def main(arguments: list[str]) -> None:
    """Entry point: descriptor of the socket, import path of the backend, bytes of address space or 0, threads."""
    descriptor, backend_path, memory_limit_bytes, num_threads = arguments
    faulthandler.enable()
    os.environ["OMP_NUM_THREADS"] = num_threads
    if int(memory_limit_bytes):
        resource.setrlimit(resource.RLIMIT_AS, (int(memory_limit_bytes), int(memory_limit_bytes)))
    _volunteer_for_the_memory_killer()
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    WorkerProcess(socket.socket(fileno=int(descriptor)), backend_path).serve()


if __name__ == "__main__":
    main(sys.argv[1:])
