"""Tensor parallelism: rank 0 schedules, and a small message has the other ranks compute the same step.

What is scheduled depends on the clock, on Cancel and on the tokens themselves, so that one process decides, as in vLLM.
A message holds the step's new tokens, lengths and slots, and what is new of the block tables. Tokens are chosen by
rank 0 alone; the others compute the same launches and take its tokens, so that no rounding can part them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import accumulate, pairwise
from typing import Any, Protocol

from labkit.engine.batch import Executor, ScheduledBatch
from labkit.engine.sampling_params import EngineRequest, SamplingParams
from labkit.engine.sequence import Sequence
from labkit.errors import DoesNotFitError, LabkitError
from labkit.memory.records import MemoryPlan
from labkit.models.ranks import Ranks


class OtherRanks(Protocol):
    """The processes beside rank 0, as its executor needs them."""

    def configure(self, how: str, plan: MemoryPlan | None, here: Callable[[], None]) -> None:
        """Have every rank make ("new"), change ("change") or give up ("drop") its executor, and do so `here`.

        Raises:
            LabkitError: what went wrong on this rank or another.
        """
        ...

    def send(self, message: dict[str, Any]) -> None:
        """Have every other rank compute the step of `message`; does not wait for it."""
        ...

    def computing(self) -> AbstractContextManager[None]:
        """Around what waits for the other ranks; an error inside ends them, as nobody knows where they stand.

        Raises:
            RankError: from inside, with the first cause.
        """
        ...

    def memory_parts(self, here: Callable[[], dict[str, int]]) -> list[dict[str, int]]:
        """`Executor.memory_parts` of every rank, rank 0 first, all measured at once."""
        ...


class RankedExecutor:
    """The executor of rank 0; see `Executor`.

    Args:
        others: the other ranks.
        make: the executor of this rank.
        plan: resolved configuration.
    """

    def __init__(self, others: OtherRanks, make: Callable[[MemoryPlan], Executor], plan: MemoryPlan) -> None:
        self._others = others
        self._make = make
        self._made: Executor | None = None
        self._configure("new", plan)

    @property
    def plan(self) -> MemoryPlan:
        """The plan with the blocks that every rank has allocated."""
        return getattr(self._made, "plan", self._plan)

    @property
    def why_eager(self) -> str:
        """See `CudaExecutor.why_eager`."""
        return getattr(self._made, "why_eager", "")

    def execute(self, batch: ScheduledBatch) -> list[int]:
        """See `Executor.execute`."""
        with self._others.computing():
            self._others.send(self._writer.message(batch))
            return self._local.execute(batch)

    def reconfigure(self, plan: MemoryPlan) -> None:
        """See `Executor.reconfigure`."""
        self._configure("change", plan)

    def memory_parts(self) -> dict[str, int]:
        """See `Executor.memory_parts`; those of the rank that holds most."""
        return max(self.rank_memory_parts(), key=lambda parts: sum(parts.values()))

    def rank_memory_parts(self) -> list[dict[str, int]]:
        """The measured parts of every rank, rank 0 first."""
        return self._others.memory_parts(self._local.memory_parts)

    def close(self) -> None:
        """See `Executor.close`."""
        self._others.configure("drop", None, self._drop)

    @property
    def _local(self) -> Executor:
        if self._made is None:
            raise LabkitError("the engine is closed, or its last reconfiguration failed", works="a new engine")
        return self._made

    def _configure(self, how: str, plan: MemoryPlan) -> None:
        """On all ranks or on none."""
        self._plan, self._writer = plan, StepWriter()

        def here() -> None:
            if self._made is None:
                self._made = self._make(plan)
            else:
                self._made.reconfigure(plan)

        try:
            self._others.configure(how, plan, here)
        except BaseException:
            self._drop()
            raise

    def _drop(self) -> None:
        if self._made is not None:
            self._made.close()
        self._made = None


class OverlappedRankedExecutor(RankedExecutor):
    """The same where the executors of the ranks can queue a step before the last one has ended."""

    def submit(self, batch: ScheduledBatch) -> Any:
        """See `CudaExecutor.submit`."""
        with self._others.computing():
            self._others.send(self._writer.message(batch))
            return self._local.submit(batch)  # type: ignore[attr-defined]

    def collect(self, pending: Any) -> list[int]:
        """See `CudaExecutor.collect`."""
        with self._others.computing():
            return self._local.collect(pending)  # type: ignore[attr-defined]

    @property
    def times(self) -> Any:
        """See `CudaExecutor.times`; of rank 0."""
        return self._local.times  # type: ignore[attr-defined]

    @times.setter
    def times(self, times: Any) -> None:
        self._local.times = times  # type: ignore[attr-defined]


class StepWriter:
    """Steps as messages: plain lists of numbers; what is as in the last step is left out, and of block tables what was
    sent before."""

    def __init__(self) -> None:
        self._sequences: tuple[Sequence, ...] | None = None
        self._last: dict[str, Any] = {}
        self._sent: dict[int, tuple[list[int], int]] = {}

    def message(self, batch: ScheduledBatch) -> dict[str, Any]:
        """The message of one step; each is to be read, in order."""
        rows: dict[str, Any] = {
            "counts": [stop - start for start, stop in pairwise(batch.query_starts)],
            "slots": batch.slots,
            "samples": batch.samples,
            "token_ids": batch.token_ids,
            "swap_out": batch.swap_out,
            "swap_in": batch.swap_in,
        }
        if batch.sequences != self._sequences:
            self._sequences = batch.sequences
            rows["indices"] = [sequence.index for sequence in batch.sequences]
            rows["penalized"] = [
                row for row, entry in enumerate(batch.sequences) if entry.request.sampling.repetition_penalty != 1.0
            ]
        other = {name: value for name, value in rows.items() if self._last.get(name) != value}
        self._last |= other
        tables = [self._news(row, slot, batch.block_tables[row]) for row, slot in enumerate(batch.slots)]
        new_tables = [news for news in tables if news is not None]
        return {"type": "step", "seq_lens": batch.seq_lens, "tables": new_tables, **other}

    def _news(self, row: int, slot: int, table: list[int]) -> list[int] | None:
        """Row, whether the table is another one than before (they only grow), and the entries that are new."""
        source, length = self._sent.get(slot, (None, 0))
        if source is table and length == len(table):
            return None
        is_other = source is not table
        self._sent[slot] = (table, len(table))
        return [row, int(is_other), *(table if is_other else table[length:])]


class StepReader:
    """Makes steps of a `StepWriter`'s messages; the sequences stand for those of rank 0 and know no tokens."""

    def __init__(self) -> None:
        self._last: dict[str, Any] = {}
        self._sequences: dict[int, Sequence] = {}
        self._tables: dict[int, list[int]] = {}

    def batch(self, message: dict[str, Any]) -> ScheduledBatch:
        """The step of `message`."""
        self._last |= message
        rows = self._last
        slots, counts, seq_lens = rows["slots"], rows["counts"], rows["seq_lens"]
        for row, is_other, *entries in message["tables"]:
            if is_other:
                self._tables[slots[row]] = entries
            else:
                self._tables[slots[row]].extend(entries)
        penalized = set(rows["penalized"])
        return ScheduledBatch(
            sequences=tuple(
                self._sequence(slot, index, row in penalized)
                for row, (slot, index) in enumerate(zip(slots, rows["indices"], strict=True))
            ),
            token_ids=rows["token_ids"],
            query_starts=[0, *accumulate(counts)],
            seq_lens=seq_lens,
            block_tables=[self._tables[slot] for slot in slots],
            slots=slots,
            samples=rows["samples"],
            swap_out=[(block, host) for block, host in rows["swap_out"]],
            swap_in=[(block, host) for block, host in rows["swap_in"]],
        )

    def _sequence(self, slot: int, index: int, is_penalized: bool) -> Sequence:
        sequence = self._sequences.get(slot)
        if sequence is None or sequence.index != index:
            # A penalty decides how a step is launched, not what comes of it here.
            sampling = SamplingParams(repetition_penalty=2.0 if is_penalized else 1.0)
            sequence = Sequence(EngineRequest(index, (0,), sampling), index, 0, 1)
            self._sequences[slot] = sequence
        return sequence


def agreed_blocks(ranks: Ranks, count: Callable[[], tuple[int, int]]) -> tuple[int, int]:
    """What `count` gives, blocks and bytes of their memory, with the smallest number of blocks of any rank.

    Raises:
        DoesNotFitError: no block fits on this rank or on another; all ranks raise.
    """
    if ranks.size == 1:
        return count()
    try:
        blocks, num_bytes = count()
    except LabkitError:
        ranks.smallest(0)
        raise
    blocks = ranks.smallest(blocks)
    if blocks < 1:
        raise DoesNotFitError("another card that shares the model has no KV block left", knob="gpu_memory_utilization")
    return blocks, num_bytes
