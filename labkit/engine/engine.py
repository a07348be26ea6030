"""`Engine`: requests in, tokens out, one step at a time. Knows neither torch nor a device; the executor does."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any, NamedTuple

from labkit.engine.batch import Clock, Executor, ScheduledBatch
from labkit.engine.block_pool import HashFunction, block_hash
from labkit.engine.sampling_params import EngineRequest, check_prompt, request_seed
from labkit.engine.scheduler import Scheduler
from labkit.engine.sequence import Sequence, Status
from labkit.errors import DoesNotFitError, LabkitError, OutOfRangeError
from labkit.memory.records import MemoryPlan
from labkit.text import plain

Detokenizer = Callable[[SequenceOf[int]], str]
FREE_BLOCK, CACHED_BLOCK = -1, -2
# Stands in a sequence for the token that the device has and the host does not know yet.
UNKNOWN_TOKEN = -1


class TokenOutput(NamedTuple):
    """One new token; `finish_reason` is "" while the request goes on."""

    request_id: int
    token_id: int
    finish_reason: str = ""


@dataclass(frozen=True)
class RequestOutput:
    """A finished request; times on the engine's clock, fields as in `labkit.measure.run_record.RequestRow`."""

    request_id: int
    token_ids: tuple[int, ...]
    finish_reason: str
    arrival_s: float
    first_token_s: float | None
    finish_s: float | None
    input_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    token_times_s: tuple[float, ...]


@dataclass(frozen=True)
class StepResult:
    """What a step gave; the counts are those of `labkit.measure.run_record.StepRow`.

    Attributes:
        outputs: one entry for each new token, oldest request first.
        finished: requests that ended in this step or since the last one (cancelled, refused, outgrown).
    """

    outputs: tuple[TokenOutput, ...]
    finished: tuple[RequestOutput, ...]
    start_s: float
    duration_s: float
    num_tokens: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_running: int
    num_waiting: int
    num_blocks_used: int
    num_blocks_cached: int
    num_tokens_stored: int
    num_preemptions: int
    num_swapped_blocks: int


