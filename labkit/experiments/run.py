"""One run: a workload's requests offered at their times to an engine, with rows and progress while it goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from labkit.engine.engine import Engine
from labkit.engine.sampling_params import EngineRequest, SamplingParams
from labkit.errors import DoesNotFitError, OutOfRangeError
from labkit.experiments.backend import Emit, IsCancelled
from labkit.experiments.serialise import rows_to_plain, to_plain
from labkit.measure.recorder import RunRecorder
from labkit.measure.run_record import MemorySample, RequestRow, StepRow
from labkit.specs.workload import RequestSpec, Workload

PromptOf = Callable[[int], Sequence[int]]
IDLE_SLEEP_S = 0.02
MAX_ROWS_PER_EVENT = 5000
MAX_COUNTED_STEPS = 100


@dataclass(frozen=True)
class RunOptions:
    """How a workload is offered.

    Attributes:
        arrival_scale: multiplies every arrival time; 0 offers all requests at once, 1 as the trace says.
        temperature: of sampling; 0 is greedy.
        seed: of the engine.
        report_every_s: rows and progress are given out this often (8 times a second is what a panel can draw).
        counted_steps: decode steps to count with the card's counters after the timed ones; 0 counts none.
        snapshot_file: where to write torch's allocator after the run, with what it did in the counted steps, as
            torch's memory viewer opens it; "" writes none.
    """

    arrival_scale: float = 1.0
    temperature: float = 0.0
    seed: int = 0
    report_every_s: float = 0.125
    counted_steps: int = 0
    snapshot_file: str = ""

    def __post_init__(self) -> None:
        for name in ("arrival_scale", "temperature"):
            if not 0 <= getattr(self, name) <= 1e6:
                raise OutOfRangeError(f"{name} cannot be {getattr(self, name)}", works="0 or more", knob=name)
        if not 0 <= self.counted_steps <= MAX_COUNTED_STEPS:
            works = f"0 to {MAX_COUNTED_STEPS}"
            raise OutOfRangeError(f"counted_steps cannot be {self.counted_steps}", works=works, knob="counted_steps")


@dataclass(frozen=True)
class RunOutcome:
    """What a run gave beyond the rows that went out through `emit`.

    `fullest_requests` are (index of the request, tokens in its cache) of those that decoded near the fullest moment.
    """

    status: str
    duration_s: float
    requests: tuple[RequestRow, ...]
    steps: tuple[StepRow, ...]
    fullest_step: StepRow | None
    block_map: tuple[int, ...] = field(default=())
    fullest_requests: tuple[tuple[int, int], ...] = ()


class WorkloadRun:
    """Serves `workload` on `engine`.

    Args:
        prompt_of: index of a request → its prompt's token ids.
        emit: takes events: "rows" (new rows), "step" (for live charts), "progress".
        is_cancelled: asked between steps.
        watch: seconds into the run and blocks in use → memory at that moment; asked for each "step" event.
        clock, sleep: the engine's clock, and waiting on it; virtual ones in tests.
    """

    def __init__(
        self,
        engine: Engine,
        workload: Workload,
        prompt_of: PromptOf,
        options: RunOptions,
        emit: Emit,
        is_cancelled: IsCancelled,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        watch: Callable[[float, int], MemorySample] | None = None,
    ) -> None:
        self._engine = engine
        self._workload = workload
        self._prompt_of = prompt_of
        self._options = options
        self._emit = emit
        self._is_cancelled = is_cancelled
        self._clock = clock
        self._sleep = sleep
        self._next = 0
        self._reported_at = 0.0
        self._tokens_reported = 0
        self._num_input_tokens = sum(request.input_tokens for request in workload.requests)
        # A request's first output token comes out of its prompt's last step.
        self._num_decode_tokens = sum(max(0, request.output_tokens - 1) for request in workload.requests)
        self._speed = Speed()
        self._watch = watch
        self._fullest_requests: tuple[tuple[int, int], ...] = ()
        self._recorder = RunRecorder(clock(), self._look_at_fullest)

    def serve(self) -> RunOutcome:
        """Run to the end, or to Cancel; then what is running ends as cancelled and its part is kept.

        When the engine raises, what was recorded goes out through `emit` before the error goes on.
        """
        try:
            status = self._loop()
        except BaseException:
            self._recorder.close_open("failed")
            self._give_out()
            raise
        duration_s = self._now()
        self._recorder.close_open("cancelled")
        rows, steps = self._recorder.take_rows()
        return RunOutcome(
            status, duration_s, rows, steps, self._recorder.fullest_step, self._recorder.fullest_block_map,
            self._fullest_requests,
        )  # fmt: skip

    def _loop(self) -> str:
        num_requests = len(self._workload.requests)
        while self._next < num_requests or self._engine.has_unfinished:
            if self._is_cancelled():
                self._abort_all()
                return "cancelled"
            self._offer_arrived()
            if self._engine.has_unfinished:
                self._report(self._recorder.step(self._engine.step()))
            elif self._next < num_requests:
                self._idle()
        return "finished"

    def _now(self) -> float:
        return self._clock() - self._recorder.start_s

    def _arrival_s(self, request: RequestSpec) -> float:
        return request.arrival_s * self._options.arrival_scale

    def _look_at_fullest(self) -> tuple[int, ...]:
        running = self._engine.scheduler.running
        self._fullest_requests = tuple(
            (entry.request.request_id, entry.num_computed_tokens) for entry in running if entry.num_output_tokens
        )
        return self._engine.block_map()

    def _offer_arrived(self) -> None:
        now, requests = self._now(), self._workload.requests
        while self._next < len(requests) and self._arrival_s(requests[self._next]) <= now:
            self._offer(self._next, requests[self._next])
            self._next += 1

    def _offer(self, index: int, request: RequestSpec) -> None:
        arrival_s = self._arrival_s(request)
        self._recorder.offer(index, arrival_s, request.input_tokens)
        sampling = SamplingParams(
            max_tokens=max(1, request.output_tokens), ignore_eos=True, temperature=self._options.temperature
        )
        try:
            prompt = tuple(self._prompt_of(index))
            self._engine.add_request(EngineRequest(index, prompt, sampling, self._recorder.start_s + arrival_s))
        except (DoesNotFitError, OutOfRangeError) as error:
            self._recorder.refuse(index, str(error))

    def _idle(self) -> None:
        self._give_out()
        left_s = self._arrival_s(self._workload.requests[self._next]) - self._now()
        self._sleep(min(max(left_s, 0.0), IDLE_SLEEP_S))

    def _abort_all(self) -> None:
        for index in range(self._next):
            self._engine.abort(index)
        if self._engine.has_unfinished:
            self._recorder.step(self._engine.step())

    def _report(self, row: StepRow) -> None:
        self._speed.add(row)
        if self._now() - self._reported_at >= self._options.report_every_s:
            self._give_out(row)

    def _give_out(self, row: StepRow | None = None) -> None:
        requests, steps = self._recorder.take_rows()
        for start in range(0, max(len(requests), len(steps)), MAX_ROWS_PER_EVENT):
            part = slice(start, start + MAX_ROWS_PER_EVENT)
            self._emit({"type": "rows", "requests": rows_to_plain(requests[part]), "steps": rows_to_plain(steps[part])})
        now = self._now()
        if row is not None:
            self._emit(self._step_event(row, now))
        self._emit(self._progress(now))
        self._reported_at, self._tokens_reported = now, self._recorder.num_output_tokens

    def _step_event(self, row: StepRow, now: float) -> dict[str, Any]:
        new_tokens = self._recorder.num_output_tokens - self._tokens_reported
        memory = {} if self._watch is None else {"memory": to_plain(self._watch(now, row.num_blocks_used))}
        return {
            **memory,
            "type": "step",
            "time_s": now,
            "output_tokens_per_s": new_tokens / max(now - self._reported_at, 1e-9),
            "num_output_tokens": self._recorder.num_output_tokens,
            "num_steps": self._recorder.num_steps,
            "num_running": row.num_running,
            "num_waiting": row.num_waiting,
            "num_blocks_used": row.num_blocks_used,
            "num_blocks_cached": row.num_blocks_cached,
            "num_gpu_blocks": self._engine.plan.num_gpu_blocks,
            "num_preemptions": row.num_preemptions,
        }

    def _progress(self, now: float) -> dict[str, Any]:
        requests = self._workload.requests
        last_arrival_s = self._arrival_s(requests[-1]) if requests else 0.0
        compute_s = self._speed.remaining_s(self._num_input_tokens, self._num_decode_tokens)
        return {
            "type": "progress",
            "phase": "run",
            "done": self._recorder.num_finished,
            "total": len(requests),
            "unit": "requests",
            "elapsed_s": now,
            "remaining_s": None if compute_s is None else max(compute_s, last_arrival_s - now, 0.0),
        }


class Speed:
    """How fast prompts and outputs were computed so far, for the time that is left."""

    def __init__(self) -> None:
        self._seconds = {"prefill": 0.0, "decode": 0.0}
        self._tokens = {"prefill": 0, "decode": 0}
        self._num_computed = {"prefill": 0, "decode": 0}

    def add(self, row: StepRow) -> None:
        """Count one step, as one of prompts or of outputs, whichever it had more of."""
        kind = "prefill" if row.num_prefill_tokens > row.num_decode_tokens else "decode"
        self._seconds[kind] += row.duration_s
        self._tokens[kind] += row.num_tokens
        self._num_computed["prefill"] += row.num_prefill_tokens
        self._num_computed["decode"] += row.num_decode_tokens

    def remaining_s(self, num_input_tokens: int, num_decode_tokens: int) -> float | None:
        """Seconds for what is left of the totals after the steps so far; None before the first step."""
        return self.seconds_for(
            num_input_tokens - self._num_computed["prefill"], num_decode_tokens - self._num_computed["decode"]
        )

    def seconds_for(self, num_input_tokens: int, num_decode_tokens: int) -> float | None:
        """Seconds for so many tokens at the speed so far; None before the first step."""
        seconds = {kind: self._seconds[kind] / self._tokens[kind] for kind in self._tokens if self._tokens[kind]}
        if not seconds:
            return None
        slowest = max(seconds.values())
        left = {"prefill": num_input_tokens, "decode": num_decode_tokens}
        return sum(max(0, tokens) * seconds.get(kind, slowest) for kind, tokens in left.items())
