"""`RankGroup`: the processes of the other ranks of a shared model, led by rank 0; it says what became of them."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import Any

from labkit.engine.tensor_parallel import OverlappedRankedExecutor, RankedExecutor
from labkit.errors import LabkitError, OutOfRangeError, RankError
from labkit.experiments.backend import describe_error
from labkit.experiments.other_rank import OtherRank
from labkit.experiments.rank_backend import connect, make_executor, rank_device
from labkit.experiments.serialise import to_plain
from labkit.memory.records import MemoryPlan
from labkit.models.read_tally import OnRead, nothing
from labkit.specs.model_spec import ModelSpec

POLL_S = 0.05
# How long ranks may go on after one has failed, before all are ended: they may wait for it for ever.
GRACE_S = 5.0
# In which a lost rank is noticed after its connections to the others broke.
NOTICE_S = 2.0
# For which closing waits until the cards are free of the ranks' kernels.
FREED_S = 5.0
# Longest step, beyond which the ranks wait for each other in vain.
CARD_STEP_S, CPU_STEP_S = 90.0, 3600.0


class RankGroup:
    """The other ranks of a model that `size` processes share; this process is rank 0. See `OtherRanks`.

    Each rank is a worker process of this one. It gets the same commands as this process carries out itself, and in
    between the steps. When one dies, hangs or fails in the middle, none can go on: all are ended and the cause is said.
    They end as well, whatever they do, when this process ends. One thread at a time uses a group.

    Args:
        size: ranks, this one included.
        device: "cuda" for card N to rank N, or "cpu".
        num_threads: compute threads of each.
        hang_timeout_s: after so long without a sign of a rank it counts as hung.
        step_timeout_s: after so long in one step all do; by default `CARD_STEP_S`, or an hour on a CPU.
    """

    def __init__(
        self, size: int, device: str = "cpu", *, num_threads: int = 1, hang_timeout_s: float = 60.0,
        step_timeout_s: float | None = None,
    ) -> None:  # fmt: skip
        if size < 2:
            raise OutOfRangeError(f"{size} ranks share nothing", works="2 or more", knob="tensor_parallel_size")
        self.size, self.device = size, device
        self._step_limit_s = step_timeout_s or (CARD_STEP_S if device == "cuda" else CPU_STEP_S)
        self._decoder: Any = None
        self._ranks: Any = None
        self._failure: RankError | None = None
        self._calls: list[Future] = []
        self._failed_at = self._busy_since = 0.0
        self._is_running = False
        self._losing = threading.Lock()
        self._giving_up: threading.Thread | None = None
        self._closed = threading.Event()
        # A store of torch opens its file once more when it is collected: the path must never name another file.
        self._folder = tempfile.TemporaryDirectory(prefix="labkit-ranks-")
        self._others = [
            OtherRank(rank, num_threads=num_threads, hang_timeout_s=hang_timeout_s) for rank in range(1, size)
        ]
        threading.Thread(target=_watch, args=(weakref.ref(self), self._closed), daemon=True).start()

    @property
    def pids(self) -> tuple[int | None, ...]:
        """Process ids of the other ranks, None for one that does not run."""
        return tuple(other.worker.pid for other in self._others)

    def load(
        self,
        spec: ModelSpec,
        source: str | None = None,
        dtype: str = "auto",
        load_format: str = "auto",
        *,
        on_read: OnRead = nothing,
        **settings: Any,
    ) -> Any:
        """This rank's `Decoder`; every rank reads its own part. Arguments as of `load_model_weights`.

        `on_read` is told of this rank's part, and must not raise: the others would wait for it.

        Raises:
            LabkitError: what `load_model_weights` raises, on this rank or another.
            RankError: a rank was lost.
        """
        from labkit.models import load_model_weights

        self._leave_run()
        self._decoder = None
        shared = {
            "size": self.size, "meeting": f"{self._folder.name}/meeting", "device": self.device,
            "timeout_s": 2 * self._step_limit_s,
            "model": to_plain(spec), "source": source or "", "dtype": dtype, "load_format": load_format,
            "settings": settings,
        }  # fmt: skip

        def here() -> None:
            if self._ranks is None:
                self._wait_for_others()
                self._ranks = connect({**shared, "rank": 0})
            self._decoder = load_model_weights(
                spec, source, dtype, load_format, device=rank_device(self.device, 0), ranks=self._ranks,
                on_read=on_read, **settings,
            )  # fmt: skip

        each = [{**shared, "rank": other.rank, "steps": other.steps_descriptor} for other in self._others]
        self._together("load", each, here)
        return self._decoder

    def executor(self, plan: MemoryPlan) -> RankedExecutor:
        """The executor of all ranks for `plan`, over the decoder that was loaded last."""
        cls = OverlappedRankedExecutor if self.device == "cuda" else RankedExecutor
        return cls(self, lambda plan: make_executor(self._decoder, plan), plan)

    def configure(self, how: str, plan: MemoryPlan | None, here: Callable[[], None]) -> None:
        """See `OtherRanks.configure`."""
        if how == "drop" and (self._failure is not None or self._closed.is_set()):
            here()
            return
        self._leave_run()
        # Words about the plan are not for them.
        bare = None if plan is None else dataclasses.replace(plan, formulas={}, notes=(), details={})
        self._together("configure", [{"how": how, "plan": to_plain(bare)}] * len(self._others), here)
        if how != "drop":
            self._calls, self._is_running = [other.call("run", {}) for other in self._others], True

    def send(self, message: dict[str, Any]) -> None:
        """See `OtherRanks.send`."""
        for other in self._others:
            other.send(message)

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """See `OtherRanks.computing`."""
        self._check()
        self._busy_since = time.monotonic()
        try:
            yield
            # Where ranks were ended, a card's kernels have ended as well, and what they left is nothing.
            self._check()
        except Exception as error:
            raise self._cause(error) from error
        except BaseException as error:
            self._lose(0, error)
            raise
        finally:
            self._busy_since = 0.0

    def memory_parts(self, here: Callable[[], dict[str, int]]) -> list[dict[str, int]]:
        """See `OtherRanks.memory_parts`."""
        with self.computing():
            for other in self._others:
                other.memory_parts = None
            self.send({"type": "memory"})
            found = [here()]
            for other in self._others:
                while other.memory_parts is None:
                    self._check()
                    time.sleep(POLL_S)
                found.append(other.memory_parts)
        return found

    def close(self) -> None:
        """End the other ranks; a second call does nothing."""
        if self._closed.is_set():
            return
        with contextlib.suppress(LabkitError, OSError):
            self._leave_run()
        self._closed.set()
        self._decoder = None
        for other in self._others:
            other.close()
        self._give_up_ranks()
        if self._giving_up is not None:
            self._giving_up.join(FREED_S)
        self._folder.cleanup()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    def look(self) -> None:
        """End all ranks when one cannot go on and others may wait for it; called every `POLL_S`."""
        now, calls = time.monotonic(), self._calls
        if self._busy_since and now - self._busy_since > self._step_limit_s:
            self._lose(0, RankError(f"the ranks wait for each other since {self._step_limit_s:g} s in one step"))
        failed = [call for call in calls if call.done() and call.exception() is not None]
        if not failed or (not self._is_running and all(call.done() for call in calls)):
            self._failed_at = 0.0
            return
        self._failed_at = self._failed_at or now
        if self._is_running or now - self._failed_at > GRACE_S:
            self._lose(self._rank_of(calls, failed[0]), failed[0].exception())

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closed.is_set():
            raise RankError("the ranks were closed", works="loading again")

    def _wait_for_others(self) -> None:
        """Until all have begun, since meeting them ends by its timeout only."""
        for other in self._others:
            while not other.is_ready.wait(POLL_S):
                self._check()

    def _leave_run(self) -> None:
        """Have the others come back from their steps for another command."""
        self._check()
        if self._is_running:
            with self.computing():
                self.send({"type": "end"})
                wait(self._calls)
                self._check()
            self._calls, self._is_running = [], False

    def _together(self, command: str, each: list[dict[str, Any]], here: Callable[[], None]) -> None:
        """Carry out `command` on every rank, `here` on this one."""
        self._check()
        own: Future = Future()
        calls = [other.call(command, arguments) for other, arguments in zip(self._others, each, strict=True)]
        self._calls = [*calls, own]
        try:
            here()
            own.set_result(None)
        except BaseException as error:
            own.set_exception(error)
        wait(calls)
        self._calls = []
        failed = [(rank, call.exception()) for rank, call in enumerate((own, *calls)) if call.exception() is not None]
        for rank, failure in failed:
            if rank and self._others[rank - 1].worker.pid is None:
                self._lose(rank, failure)
        if self._failure is not None:
            raise self._failure
        for rank, failure in failed:
            if rank and isinstance(failure, LabkitError):
                failure.message = f"rank {rank} of {self.size}: {failure.message}"
            raise failure  # type: ignore[misc]

    def _rank_of(self, calls: list[Future], call: Future) -> int:
        """The future of this rank is the last one."""
        return (calls.index(call) + 1) % self.size

    def _cause(self, error: Exception) -> RankError:
        """Why a step failed: the first rank that was lost, or this one by `error`."""
        deadline = time.monotonic() + NOTICE_S
        while self._failure is None and time.monotonic() < deadline:
            time.sleep(POLL_S)
        self._lose(0, error)
        return self._failure or RankError("the ranks have ended")

    def _of_rank(self, rank: int, error: BaseException) -> RankError:
        said = describe_error(error)
        return RankError(
            f"rank {rank} of {self.size}: {said['message']}",
            works="running again: all ranks are started anew",
            knob=said.get("knob"),
        )

    def _lose(self, rank: int, error: BaseException | None) -> None:
        """End all ranks, because `rank` failed by `error`; only the first cause counts."""
        with self._losing:
            if self._failure is not None or error is None:
                return
            self._failure = error if isinstance(error, RankError) else self._of_rank(rank, error)
        self._give_up_ranks()
        for other in self._others:
            other.worker.kill()

    def _give_up_ranks(self) -> None:
        """On cards the kernels that wait for another rank end at once, but NCCL comes back from its abort only when no
        captured graph holds its calls. The engine gives the graphs up as it is closed, for which nobody may wait here.
        """
        with self._losing:
            if self._ranks is not None and self._giving_up is None:
                self._giving_up = threading.Thread(target=self._ranks.abort, daemon=True)
                self._giving_up.start()


def _watch(reference: weakref.ref[RankGroup], closed: threading.Event) -> None:
    while not closed.wait(POLL_S):
        group = reference()
        if group is None:
            return
        group.look()
        del group