class Engine:
    """Continuous batching over one decoder. Several may live in one process.

    Args:
        decoder: what the executor runs; None with an executor that has its own or needs none.
        plan: resolved configuration and numbers of blocks, from `labkit.memory.plan(…, engine="labkit")`.
        seed: for requests without one.
        executor: computes the steps; by default one over `decoder`, on the card when that is where its weights are.
        clock: seconds, rising; a virtual one for simulation.
        detokenize: token ids → text, needed for stop strings.
        hash_function: of prefix blocks.
        overlap: with an executor that can, put the next step together while the device computes this one; tokens
            are then in the result of the step after theirs.

    Raises:
        DoesNotFitError: the plan has no block.
    """

    def __init__(
        self,
        decoder: Any,
        plan: MemoryPlan,
        *,
        seed: int = 0,
        executor: Executor | None = None,
        clock: Clock | None = None,
        detokenize: Detokenizer | None = None,
        hash_function: HashFunction = block_hash,
        overlap: bool = True,
    ) -> None:
        _check_plan(plan)
        self.plan = plan
        self.seed = seed
        self._clock = clock or time.monotonic
        self._detokenize = detokenize
        self._hash_function = hash_function
        self._executor = executor if executor is not None else _executor_alone(decoder, plan)
        self.plan = getattr(self._executor, "plan", plan)
        self._sequences: dict[int, Sequence] = {}
        self._finished: list[RequestOutput] = []
        self._next_index = 0
        self._overlaps = overlap and hasattr(self._executor, "submit")
        self._in_flight: tuple[ScheduledBatch, Any] | None = None
        self._early: tuple[TokenOutput, ...] = ()
        self._scheduler = self._new_scheduler()

    @property
    def has_unfinished(self) -> bool:
        """Whether a request waits or runs, or a finished one was not reported by `step` yet."""
        return bool(self._sequences or self._finished)

    @property
    def scheduler(self) -> Scheduler:
        """Queues and pools, to look at."""
        return self._scheduler

    @property
    def executor(self) -> Executor:
        """What computes the steps."""
        return self._executor

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request; nothing changes when it is refused.

        Raises:
            OutOfRangeError: empty prompt, token outside the vocabulary, id in use, stop strings without detokenizer.
            DoesNotFitError: it can never run: needed, available, and the largest that fits.
        """
        if request.request_id in self._sequences:
            raise OutOfRangeError(f"request id {plain(request.request_id, 80)} is in use")
        if request.sampling.stop and self._detokenize is None:
            raise OutOfRangeError("stop strings need an engine with a detokenizer", knob="stop")
        self._check_prompt(request)
        self._check_fits(request)
        sequence = Sequence(request, self._next_index, request_seed(request, self.seed), self._scheduler.max_model_len)
        self._next_index += 1
        self._sequences[request.request_id] = sequence
        self._scheduler.add(sequence)

    def step(self) -> StepResult:
        """Compute one step. When the executor raises, the error goes on to the caller, every running request is
        computed anew from its tokens, and the engine stays usable."""
        start_s = self._clock()
        batch = self._step_ahead() if self._overlaps else self._step_now()
        outputs, self._early = self._early, ()
        finished, self._finished = tuple(self._finished), []
        return self._result(batch, start_s, outputs, finished)

    def abort(self, request_id: int) -> bool:
        """Cancel a request; its end is in the next step's result. False when there is no such request."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return False
        self._scheduler.finish(sequence, "cancelled")
        self._report(sequence)
        return True

    def reconfigure(self, plan: MemoryPlan) -> None:
        """Go on under another plan, weights kept. Unfinished requests are computed anew; those that can no longer
        fit end as refused, in the next step's result.

        Raises:
            DoesNotFitError: the plan has no block; the engine goes on as before.
        """
        _check_plan(plan)
        self._early += self._collect()
        self._executor.reconfigure(plan)
        self.plan = getattr(self._executor, "plan", plan)
        self._scheduler = self._new_scheduler()
        for sequence in list(self._sequences.values()):
            self._requeue(sequence)

    def check(self) -> None:
        """Balance the books of scheduler and pools.

        Raises:
            BlockError: naming the first broken invariant.
        """
        self._scheduler.check()
        queued = {*self._scheduler.waiting, *self._scheduler.running}
        if queued != set(self._sequences.values()):
            raise LabkitError("a request is lost or finished but still queued")

    def block_map(self) -> tuple[int, ...]:
        """Owner of each block: `FREE_BLOCK`, `CACHED_BLOCK`, or the id of the oldest request that names it."""
        pool = self._scheduler.pool
        owners = [FREE_BLOCK] * pool.num_blocks
        for block_id in pool.cached_blocks():
            owners[block_id] = CACHED_BLOCK
        for sequence in reversed(self._scheduler.running):
            for block_id in sequence.block_table:
                owners[block_id] = sequence.request.request_id
        return tuple(owners)

    def memory_parts(self) -> dict[str, int]:
        """Measured bytes by part, as the executor finds them."""
        return self._executor.memory_parts()

    def close(self) -> None:
        """Cancel what is left and give the memory back; a second call does nothing."""
        for request_id in list(self._sequences):
            self.abort(request_id)
        self._in_flight = None
        self._executor.close()

    def _step_now(self) -> ScheduledBatch:
        """Schedule, compute, take the tokens."""
        batch = self._scheduler.schedule()
        token_ids: list[int] = []
        if batch.sequences or batch.swap_out:
            try:
                token_ids = self._executor.execute(batch)
            except BaseException:
                self._scheduler.forget_all_kv()
                raise
        self._scheduler.advance(batch)
        self._early += self._take_tokens(batch, token_ids, self._clock())
        return batch

    def _step_ahead(self) -> ScheduledBatch:
        """Schedule and queue a step over tokens that are still on the device, then take those of the step before.

        A request that turns out to have ended rides along once more; its row is ignored, and what the device writes
        for it comes, in stream order, before anyone else uses its blocks.
        """
        # Kept until a step returns: when this one raises, the next brings them.
        if self._needs_tokens():
            self._early += self._collect()
        batch = self._scheduler.schedule()
        pending = None
        if batch.sequences or batch.swap_out:
            pending = self._computed(lambda: self._executor.submit(batch))  # type: ignore[attr-defined]
        self._early += self._collect()
        self._scheduler.advance(batch)
        for sequence, samples in zip(batch.sequences, batch.samples, strict=True):
            if samples and sequence.status is not Status.FINISHED:
                sequence.token_ids.append(UNKNOWN_TOKEN)
        self._in_flight = None if pending is None else (batch, pending)
        return batch

    def _collect(self) -> tuple[TokenOutput, ...]:
        """Wait for the step in flight and take its tokens."""
        if self._in_flight is None:
            return ()
        batch, pending = self._in_flight
        token_ids = self._computed(lambda: self._executor.collect(pending))  # type: ignore[attr-defined]
        self._in_flight = None
        return self._take_tokens(batch, token_ids, self._clock())

    def _computed(self, call: Callable[[], Any]) -> Any:
        """What the executor gives; when it raises, every running request is to be computed anew."""
        try:
            return call()
        except BaseException:
            self._forget_in_flight()
            self._scheduler.forget_all_kv()
            raise

    def _needs_tokens(self) -> bool:
        """Whether the next step cannot be put together without the tokens in flight: a penalty counts them, or a
        request that is alone may outgrow the pool, which ends it with what it has."""
        if len(self._scheduler.running) == 1 and not self._scheduler.pool.num_available:
            return True
        sequences = () if self._in_flight is None else self._in_flight[0].sequences
        return any(sequence.request.sampling.repetition_penalty != 1.0 for sequence in sequences)

    def _forget_in_flight(self) -> None:
        self._in_flight = None
        for sequence in self._sequences.values():
            _drop_unknown(sequence)

    def _new_scheduler(self) -> Scheduler:
        return Scheduler(self.plan, on_finish=self._report, hash_function=self._hash_function)

    def _check_prompt(self, request: EngineRequest) -> None:
        check_prompt(request, self.plan.model.vocab_size)

    def _check_fits(self, request: EngineRequest) -> None:
        sampling = request.sampling
        runs_to_max = sampling.ignore_eos and not sampling.stop and not sampling.stop_token_ids
        self._scheduler.check_fits(len(request.prompt_token_ids), sampling.max_tokens, runs_to_max=runs_to_max)

    def _requeue(self, sequence: Sequence) -> None:
        sequence.forget_kv()
        sequence.keys = []
        sequence.slot = -1
        sequence.status = Status.WAITING
        request = sequence.request
        left = self._scheduler.max_model_len - sequence.num_prompt_tokens
        sequence.max_tokens = min(request.sampling.max_tokens, left)
        try:
            self._check_fits(request)
            self._scheduler.check_fits(sequence.num_tokens, 1, runs_to_max=False)
        except DoesNotFitError as error:
            sequence.status = Status.FINISHED
            sequence.finish_reason = f"refused: {error}"
            self._report(sequence)
        else:
            self._scheduler.add(sequence)

    def _take_tokens(self, batch: ScheduledBatch, token_ids: list[int], now: float) -> tuple[TokenOutput, ...]:
        outputs = []
        tokens = iter(token_ids)
        for sequence, samples in zip(batch.sequences, batch.samples, strict=True):
            token_id = next(tokens) if samples else UNKNOWN_TOKEN
            if samples and sequence.status is not Status.FINISHED:
                _drop_unknown(sequence)
                self._append(sequence, token_id, now)
                outputs.append(TokenOutput(sequence.request.request_id, token_id, sequence.finish_reason))
        return tuple(outputs)

    def _append(self, sequence: Sequence, token_id: int, now: float) -> None:
        sequence.token_ids.append(token_id)
        sequence.token_times_s.append(now)
        if sequence.first_token_s is None:
            sequence.first_token_s = now
        reason = self._stop_reason(sequence, token_id)
        if reason:
            self._scheduler.finish(sequence, reason)
            self._report(sequence)

    def _stop_reason(self, sequence: Sequence, token_id: int) -> str:
        sampling = sequence.request.sampling
        num_output = sequence.num_output_tokens
        if num_output >= sampling.min_tokens:
            if token_id in sampling.stop_token_ids:
                return "stop"
            if not sampling.ignore_eos and token_id in self.plan.model.eos_token_ids:
                return "stop"
            if sampling.stop and self._detokenize:
                try:
                    found = _ends_with_stop(sequence, self._detokenize)
                except Exception as error:  # one request's text must not end the others' step
                    return f"error: the detokenizer failed: {plain(error)}"
                if found:
                    return "stop"
        return "length" if num_output >= sequence.max_tokens else ""

    def _report(self, sequence: Sequence) -> None:
        """The sequence is finished: forget it, and keep its output for the next step's result."""
        request = sequence.request
        _drop_unknown(sequence)
        sequence.finish_s = self._clock()
        del self._sequences[request.request_id]
        self._finished.append(
            RequestOutput(
                request_id=request.request_id,
                token_ids=tuple(sequence.token_ids[sequence.num_prompt_tokens :]),
                finish_reason=sequence.finish_reason,
                arrival_s=request.arrival_s,
                first_token_s=sequence.first_token_s,
                finish_s=sequence.finish_s,
                input_tokens=sequence.num_prompt_tokens,
                num_cached_tokens=max(0, sequence.num_cached_tokens),
                num_preemptions=sequence.num_preemptions,
                token_times_s=tuple(sequence.token_times_s),
            )
        )

    def _result(
        self,
        batch: ScheduledBatch,
        start_s: float,
        outputs: tuple[TokenOutput, ...],
        finished: tuple[RequestOutput, ...],
    ) -> StepResult:
        pool, running = self._scheduler.pool, self._scheduler.running
        # Only the last block of a table has room left, and that one is never shared.
        waste = sum(len(entry.block_table) * pool.block_size - entry.num_computed_tokens for entry in running)
        return StepResult(
            outputs=outputs,
            finished=finished,
            start_s=start_s,
            duration_s=self._clock() - start_s,
            num_tokens=batch.num_tokens,
            num_prefill_tokens=batch.num_prefill_tokens,
            num_decode_tokens=batch.num_decode_tokens,
            num_running=len(running),
            num_waiting=len(self._scheduler.waiting),
            num_blocks_used=pool.num_used,
            num_blocks_cached=pool.num_cached,
            num_tokens_stored=pool.num_used * pool.block_size - waste,
            num_preemptions=batch.num_preemptions,
            num_swapped_blocks=len(batch.swap_out) + len(batch.swap_in),
        )


