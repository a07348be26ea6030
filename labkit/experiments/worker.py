"""`Worker`: the handle on the process that holds weights and engine; whatever happens there, this side stays alive."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from labkit.errors import CancelledError, OutOfRangeError, WorkerError
from labkit.experiments.backend import ENGINE_BACKEND, rebuild_error
from labkit.experiments.frames import FrameReader, send
from labkit.text import plain

OnEvent = Callable[[dict[str, Any]], None]

POLL_S = 0.05
CANCEL_GRACE_S = 0.7
DRAIN_S = 5.0
FRAME_STALL_S = 2.0
SEND_TIMEOUT_S = 10.0
SHUTDOWN_S = 1.0
QUIET_SAID_S = 5.0
KILLED_S = 30.0
LOG_TAIL_BYTES = 2000
MAX_LOG_BYTES = 4 * 2**20


class Worker:
    """Starts the process at first use, and again after it died; one command at a time.

    Args:
        backend: import path `module:Class` of what works in there.
        memory_limit_bytes: address space of the process, None for no limit.
        num_threads: compute threads.
        hang_timeout_s: silence after which the process counts as hung and is ended.
        pass_fds: descriptors that the process has under the same numbers.
    """

    def __init__(
        self,
        backend: str = ENGINE_BACKEND,
        *,
        memory_limit_bytes: int | None = None,
        num_threads: int = 1,
        hang_timeout_s: float = 120.0,
        pass_fds: Sequence[int] = (),
    ) -> None:
        if num_threads < 1:
            raise OutOfRangeError(f"num_threads cannot be {num_threads}", works="1 or more", knob="num_threads")
        self.backend = backend
        self.memory_limit_bytes = memory_limit_bytes
        self.num_threads = num_threads
        self.hang_timeout_s = hang_timeout_s
        self._pass_fds = tuple(pass_fds)
        self.generation = 0
        self._process: subprocess.Popen | None = None
        self._connection: socket.socket | None = None
        self._log: IO[bytes] | None = None
        self._reader = FrameReader()
        self._busy = threading.Lock()
        self._next_id = 1
        self._abandoned_id = 0
        self._oom_kills = 0
        self._was_ended = False

    @property
    def pid(self) -> int | None:
        """Process id, None where none runs."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def start(self, on_event: OnEvent) -> int:
        """Make sure that the process runs; returns its generation, which rises with every start.

        Says through `on_event` when a process that had died was replaced.
        """
        if self._process is not None and self._process.poll() is None and self._drained(on_event):
            return self.generation
        if self._process is not None:
            if not self._was_ended:
                text = f"the worker had ended ({self._death()}); a new one is started and loads the weights again"
                on_event({"type": "log", "level": "warning", "message": text})
            else:
                on_event({"type": "log", "level": "info", "message": "the worker is restarted and loads the weights"})
            self._release()
        self._spawn()
        return self.generation

    def call(
        self,
        command: str,
        arguments: dict[str, Any],
        on_event: OnEvent,
        cancel: threading.Event | None = None,
        generation: int | None = None,
        stall_timeout_s: float | None = None,
    ) -> dict[str, Any]:
        """Have the worker execute `command` and return its answer; its events go to `on_event` in this thread.

        Args:
            generation: of the process that holds what the command needs; a new one would know nothing of it.
            stall_timeout_s: time without an event after which the card counts as hung, though the process lives.

        Raises:
            CancelledError: `cancel` was set; at most a second ago.
            WorkerError: the process died or hung (with the cause), answers nonsense, or is busy.
            LabkitError: what the command itself raised.
        """
        if not self._busy.acquire(blocking=False):
            raise WorkerError("the worker is busy with another run", works="waiting for it, or Cancel")
        try:
            if generation is not None and self._process is not None and self._process.poll() is not None:
                raise self._died(_DOING[command])
            if self.start(on_event) != (generation or self.generation):
                raise WorkerError(f"the worker was restarted {_DOING[command]}", works="running again")
            if self._log is not None and os.fstat(self._log.fileno()).st_size > MAX_LOG_BYTES:
                os.ftruncate(self._log.fileno(), 0)
            return self._converse(command, arguments, on_event, cancel, stall_timeout_s)
        finally:
            self._busy.release()

    def kill(self) -> None:
        """End the process at once."""
        if self._process is not None:
            self._was_ended = True
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                # A driver that ends a kernel takes its time; the system collects the process later.
                self._process.wait(KILLED_S)

    def close(self) -> None:
        """Ask the process to end, and end it when it does not; nothing of it is left. May be called twice."""
        if self._process is None:
            return
        if self._process.poll() is None and self._connection is not None:
            with contextlib.suppress(OSError, WorkerError):
                send(self._connection, {"type": "shutdown"}, SHUTDOWN_S)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(SHUTDOWN_S)
        self.kill()
        self._release()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    def _spawn(self) -> None:
        mine, theirs = socket.socketpair()
        with contextlib.suppress(OSError):
            self._log = tempfile.TemporaryFile(prefix="labkit-worker-")  # noqa: SIM115 (lives as long as the process)
            # Without this a cut log would go on at its old length, with a hole before it.
            fcntl.fcntl(self._log, fcntl.F_SETFL, fcntl.fcntl(self._log, fcntl.F_GETFL) | os.O_APPEND)
        command = [sys.executable, "-P", "-m", "labkit.experiments.worker_process", str(theirs.fileno()), self.backend]
        try:
            self._process = subprocess.Popen(
                [*command, str(self.memory_limit_bytes or 0), str(self.num_threads)],
                pass_fds=[theirs.fileno(), *self._pass_fds],
                stdin=subprocess.DEVNULL,
                stdout=self._log or subprocess.DEVNULL,
                stderr=self._log or subprocess.DEVNULL,
                # NVML counts cards in this order, whatever CUDA would do by itself.
                env={
                    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                },
                # A Ctrl-C in the terminal or an interrupted kernel reaches this process only.
                start_new_session=True,
            )
        except OSError as error:
            mine.close()
            raise WorkerError(
                f"the worker cannot be started: {plain(error)}", works="closing other programs"
            ) from error
        finally:
            theirs.close()
        mine.setblocking(False)
        self._connection, self._reader = mine, FrameReader()
        self._oom_kills, self._was_ended, self._abandoned_id = _oom_kills(), False, 0
        self.generation += 1

    def _release(self) -> None:
        for entry in (self._connection, self._log):
            if entry is not None:
                entry.close()
        self._connection = self._log = self._process = None

    def _converse(
        self,
        command: str,
        arguments: dict[str, Any],
        on_event: OnEvent,
        cancel: threading.Event | None,
        stall_timeout_s: float | None,
    ) -> dict[str, Any]:
        command_id, self._next_id = self._next_id, self._next_id + 1
        answered = False
        try:
            self._send({"type": command, "id": command_id, "arguments": arguments})
            answer = self._wait(command_id, _DOING[command], on_event, cancel, stall_timeout_s)
            answered = True
            if answer["type"] == "error":
                if isinstance(answer.get("traceback"), str):
                    on_event({"type": "log", "level": "error", "message": answer["traceback"][-8000:]})
                if answer.get("ends_worker") is True:
                    # It ends by itself; a call in between would find it half gone.
                    self.kill()
                raise rebuild_error(answer, _DOING[command])
            return answer["answer"]
        finally:
            if not answered and self.pid is not None:
                # Left early (Cancel, Ctrl-C, a failing callback): the worker stops, the next call waits for that.
                self._abandoned_id = command_id
                with contextlib.suppress(OSError, WorkerError):
                    self._send({"type": "cancel", "id": command_id})

    def _wait(
        self,
        command_id: int,
        doing: str,
        on_event: OnEvent,
        cancel: threading.Event | None,
        stall_timeout_s: float | None,
    ) -> dict[str, Any]:
        heard_at, cancelled_at, quiet_said = time.monotonic(), 0.0, False
        while True:
            for message in self._receive(POLL_S, doing):
                heard_at, quiet_said = time.monotonic(), False
                if message.get("id") != command_id:
                    continue
                if message["type"] == "heartbeat":
                    self._check_stall(message, doing, stall_timeout_s)
                    continue
                if message["type"] in ("reply", "error"):
                    return _checked(message)
                on_event({name: value for name, value in message.items() if name != "id"})
            now = time.monotonic()
            if cancel is not None and cancel.is_set():
                if not cancelled_at:
                    cancelled_at = now
                    self._send({"type": "cancel", "id": command_id})
                elif now - cancelled_at > CANCEL_GRACE_S:
                    raise CancelledError("cancelled; what was finished is kept")
            if now - heard_at > self.hang_timeout_s:
                self.kill()
                raise WorkerError(
                    f"the worker said nothing for {self.hang_timeout_s:g} s {doing} and was ended",
                    works="running again: it is restarted",
                )
            if now - heard_at > QUIET_SAID_S and not quiet_said:
                quiet_said = True
                on_event(
                    {"type": "log", "level": "warning", "message": f"no sign of the worker for {QUIET_SAID_S:g} s"}
                )

    def _check_stall(self, heartbeat: dict[str, Any], doing: str, stall_timeout_s: float | None) -> None:
        quiet_s = heartbeat.get("quiet_s")
        if stall_timeout_s is None or not isinstance(quiet_s, (int, float)) or quiet_s <= stall_timeout_s:
            return
        self.kill()
        raise WorkerError(
            f"the card has not answered for {stall_timeout_s:g} s {doing}: a kernel hangs, or another program keeps it "
            "busy; the worker was ended",
            works="running again: it is restarted; fewer max_num_batched_tokens where one step takes that long",
            knob="max_num_batched_tokens",
        )

    def _drained(self, on_event: OnEvent) -> bool:
        """Wait until a command that was left early has ended; False when the process had to be ended for it."""
        deadline = time.monotonic() + DRAIN_S
        while self._abandoned_id:
            try:
                messages = self._receive(POLL_S, "after Cancel")
            except WorkerError:
                return False
            if any(
                message.get("id") == self._abandoned_id and message["type"] in ("reply", "error")
                for message in messages
            ):
                self._abandoned_id = 0
            elif time.monotonic() > deadline:
                text = f"the cancelled work did not stop within {DRAIN_S:g} s; the worker is restarted"
                on_event({"type": "log", "level": "warning", "message": text})
                self.kill()
                return False
        return True

    def _receive(self, timeout_s: float, doing: str) -> list[dict[str, Any]]:
        """Messages that have arrived, waiting at most `timeout_s` for the first.

        Raises:
            WorkerError: the process is gone, or what it sent is not ours; then it is ended.
        """
        if self._connection is None:
            raise WorkerError("the worker was closed", works="a new session")
        try:
            if select.select([self._connection], [], [], timeout_s)[0]:
                data = self._connection.recv(1 << 20)
                if not data:
                    raise self._died(doing)
                return self._reader.feed(data)
            if self._reader.stalled_s > FRAME_STALL_S:
                raise WorkerError(
                    "the worker stopped in the middle of a message", works="running again: it is restarted"
                )
        except ConnectionError as error:
            raise self._died(doing) from error
        except WorkerError:
            self.kill()
            raise
        return []

    def _send(self, message: dict[str, Any]) -> None:
        if self._connection is None:
            raise WorkerError("the worker was closed", works="a new session")
        try:
            send(self._connection, message, SEND_TIMEOUT_S)
        except OSError as error:
            raise self._died("on receiving a command") from error

    def _died(self, doing: str) -> WorkerError:
        cause = self._death()
        self.kill()
        return WorkerError(f"the worker died {doing}: {cause}", works="running again: it is restarted")

    def _death(self) -> str:
        """How the process ended, in words, with the end of what it printed."""
        if self._process is None:
            return "it was never started"
        try:
            code = self._process.wait(SHUTDOWN_S)
        except subprocess.TimeoutExpired:
            return "it closed its connection and went on"
        printed = self._log_tail()
        words = _exit_in_words(code, _oom_kills() > self._oom_kills)
        return f"{words}; its last words: {printed}" if printed else words

    def _log_tail(self) -> str:
        if self._log is None:
            return ""
        descriptor = self._log.fileno()
        start = max(0, os.fstat(descriptor).st_size - LOG_TAIL_BYTES)
        return plain(os.pread(descriptor, LOG_TAIL_BYTES, start).decode(errors="replace").strip()[-600:], 600)


_DOING = {"load": "while loading the model", "configure": "while allocating memory", "run": "during the run"}


def _checked(message: dict[str, Any]) -> dict[str, Any]:
    if message["type"] == "reply" and not isinstance(message.get("answer"), dict):
        raise WorkerError("the worker answered without an answer", works="running again")
    return message


def _exit_in_words(code: int, memory_killer_struck: bool) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = "unknown"
    words = f"signal {-code} ({name})"
    if code == -signal.SIGKILL:
        guess = "struck in that time" if memory_killer_struck else "is the usual sender; or someone ended it"
        words += f": the kernel's out-of-memory killer {guess}"
    return words


def _oom_kills() -> int:
    """How often the kernel has ended a process of this control group for lack of memory; 0 where it does not say."""
    try:
        lines = Path("/sys/fs/cgroup/memory.events").read_text().splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
    except (OSError, ValueError, IndexError):
        return 0
