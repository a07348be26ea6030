"""`VllmScheduler`: the same books under the rules of vLLM's V1 scheduler, for predicting a vLLM server.

Where they differ from labkit's: a running prompt takes all of the budget that is left; preemption always computes
anew; a request that comes back runs behind the others and so is the next to go; a newcomer is let in when its whole
known length fits beside the prompts that are under way (vLLM 0.18 and later, `--scheduler-reserve-full-isl`; before,
when its next chunk does), with no room kept for growth (`--watermark` is 0 by default).
"""

from __future__ import annotations

from collections.abc import Callable

from labkit.engine.batch import BatchBuilder
from labkit.engine.block_pool import HashFunction, block_hash
from labkit.engine.scheduler import Growth, Scheduler
from labkit.engine.sequence import Sequence
from labkit.memory.records import MemoryPlan
from labkit.memory.rules import parse_version

_RESERVES_SINCE = (0, 18, 0)


class VllmScheduler(Scheduler):
    """See the module; arguments as `Scheduler`, the version from `plan.engine_version`."""

    def __init__(
        self,
        plan: MemoryPlan,
        *,
        on_finish: Callable[[Sequence], None] | None = None,
        hash_function: HashFunction = block_hash,
    ) -> None:
        super().__init__(plan, on_finish=on_finish, hash_function=hash_function)
        version = plan.engine_version or "0.33.0"
        self._reserves_whole_prompt = parse_version(version) >= _RESERVES_SINCE

    def _continue_running(self, step: BatchBuilder) -> None:
        position = 0
        while position < len(self.running) and step.budget > 0:
            sequence = self.running[position]
            count = min(sequence.num_tokens_to_compute, step.budget)
            if self._grow(sequence, sequence.num_computed_tokens + count, step):
                step.choose(sequence, count)
            if position < len(self.running) and self.running[position] is sequence:
                position += 1

    def _headroom(self, newcomer: Sequence, growth: Growth) -> int:
        if self._reserves_whole_prompt:
            return growth.lacking
        # Only the next chunk must fit; what the caller asks for is the whole, so the rest is given back.
        rest = newcomer.num_tokens - max(newcomer.num_computed_tokens, 0) - self.max_num_batched_tokens
        return -self.pool.blocks_for(max(0, rest))

    def _enter(self, sequence: Sequence, num_computed_tokens: int, step: BatchBuilder) -> None:
        super()._enter(sequence, num_computed_tokens, step)
        self.running.remove(sequence)
        self.running.append(sequence)