def _drop_unknown(sequence: Sequence) -> None:
    if sequence.token_ids[-1] == UNKNOWN_TOKEN:
        sequence.token_ids.pop()


def _ends_with_stop(sequence: Sequence, detokenize: Detokenizer) -> bool:
    """Whether the text of the last tokens holds a stop string; a character has at most four tokens (its bytes)."""
    stop = sequence.request.sampling.stop
    window = min(sequence.num_output_tokens, 4 * max(map(len, stop)) + 4)
    text = detokenize(sequence.token_ids[-window:])
    return any(entry in text for entry in stop)


def _check_plan(plan: MemoryPlan) -> None:
    missing = [
        name
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens")
        if getattr(plan.config, name) is None
    ]
    if missing:
        raise OutOfRangeError(f"the plan leaves {', '.join(missing)} open", works="a plan from labkit.plan(…)")
    if plan.num_gpu_blocks < 1:
        raise DoesNotFitError(
            "the plan has no KV block",
            needed="1 block or more",
            available=f"{plan.num_gpu_blocks} blocks",
            knob=plan.binding_limit or "cpu_memory_gib",
        )


def _executor_alone(decoder: Any, plan: MemoryPlan) -> Executor:
    """An executor of this process; a decoder that others share would wait for them for ever."""
    size = getattr(decoder, "tp_size", 1)
    if size > 1:
        raise LabkitError(f"{size} ranks share this decoder", works="executor=RankGroup.executor(plan)")
    return default_executor(decoder, plan)


def default_executor(decoder: Any, plan: MemoryPlan) -> Executor:
    """The executor where the decoder's weights are; torch and Triton are imported only where they compute."""
    if getattr(getattr(decoder, "device", None), "type", "cpu") == "cuda":
        from labkit.engine.cuda_executor import CudaExecutor

        return CudaExecutor(decoder, plan)
    from labkit.engine.cpu_executor import CpuExecutor

    return CpuExecutor(decoder, plan)
