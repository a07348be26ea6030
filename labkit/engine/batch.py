"""`ScheduledBatch`: the work of one step as plain arrays, the only thing an executor gets to see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from labkit.engine.sequence import Sequence
from labkit.memory.records import MemoryPlan

Clock = Callable[[], float]


@dataclass(frozen=True)
class ScheduledBatch:
    """What one step computes. B sequences, T tokens; sequence i owns rows query_starts[i] … query_starts[i+1]-1.

    Attributes:
        sequences: the B sequences, oldest first; executors read them (sampling, seed, tokens) and change nothing.
        token_ids: [T] input tokens.
        query_starts: [B + 1] first row of each sequence, then T.
        seq_lens: [B] tokens in the cache when the step is done.
        block_tables: [B] lists of block ids that cover seq_lens tokens.
        slots: [B] row of each sequence in tables that an executor keeps between steps.
        samples: [B] whether the step reaches the end of what is known, so that a token comes out.
        swap_out, swap_in: (block, host block) pairs to copy before anything is computed, out before in. What comes in
            for a sequence that is not in this step may take until the next one.
        num_prefill_tokens, num_decode_tokens: T in two parts; a row is decode when it is a sequence's only one and
            that sequence has output already.
        num_preemptions: sequences sent back while this step was put together.
    """

    sequences: tuple[Sequence, ...] = ()
    token_ids: list[int] = field(default_factory=list)
    query_starts: list[int] = field(default_factory=lambda: [0])
    seq_lens: list[int] = field(default_factory=list)
    block_tables: list[list[int]] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    samples: list[bool] = field(default_factory=list)
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_preemptions: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return len(self.token_ids)

    @cached_property
    def positions(self) -> list[int]:
        """[T] positions of the input tokens."""
        rows = zip(self.query_starts, self.query_starts[1:], self.seq_lens, strict=False)
        return [position for start, stop, end in rows for position in range(end - (stop - start), end)]


class Executor(Protocol):
    """Computes steps: on a CPU with torch, on a GPU with kernels and graphs, or on a virtual clock with neither."""

    def execute(self, batch: ScheduledBatch) -> list[int]:
        """One token for each True in `batch.samples`, in that order."""
        ...

    def reconfigure(self, plan: MemoryPlan) -> None:
        """Drop pool and tables, and allocate those of `plan`; weights stay."""
        ...

    def memory_parts(self) -> dict[str, int]:
        """Measured bytes by part, names as in `labkit.memory.records.PARTS`."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


class BatchBuilder:
    """Collects one step; `build` freezes it."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.chosen: list[tuple[Sequence, int]] = []
        self.swap_out: list[tuple[int, int]] = []
        self.swap_in: list[tuple[int, int]] = []
        self.num_preemptions = 0

    def choose(self, sequence: Sequence, num_new_tokens: int) -> None:
        """Let `sequence` advance by `num_new_tokens`."""
        self.chosen.append((sequence, num_new_tokens))
        self.budget -= num_new_tokens

    def build(self) -> ScheduledBatch:
        """The step, oldest sequence first."""
        self.chosen.sort(key=lambda entry: entry[0].index)
        num_decode_tokens = sum(1 for sequence, count in self.chosen if count == 1 and sequence.num_output_tokens)
        batch = ScheduledBatch(
            sequences=tuple(sequence for sequence, _ in self.chosen),
            swap_out=self.swap_out,
            swap_in=self.swap_in,
            num_preemptions=self.num_preemptions,
            num_decode_tokens=num_decode_tokens,
            num_prefill_tokens=sum(count for _, count in self.chosen) - num_decode_tokens,
        )
        for sequence, count in self.chosen:
            _add_rows(batch, sequence, count)
        return batch


def _add_rows(batch: ScheduledBatch, sequence: Sequence, count: int) -> None:
    start = sequence.num_computed_tokens
    batch.token_ids.extend(sequence.token_ids[start : start + count])
    batch.query_starts.append(len(batch.token_ids))
    batch.seq_lens.append(start + count)
    batch.block_tables.append(sequence.block_table)
    batch.slots.append(sequence.slot)
    batch.samples.append(start + count == sequence.num_tokens)
