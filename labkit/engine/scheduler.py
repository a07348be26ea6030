"""`Scheduler`: which sequence advances by how many tokens in the next step.

There is no prefill phase and no decode phase. Each step has a budget of `max_num_batched_tokens`; the running
sequences take theirs first, oldest first, then waiting ones are let in. Order is by arrival and never changes: the
youngest running sequence is sent back when blocks run out, so the oldest one always advances and nothing deadlocks.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable

from labkit.engine.batch import BatchBuilder, ScheduledBatch
from labkit.engine.block_pool import BlockError, BlockPool, HashFunction, block_hash
from labkit.engine.sequence import Sequence, Status
from labkit.errors import DoesNotFitError
from labkit.memory.card_parts import STAGED_BYTES
from labkit.memory.records import MemoryPlan

# After this many preemptions a sequence comes back only when everything that runs could finish beside it.
_CAREFUL_AFTER = 3


class Scheduler:
    """Waiting and running sequences, and the blocks they hold.

    Args:
        plan: resolved configuration, number of blocks, number of host blocks for swapping.
        on_finish: called with each sequence that the scheduler itself ends (it outgrew the pool).
        hash_function: of prefix blocks.
    """

    def __init__(
        self,
        plan: MemoryPlan,
        *,
        on_finish: Callable[[Sequence], None] | None = None,
        hash_function: HashFunction = block_hash,
    ) -> None:
        config = plan.config
        self.config = config
        self.max_model_len = int(config.max_model_len or 0)
        self.max_num_batched_tokens = int(config.max_num_batched_tokens or 0)
        self.max_num_running = min(int(config.max_num_seqs or 0), self.max_num_batched_tokens)
        self.pool = BlockPool(
            plan.num_gpu_blocks,
            config.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
            hash_function=hash_function,
        )
        self.swap_pool = BlockPool(plan.num_swap_blocks, config.block_size, enable_prefix_caching=False)
        # What comes back beside one step: more would only keep it waiting.
        self._most_swapped_in = max(1, STAGED_BYTES // plan.block_bytes) if plan.block_bytes else plan.num_gpu_blocks
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._free_slots = list(range(self.max_num_running - 1, -1, -1))
        self._on_finish = on_finish or (lambda sequence: None)

    def check_fits(self, num_prompt_tokens: int, max_tokens: int, *, runs_to_max: bool) -> None:
        """Refuse what can never run.

        Args:
            runs_to_max: the request surely generates `max_tokens` tokens; else only its first one must fit.

        Raises:
            DoesNotFitError: with what is needed, what there is, and the largest request that fits.
        """
        num_tokens = num_prompt_tokens + (max_tokens if runs_to_max else 1)
        pool_tokens = self.pool.num_blocks * self.pool.block_size
        if num_tokens > self.max_model_len:
            raise _refusal(num_tokens, self.max_model_len, "max_model_len", min(self.max_model_len, pool_tokens + 1))
        if self.pool.blocks_for(num_tokens - 1) > self.pool.num_blocks:
            raise _refusal(num_tokens, pool_tokens, "num_gpu_blocks", min(self.max_model_len, pool_tokens + 1))
        if not self.config.enable_chunked_prefill and num_prompt_tokens > self.max_num_batched_tokens:
            raise _refusal(
                num_prompt_tokens, self.max_num_batched_tokens, "max_num_batched_tokens", self.max_num_batched_tokens
            )

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait for its turn."""
        insort(self.waiting, sequence, key=_index)

    def schedule(self) -> ScheduledBatch:
        """The next step; empty when nothing can advance."""
        step = BatchBuilder(self.max_num_batched_tokens)
        self._continue_running(step)
        # Room made by sending someone back belongs to the older ones, not to a newcomer.
        if not step.num_preemptions:
            self._admit_waiting(step)
        return step.build()

    def advance(self, batch: ScheduledBatch) -> None:
        """Note that `batch` was computed; full blocks become findable by prefix."""
        for row, sequence in enumerate(batch.sequences):
            if sequence.status is Status.RUNNING:
                sequence.num_computed_tokens = batch.seq_lens[row]
                self.register_full_blocks(sequence)

    def finish(self, sequence: Sequence, reason: str) -> None:
        """End a sequence and drop its blocks; a finished one stays as it is."""
        if sequence.status is Status.FINISHED:
            return
        self._leave(sequence)
        sequence.status = Status.FINISHED
        sequence.finish_reason = reason

    def forget_all_kv(self) -> None:
        """Send every sequence back to be computed anew, after a step that failed half-way."""
        for sequence in [*self.running, *(entry for entry in self.waiting if entry.swap_table)]:
            self._leave(sequence)
            sequence.status = Status.WAITING
            insort(self.waiting, sequence, key=_index)

    def check(self) -> None:
        """Balance all books; see `BlockPool.check`, and: table length = blocks for the computed tokens (or those in
        flight), registered blocks carry the sequence's own tokens, limits hold, order is by arrival.

        Raises:
            BlockError: naming the first broken invariant.
        """
        self.pool.check(sequence.block_table for sequence in self.running)
        self.swap_pool.check(sequence.swap_table for sequence in self.waiting)
        if len(self.running) > self.max_num_running:
            raise BlockError(f"{len(self.running)} sequences run, {self.max_num_running} may")
        for group in (self.waiting, self.running):
            indices = [sequence.index for sequence in group]
            if indices != sorted(set(indices)):
                raise BlockError("a queue is out of order or names a sequence twice")
        slots = [sequence.slot for sequence in self.running]
        if sorted(slots + self._free_slots) != list(range(self.max_num_running)):
            raise BlockError("a table row is lost or used twice")
        for sequence in self.running:
            self._check_running(sequence)
        for sequence in self.waiting:
            self._check_waiting(sequence)

    def _continue_running(self, step: BatchBuilder) -> None:
        position = 0
        while position < len(self.running):
            sequence = self.running[position]
            if sequence.is_complete:
                position += 1
                continue
            # One token stays for each younger one, so that nobody stalls behind a long prompt.
            others = len(self.running) - position - 1
            count = min(sequence.num_tokens_to_compute, step.budget - others)
            if self._grow(sequence, sequence.num_computed_tokens + count, step):
                step.choose(sequence, count)
            if position < len(self.running) and self.running[position] is sequence:
                position += 1

    def _grow(self, sequence: Sequence, num_tokens: int, step: BatchBuilder) -> bool:
        """Blocks for `num_tokens` tokens; sends younger ones back for it. False: not in this step, or no more."""
        missing = self.pool.blocks_for(num_tokens) - len(sequence.block_table)
        while missing > self.pool.num_available:
            victim = self.running[-1]
            if victim is sequence and len(self.running) == 1:
                self._end_outgrown(sequence)
                return False
            self._preempt(victim, step)
            if victim is sequence:
                return False
        return missing <= 0 or self.extend(sequence, missing)

    def extend(self, sequence: Sequence, count: int) -> bool:
        """`count` more blocks at the end of the table; False when the pool has none to give."""
        table, pool = sequence.block_table, self.pool
        expected = pool.blocks_for(sequence.max_num_tokens) - len(table)
        blocks = pool.allocate(count, after=table[-1] if table else -1, expected=expected)
        if blocks is None:
            return False
        table.extend(blocks)
        return True

    def _end_outgrown(self, sequence: Sequence) -> None:
        pool_tokens = self.pool.num_blocks * self.pool.block_size
        self.finish(sequence, f"length: the KV cache holds {pool_tokens} tokens and this request alone outgrew it")
        self._on_finish(sequence)

    def _preempt(self, sequence: Sequence, step: BatchBuilder) -> None:
        """Send a sequence back; its KV is swapped out where configuration and host room allow, else forgotten."""
        self.running.remove(sequence)
        self._free_slots.append(sequence.slot)
        sequence.slot = -1
        sequence.num_preemptions += 1
        step.num_preemptions += 1
        used = sequence.block_table[: self.pool.blocks_for(sequence.num_computed_tokens)]
        hosts = self.swap_pool.allocate(len(used)) if self.config.preemption_mode == "swap" and used else None
        self.pool.free(sequence.block_table)
        if hosts is None:
            sequence.forget_kv()
            sequence.status = Status.WAITING
        else:
            step.swap_out.extend(zip(used, hosts, strict=True))
            sequence.block_table, sequence.swap_table = [], hosts
            sequence.status = Status.SWAPPED
        insort(self.waiting, sequence, key=_index)

    def _admit_waiting(self, step: BatchBuilder) -> None:
        if not self.waiting or step.budget <= 0:
            return
        growth = Growth(self.pool)
        for sequence in self.running:
            growth.add(sequence)
        while self.waiting and step.budget > 0 and len(self.running) < self.max_num_running:
            newcomer = self.waiting[0]
            if not self._admit(newcomer, step, growth):
                break
            growth.add(newcomer)

    def _admit(self, sequence: Sequence, step: BatchBuilder, growth: Growth) -> bool:
        if step.swap_in and len(step.swap_in) + len(sequence.swap_table) > self._most_swapped_in:
            return False
        hits = [] if sequence.swap_table else self._cached_prefix(sequence)
        start = sequence.num_computed_tokens or len(hits) * self.pool.block_size
        count = self._first_chunk(sequence.num_tokens - start, step.budget)
        missing = self.pool.blocks_for(sequence.num_tokens) - len(hits)
        from_cache = sum(1 for block_id in hits if self.pool.is_cached(block_id))
        if not count or missing + from_cache + self._headroom(sequence, growth) > self.pool.num_available:
            return False
        # Its blocks travel while others are computed; it goes on with the next step.
        count = 0 if sequence.swap_table and step.chosen else count
        for block_id in hits:
            self.pool.share(block_id)
        sequence.block_table = hits
        if not self.extend(sequence, self.pool.blocks_for(start + count) - len(hits)):
            self.pool.free(hits)
            sequence.block_table = []
            return False
        self._enter(sequence, start, step)
        if count:
            step.choose(sequence, count)
        return True

    def _enter(self, sequence: Sequence, num_computed_tokens: int, step: BatchBuilder) -> None:
        self.waiting.remove(sequence)
        if sequence.swap_table:
            step.swap_in.extend(zip(sequence.block_table, sequence.swap_table, strict=False))
            self.swap_pool.free(sequence.swap_table)
            sequence.swap_table = []
            sequence.num_registered_blocks = 0
        elif sequence.num_cached_tokens < 0:
            sequence.num_cached_tokens = num_computed_tokens
        sequence.num_computed_tokens = num_computed_tokens
        sequence.slot = self._free_slots.pop()
        sequence.status = Status.RUNNING
        insort(self.running, sequence, key=_index)

    def _cached_prefix(self, sequence: Sequence) -> list[int]:
        """Blocks that hold the beginning already; at least one token is left, since a token must come out."""
        if not self.config.enable_prefix_caching:
            return []
        count = (sequence.num_tokens - 1) // self.pool.block_size
        return self.pool.find_prefix(sequence.full_keys(count, self.pool.block_size, self.pool.hash_function))

    def _first_chunk(self, num_tokens: int, budget: int) -> int:
        """Tokens of a newcomer in this step. Without chunking a prompt goes in whole; one that grew beyond the
        budget before it was sent back could never, so that one is cut all the same."""
        if self.config.enable_chunked_prefill or num_tokens <= budget:
            return min(num_tokens, budget)
        return budget if num_tokens > self.max_num_batched_tokens else 0

    def _headroom(self, newcomer: Sequence, growth: Growth) -> int:
        """Blocks that stay free when `newcomer` is let in beside what `growth` counts, so that it is not sent back at
        once.

        Always what running prompts still lack, and a block of growth for each running sequence; each preemption of
        the newcomer adds a third of all growth to come, its own included. None when it would run alone.
        """
        if not self.running:
            return 0
        share = min(1.0, newcomer.num_preemptions / _CAREFUL_AFTER)
        total = growth.total + growth.of(newcomer)
        return growth.lacking + max(growth.soon, math.ceil(share * total))

    def register_full_blocks(self, sequence: Sequence) -> None:
        """Let others find the blocks that its computed tokens have filled, where prefixes are cached."""
        if not self.config.enable_prefix_caching:
            return
        block_size, done = self.pool.block_size, sequence.num_registered_blocks
        count = sequence.num_computed_tokens // block_size
        if count > done:
            keys = sequence.full_keys(count, block_size, self.pool.hash_function, done)
            self.pool.register_all(sequence.block_table[done:count], keys)
            sequence.num_registered_blocks = count

    def _leave(self, sequence: Sequence) -> None:
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
            self._free_slots.append(sequence.slot)
            sequence.slot = -1
        else:
            self.waiting.remove(sequence)
        self.pool.free(sequence.block_table)
        self.swap_pool.free(sequence.swap_table)
        sequence.forget_kv()

    def _check_running(self, sequence: Sequence) -> None:
        if sequence.swap_table or sequence.status is not Status.RUNNING:
            raise BlockError(f"request {sequence.request.request_id} runs but is {sequence.status.value}")
        lowest = self.pool.blocks_for(sequence.num_computed_tokens)
        if not lowest <= len(sequence.block_table) <= self.pool.blocks_for(sequence.num_tokens):
            raise BlockError(
                f"request {sequence.request.request_id} holds {len(sequence.block_table)} blocks for "
                f"{sequence.num_computed_tokens} of {sequence.num_tokens} tokens"
            )
        block_size = self.pool.block_size
        for number, block_id in enumerate(sequence.block_table):
            key = self.pool.key_of(block_id)
            if (
                key is not None
                and list(key.token_ids) != sequence.token_ids[number * block_size : (number + 1) * block_size]
            ):
                raise BlockError(f"block {block_id} is cached for other tokens than it holds")

    def _check_waiting(self, sequence: Sequence) -> None:
        swapped = sequence.status is Status.SWAPPED
        expected = self.pool.blocks_for(sequence.num_computed_tokens) if swapped else 0
        if (
            sequence.block_table
            or len(sequence.swap_table) != expected
            or (not swapped and sequence.num_computed_tokens)
        ):
            raise BlockError(f"request {sequence.request.request_id} waits but holds blocks")


class Growth:
    """Blocks that running sequences will still ask for, counted once a step and then with each that is let in.

    Attributes:
        lacking: for the tokens that they have by now.
        soon: one for each that will grow beyond those.
        total: up to their ends, beyond those.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.lacking = self.soon = self.total = 0

    def of(self, sequence: Sequence) -> int:
        """Blocks between the tokens that a sequence has and those that it may come to."""
        return self._pool.blocks_for(sequence.max_num_tokens) - self._pool.blocks_for(sequence.num_tokens)

    def add(self, sequence: Sequence) -> None:
        """Count a running sequence."""
        blocks = self.of(sequence)
        self.lacking += max(0, self._pool.blocks_for(sequence.num_tokens) - len(sequence.block_table))
        self.soon += min(1, blocks)
        self.total += blocks


def _index(sequence: Sequence) -> int:
    return sequence.index


def _refusal(needed: int, available: int, knob: str, works: int) -> DoesNotFitError:
    return DoesNotFitError(
        "the request can never run",
        needed=f"{needed} tokens",
        available=f"{available} tokens",
        works=f"a request of at most {max(0, works)} tokens, prompt and output",
        knob=knob,
    )
