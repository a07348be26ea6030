"""Runs behind the panel: a worker thread fills a queue, one thread empties it and alone touches the widgets.

Handlers of widgets only start and cancel: which thread runs them is not defined (main thread, subshell, none).
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from labkit.errors import CancelledError, LabkitError, WorkerError
from labkit.measure.run_record import RunRecord
from labkit.memory.records import MemoryPlan
from labkit.specs.engine_config import EngineConfig
from labkit.text import plain

Run = Callable[..., RunRecord]
UPDATES_PER_S = 8
LOG_LINES = 40


class SessionLike(Protocol):
    """What the panel needs of a session; `labkit.Session` is one."""

    model: Any
    gpu: Any
    workload: Any
    counted_steps: int

    def plan(self, config: EngineConfig) -> MemoryPlan:
        """The memory plan of a configuration."""
        ...

    def run(self, config: EngineConfig, on_event: Callable[[dict[str, Any]], None]) -> RunRecord:
        """Run a configuration to its end; events go to `on_event` in the calling thread."""
        ...

    def cancel(self) -> None:
        """End the current run soon; `run` then returns or raises."""
        ...

    def records(self) -> Sequence[RunRecord]:
        """The runs so far, oldest first."""
        ...


@dataclass
class RunView:
    """What the screen shows of the runs in progress; written and read by the drawing thread only."""

    phase: str = "starting"
    done: int = 0
    total: int = 0
    unit: str = ""
    left_s: float | None = None
    run_index: int = 0
    num_runs: int = 1
    started_s: float = 0.0
    begun_s: float = 0.0
    log: list[str] = field(default_factory=list)
    cancelling: bool = False

    def elapsed_s(self, now_s: float) -> float:
        """Seconds since this run began."""
        return max(0.0, now_s - self.started_s)

    def left_in_all_s(self, now_s: float) -> float | None:
        """Seconds that this run and those after it will take, by the mean of those that are over; None before."""
        if not self.run_index or self.num_runs < 2:
            return None
        mean_s = (self.started_s - self.begun_s) / self.run_index
        this_s = self.left_s if self.left_s is not None else max(0.0, mean_s - self.elapsed_s(now_s))
        return this_s + mean_s * (self.num_runs - self.run_index - 1)


@dataclass(frozen=True)
class Outcome:
    """How a list of runs ended: the records that came out, and the error that stopped it, if one did."""

    records: tuple[RunRecord, ...]
    error: LabkitError | None = None
    details: str = ""
    cancelled: bool = False


class Screen(Protocol):
    """Who draws; all three are called in the drawing thread."""

    def begin(self, plan: MemoryPlan, view: RunView) -> None:
        """A run of the list begins."""
        ...

    def update(self, steps: Sequence[dict[str, Any]], view: RunView) -> None:
        """Some steps were made, or only time has passed."""
        ...

    def end(self, outcome: Outcome) -> None:
        """All runs are over."""
        ...


class RunControl:
    """Starts runs one after another in a thread of their own, at most one list at a time."""

    def __init__(self, session: SessionLike, screen: Screen) -> None:
        self._session, self._screen = session, screen
        self._busy = threading.Lock()
        self._cancel = threading.Event()
        self._threads: list[threading.Thread] = []

    @property
    def is_running(self) -> bool:
        """A list of runs is in progress."""
        return self._busy.locked()

    def start(self, configs: Sequence[EngineConfig], run: Run | None = None) -> bool:
        """Begin; False where something runs already (a double click) or there is nothing to run.

        Args:
            run: carries out one configuration; the session's `run` by default.
        """
        if not configs or not self._busy.acquire(blocking=False):
            return False
        self._cancel.clear()
        events: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(
                target=self._work,
                args=(tuple(configs), run or self._session.run, events),
                name="labkit-runs",
                daemon=True,
            ),
            threading.Thread(target=self._draw, args=(events, len(configs)), name="labkit-draw", daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        return True

    def cancel(self) -> None:
        """Ask the current run to end and start no further one."""
        if self.is_running:
            self._cancel.set()
            self._session.cancel()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end; True where nothing runs any more."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout_s)
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self, configs: tuple[EngineConfig, ...], run: Run, events: queue.SimpleQueue) -> None:
        records: list[RunRecord] = []
        error: BaseException | None = None
        try:
            for index, config in enumerate(configs):
                if self._cancel.is_set():
                    break
                events.put({"type": "begin", "index": index, "plan": self._session.plan(config)})
                records.append(run(config, on_event=events.put))
        # Whatever a run does, the drawing thread must hear of its end, or the panel stays "running" for ever.
        except BaseException as caught:
            error = caught
        events.put({"type": "over", "outcome": self._outcome(records, error)})

    def _outcome(self, records: list[RunRecord], error: BaseException | None) -> Outcome:
        cancelled = self._cancel.is_set() or isinstance(error, CancelledError)
        if error is None or isinstance(error, CancelledError):
            return Outcome(tuple(records), None, "", cancelled)
        if isinstance(error, LabkitError):
            return Outcome(tuple(records), error, "", cancelled)
        text = f"{type(error).__name__}: {error}"
        said = WorkerError(f"the run ended with an error: {plain(text, 200)}", works="running again")
        return Outcome(tuple(records), said, text, cancelled)

    def _draw(self, events: queue.SimpleQueue, num_runs: int) -> None:
        now_s = time.monotonic()
        view = RunView(num_runs=num_runs, started_s=now_s, begun_s=now_s)
        outcome: Outcome | None = None
        try:
            while outcome is None:
                time.sleep(1 / UPDATES_PER_S)
                outcome = self._drain(events, view)
        finally:
            self._busy.release()
            self._screen.end(outcome or Outcome((), WorkerError("the panel could not draw the run")))

    def _drain(self, events: queue.SimpleQueue, view: RunView) -> Outcome | None:
        steps: list[dict[str, Any]] = []
        while True:
            try:
                event = events.get_nowait()
            except queue.Empty:
                break
            if event["type"] == "over":
                self._screen.update(steps, view)
                return event["outcome"]
            if event["type"] == "begin":
                steps = []
                self._begin(event, view)
            else:
                steps += read_event(event, view)
        view.cancelling = self._cancel.is_set()
        self._screen.update(steps, view)
        return None

    def _begin(self, event: dict[str, Any], view: RunView) -> None:
        view.run_index, view.started_s = event["index"], time.monotonic()
        view.phase, view.done, view.total, view.left_s = "starting", 0, 0, None
        self._screen.begin(event["plan"], view)


_PHASES = {"start": "starting the worker, which loads torch once and then stays",
           "load": "loading the weights", "configure": "allocating the KV pool",
           "run": "running", "measure memory": "measuring memory", "simulate": "simulating",
           "count steps": "counting steps"}  # fmt: skip


def _phase(name: object) -> str:
    return _PHASES.get(str(name), plain(name, 80))


def read_event(event: dict[str, Any], view: RunView) -> list[dict[str, Any]]:
    """Take phase, progress and log lines of `event` into `view`; returns the steps it carries."""
    kind = event.get("type")
    if kind == "step":
        return [event]
    if kind == "progress":
        view.done, view.total, view.unit = int(event["done"]), int(event["total"]), plain(event.get("unit", ""), 40)
        view.phase, view.left_s = _phase(event["phase"]), event.get("remaining_s")
    elif kind == "status":
        view.phase = _phase(event.get("phase", event.get("status", view.phase)))
        view.done, view.total, view.unit, view.left_s = 0, 0, "", None
    elif kind == "log":
        view.log = [*view.log, *(plain(line, 300) for line in str(event.get("message", "")).splitlines())][-LOG_LINES:]
    return []
