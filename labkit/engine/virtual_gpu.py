"""`VirtualEngine`: the real `Engine`, scheduler and block pool on a virtual clock that a step-time model moves.

No token is computed and no device touched. A stretch of steps in which the same requests decode is taken in one
jump: its block allocations are replayed in the order in which single steps make them, so that tables, caches and
counts are those of single steps, and its times come from one evaluation of the model.
"""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from labkit.engine.batch import ScheduledBatch
from labkit.engine.engine import UNKNOWN_TOKEN, Engine, RequestOutput, StepResult
from labkit.engine.sampling_params import EngineRequest
from labkit.engine.scheduler import Scheduler
from labkit.engine.sequence import Sequence
from labkit.engine.step_time import StepClock, StepLoad, StepTimeModel, TabulatedStepTimes
from labkit.engine.vllm_rules import VllmScheduler
from labkit.memory.records import MemoryPlan

_MOST_STEPS = 4096


class VirtualGpuExecutor:
    """An `Executor` whose steps take as long as `model` says and give a fixed token for each request."""

    def __init__(self, plan: MemoryPlan, model: StepTimeModel) -> None:
        self.plan = plan
        self.model = TabulatedStepTimes(
            model.cost, model.gpu, model.constants, model.launch, int(plan.config.max_num_batched_tokens or 1)
        )
        self.time = StepClock()
        self._ends = frozenset(plan.model.eos_token_ids)

    @property
    def now_s(self) -> float:
        """Virtual seconds, as the host has them; set to wait."""
        return self.time.host_s

    @now_s.setter
    def now_s(self, value: float) -> None:
        self.time.host_s = value

    def clock(self) -> float:
        """Virtual seconds."""
        return self.now_s

    def token_of(self, sequence: Sequence) -> int:
        """A token that never ends a request and that neighbouring requests do not share."""
        vocab_size = self.plan.model.vocab_size
        token = sequence.index % vocab_size
        while token in self._ends:
            token = (token + 1) % vocab_size
        return token

    def execute(self, batch: ScheduledBatch) -> list[int]:
        """See `Executor.execute`; moves the clock."""
        self.now_s += float(self.model.seconds(batch_load(batch, self.model, self.plan.block_bytes))[0])
        return self._tokens(batch)

    def submit(self, batch: ScheduledBatch) -> tuple[list[int], float]:
        """Queue a step without waiting: its tokens, and when they will be there."""
        seconds = self.model.overlapped(batch_load(batch, self.model, self.plan.block_bytes))
        done_s = self.time.submit(seconds.host[0], seconds.launching[0], seconds.device[0])
        return self._tokens(batch), done_s

    def collect(self, pending: tuple[list[int], float]) -> list[int]:
        """Wait for a step and take its tokens."""
        self.time.collect(pending[1])
        return pending[0]

    def _tokens(self, batch: ScheduledBatch) -> list[int]:
        return [self.token_of(entry) for entry, samples in zip(batch.sequences, batch.samples, strict=True) if samples]

    def reconfigure(self, plan: MemoryPlan) -> None:
        """See `Executor.reconfigure`."""
        self.plan = plan

    def memory_parts(self) -> dict[str, int]:
        """See `Executor.memory_parts`: the plan's parts, as nothing is allocated."""
        return {part: size for part, size in self.plan.breakdown.parts().items() if part != "free"}

    def close(self) -> None:
        """See `Executor.close`."""


def batch_load(batch: ScheduledBatch, model: StepTimeModel, block_bytes: int) -> StepLoad:
    """The work of one step as the step-time model takes it."""
    counts = [after - before for before, after in pairwise(batch.query_starts)]
    contexts = [length for count, length in zip(counts, batch.seq_lens, strict=True) if count == 1]
    prompts = [(count, length) for count, length in zip(counts, batch.seq_lens, strict=True) if count != 1]
    swapped = (len(batch.swap_in) + len(batch.swap_out)) * block_bytes

    def once(value: float) -> np.ndarray:
        return np.array([float(value)])

    return StepLoad(
        num_tokens=once(batch.num_tokens),
        num_seqs=once(len(counts)),
        num_sampled=once(sum(batch.samples)),
        kv_tokens=tuple(once(_seen(contexts, kind.window)) for kind in model.cost.kv),
        pairs=tuple(once(_pairs(prompts, kind.window)) for kind in model.cost.kv),
        swapped_bytes=once(swapped),
        num_prompt_tokens=once(sum(count for count, _ in prompts)),
        num_prompts=once(len(prompts)),
    )


def _seen(contexts: list[int], window: int) -> int:
    return sum(min(length, window) for length in contexts) if window else sum(contexts)


def _pairs(prompts: list[tuple[int, int]], window: int) -> int:
    """(query, context) pairs of causal prefill: query i of a sequence sees end - queries + i + 1 tokens."""
    whole = [(queries, queries * end - queries * (queries - 1) // 2) for queries, end in prompts]
    return sum(min(pairs, queries * window) if window else pairs for queries, pairs in whole)


class Jump(NamedTuple):
    """Steps that were taken together; arrays of one entry a step, fields as in `StepRow`.

    `num_decode_tokens` is the same in all; only the last step can end requests, which are `finished`.
    """

    start_s: np.ndarray
    duration_s: np.ndarray
    num_blocks_used: np.ndarray
    num_blocks_cached: np.ndarray
    num_tokens_stored: np.ndarray
    num_running: np.ndarray
    num_decode_tokens: int
    num_waiting: int
    finished: tuple[RequestOutput, ...]


class VirtualEngine(Engine):
    """An `Engine` on a virtual clock.

    Args:
        plan: from `labkit.memory.plan`; with engine "vllm" vLLM's scheduling rules hold, else labkit's.
        model: how long steps take, and whether the host puts the next one together meanwhile.
    """

    def __init__(self, plan: MemoryPlan, model: StepTimeModel, *, seed: int = 0) -> None:
        plan = usable_plan(plan)
        executor = VirtualGpuExecutor(plan, model)
        self.gpu = executor
        self._is_settled = False
        super().__init__(
            None, plan, seed=seed, executor=executor, clock=executor.clock, hash_function=quick_hash,
            overlap=model.launch.overlaps,
        )  # fmt: skip

    def _new_scheduler(self) -> Scheduler:
        kind = VllmScheduler if self.plan.engine == "vllm" else Scheduler
        return kind(self.plan, on_finish=self._report, hash_function=self._hash_function)

    def add_request(self, request: EngineRequest) -> None:
        """See `Engine.add_request`."""
        self._is_settled = False
        super().add_request(request)

    def _check_prompt(self, request: EngineRequest) -> None:
        # No model reads the tokens, so that they need not be in its vocabulary; a prompt without any is refused.
        if len(request.prompt_token_ids) == 0:
            super()._check_prompt(request)

    def step(self) -> StepResult:
        """See `Engine.step`."""
        result = super().step()
        changed = result.finished or result.num_preemptions or result.num_prefill_tokens
        self._is_settled = not changed and result.num_decode_tokens == result.num_running
        return result

    def jump(self, until_s: float, extra_steps: int = 0) -> Jump | None:
        """Take all the steps in which nothing but decode happens and that begin before `until_s`, up to the one in
        which a request ends; None when the next one must be a `step`.

        Args:
            extra_steps: so many more, begun after `until_s`.
        """
        running = self._scheduler.running
        # What could not be let in stays out until a request ends: growth only takes blocks.
        if not running or self._finished or not (self._is_settled or not self._scheduler.waiting):
            return None
        block_size, num_steps = self._scheduler.pool.block_size, _MOST_STEPS
        computed: list[int] = []
        room: list[int] = []
        for entry in running:
            known, done = len(entry.token_ids), entry.num_computed_tokens
            num_output = known - entry.num_prompt_tokens
            if known - done != 1 or not num_output:
                return None
            num_steps = min(num_steps, entry.max_tokens - num_output)
            computed.append(done)
            room.append(len(entry.block_table) * block_size)
        if self._overlaps and not self._all_in_flight(running):
            return None
        num_steps = self._steps_with_blocks(computed, room, num_steps)
        if num_steps < 1:
            return None
        ends, dones = self._times(np.array(computed) + 1.0, num_steps)
        num_steps = min(num_steps, 1 + int(ends[:-1].searchsorted(until_s)) + extra_steps)
        starts = np.concatenate(([self.gpu.now_s], ends[: num_steps - 1]))
        jump = self._take(computed, room, starts, ends[:num_steps])
        if self._overlaps:
            self._leave_in_flight(running, dones[num_steps - 1])
        return jump

    def _all_in_flight(self, running: SequenceOf[Sequence]) -> bool:
        """Whether the step that the card computes gives a token of each running request, and of no other."""
        if self._in_flight is None or self._early:
            return False
        batch = self._in_flight[0]
        return len(batch.sequences) == len(running) and all(batch.samples) and {*batch.sequences} == {*running}

    def _times(self, contexts: np.ndarray, num_steps: int) -> tuple[np.ndarray, np.ndarray]:
        """When each of the next decode steps ends for the host, and when the card is done with it."""
        model, gpu = self.gpu.model, self.gpu
        if not self._overlaps:
            ends = gpu.now_s + model.decode_seconds(contexts, num_steps).cumsum()
            return ends, ends
        seconds = model.overlapped(model.decode_load(contexts, num_steps))
        clock, pending = replace(gpu.time), self._in_flight[1][1]  # type: ignore[index]
        ends, done = np.empty(num_steps), np.empty(num_steps)
        for step, parts in enumerate(zip(seconds.host, seconds.launching, seconds.device, strict=True)):
            done[step] = clock.submit(*parts)
            ends[step] = clock.collect(pending)
            pending = done[step]
        return ends, done

    def _leave_in_flight(self, running: SequenceOf[Sequence], done_s: float) -> None:
        """The last step of a jump is still to be collected: its token of each request is not known yet."""
        for entry in running:
            entry.token_ids.append(UNKNOWN_TOKEN)
        batch = ScheduledBatch(sequences=tuple(running), samples=[True] * len(running))
        self._in_flight = (batch, ([self.gpu.token_of(entry) for entry in running], float(done_s)))
        self.gpu.time.card_s = float(done_s)

    def _steps_with_blocks(self, computed: list[int], room: list[int], num_steps: int) -> int:
        """As many of `num_steps` steps as the pool has blocks for."""
        size, available = self._scheduler.pool.block_size, self._scheduler.pool.num_available
        if self._overlaps and len(room) == 1:
            # With no block left a request that is alone waits for its token, which may be its last.
            available -= 1

        if len(room) * (num_steps // size + 1) <= available:
            return num_steps
        beyond = np.array(computed) - np.array(room)

        def needed(steps: int) -> int:
            return int((-(-np.maximum(0, beyond + steps) // size)).sum())

        low, high = 0, num_steps
        while low < high and needed(high) > available:
            middle = (low + high) // 2
            if needed(middle) <= available:
                low = middle + 1
            else:
                high = middle
            if needed(low) > available:
                return low - 1
        return high

    def _take(self, computed: list[int], room: list[int], starts: np.ndarray, ends: np.ndarray) -> Jump:
        scheduler, pool = self._scheduler, self._scheduler.pool
        running, num_steps = list(scheduler.running), len(ends)
        before, times, waste = pool.num_used, ends.tolist(), sum(room) - sum(computed)
        for entry in running:
            if self._overlaps:
                entry.token_ids.pop()
            entry.token_ids += [self.gpu.token_of(entry)] * num_steps
        num_free, num_cached = pool.num_available - pool.num_cached, pool.num_cached
        taken_at = []
        for step, is_full, number in _block_events(computed, room, num_steps, pool.block_size):
            entry = running[number]
            if is_full:
                entry.num_computed_tokens = computed[number] + step + 1
                scheduler.register_full_blocks(entry)
            else:
                scheduler.extend(entry, 1)
                taken_at.append(step)
        # Free blocks go first, then cached ones.
        more = np.bincount(taken_at, minlength=num_steps).cumsum() if taken_at else np.zeros(num_steps, dtype=int)
        used, cached = before + more, num_cached - np.maximum(0, more - num_free)
        for entry, done in zip(running, computed, strict=True):
            entry.num_computed_tokens = done + num_steps
            entry.token_times_s += times
            if entry.first_token_s is None:
                entry.first_token_s = times[0]
        self.gpu.now_s = times[-1]
        stored = before * pool.block_size - waste + np.arange(1, num_steps + 1) * len(running)
        counts = np.empty(num_steps, dtype=int)
        counts.fill(len(running))
        finished = () if self._overlaps else self._end_complete(running)
        if finished:
            counts[-1], used[-1], cached[-1] = len(scheduler.running), pool.num_used, pool.num_cached
            room_left = sum(
                len(entry.block_table) * pool.block_size - entry.num_computed_tokens for entry in scheduler.running
            )
            stored[-1] = pool.num_used * pool.block_size - room_left
        return Jump(starts, ends - starts, used, cached, stored, counts, len(running), len(scheduler.waiting), finished)

    def _end_complete(self, running: SequenceOf[Sequence]) -> tuple[RequestOutput, ...]:
        """End the requests that have all their tokens."""
        for entry in running:
            if entry.num_output_tokens >= entry.max_tokens:
                self._scheduler.finish(entry, "length")
                self._report(entry)
                self._is_settled = False
        finished, self._finished = tuple(self._finished), []
        return finished


def _block_events(computed: list[int], room: list[int], num_steps: int, block_size: int) -> list[tuple[int, int, int]]:
    """(step, 0 a block is needed | 1 a block is full, sequence), in the order in which single steps do it."""
    events = []
    for number, (done, places) in enumerate(zip(computed, room, strict=True)):
        step = places - done
        while step < num_steps:
            events.append((step, 0, number))
            step += block_size
        step = -(done + 1) % block_size
        while step < num_steps:
            events.append((step, 1, number))
            step += block_size
    events.sort()
    return events


def usable_plan(plan: MemoryPlan) -> MemoryPlan:
    """The plan with the blocks that requests can hold: vLLM prints those as tokens, keeps one block back in some
    versions, and has no swap."""
    if plan.engine != "vllm":
        return plan
    num_blocks = plan.kv_cache_tokens // plan.config.block_size
    return replace(plan, num_gpu_blocks=num_blocks, num_swap_blocks=0)


def quick_hash(parent_hash: Hashable, token_ids: SequenceOf[int]) -> int:
    """A hash of a tuple, for books that no one attacks; the pool compares content wherever hashes agree."""
    return hash((parent_hash, token_ids))
