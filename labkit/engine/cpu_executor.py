"""`CpuExecutor`: steps on a CPU with torch: swap, forward over the paged cache, sample."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from labkit.engine.batch import ScheduledBatch
from labkit.engine.kv_cache import BlockRun, KVCache
from labkit.engine.memory_meter import activation_peak_bytes
from labkit.engine.paged_attention import PagedAttention, Span
from labkit.engine.sampler import sample
from labkit.errors import LabkitError
from labkit.memory.labkit_rules import model_of_rank
from labkit.memory.records import MemoryPlan
from labkit.models.decoder import Decoder


class BlockTables:
    """The block table of each running sequence as a row of one array, kept up to date between steps.

    Args:
        num_rows: sequences that may run at once.
        max_blocks_per_seq: blocks of the longest one.
    """

    def __init__(self, num_rows: int, max_blocks_per_seq: int) -> None:
        self.array = torch.zeros(num_rows, max_blocks_per_seq, dtype=torch.int32)
        self._view = self.array.numpy()
        self._sources: list[list[int] | None] = [None] * num_rows
        self._lengths = [0] * num_rows
        self._is_run = [True] * num_rows

    def update(self, row: int, block_table: list[int]) -> np.ndarray:
        """Write what is new of `block_table` and return the row's entries, [len(block_table)] int32."""
        # A sequence that comes back has another list object: tables only grow, and never change otherwise.
        if self._sources[row] is not block_table:
            self._sources[row], self._lengths[row], self._is_run[row] = block_table, 0, True
        start, stop = self._lengths[row], len(block_table)
        if start < stop:
            self._view[row, start:stop] = block_table[start:]
            tail = block_table[max(0, start - 1) :]
            ascending = all(after - before == 1 for before, after in pairwise(tail))
            self._is_run[row] = self._is_run[row] and ascending
            self._lengths[row] = stop
        return self._view[row, :stop]

    def run(self, row: int, num_tokens: int) -> BlockRun:
        """How to read the row's sequence."""
        entries = self._view[row, : self._lengths[row]]
        block_ids = None if self._is_run[row] else torch.from_numpy(entries.astype(np.int64))
        return BlockRun(int(entries[0]), len(entries), num_tokens, block_ids)


@dataclass(frozen=True)
class _Allocated:
    """What an executor allocates for one plan."""

    plan: MemoryPlan
    cache: KVCache
    tables: BlockTables
    attention: PagedAttention


class CpuExecutor:
    """Owns KV cache, tables and attention of one engine; borrows the decoder.

    Memory, all allocated at construction but the activations:
        Weights: the decoder's tensors and its rotary tables, which grow to max_model_len positions.
        KV pool: num_gpu_blocks · block_bytes, exactly `KVCache.pool_bytes`.
        Host pool: num_swap_blocks · block_bytes, beside the budget.
        Block tables: 4 bytes · max_num_seqs · blocks of the longest sequence.
        Workspace: the gather scratch, `KVCache.scratch_bytes`.
        Activation: the peak of a step's temporaries, metered when `memory_parts` is first asked for under a plan.

    Raises:
        DoesNotFitError: the host has no room for the swap blocks.
    """

    def __init__(self, decoder: Decoder, plan: MemoryPlan) -> None:
        self._decoder = decoder
        self._activation_bytes: int | None = None
        self._allocated: _Allocated | None = _allocate(decoder, plan)

    def reconfigure(self, plan: MemoryPlan) -> None:
        """See `Executor.reconfigure`; the old pool goes before the new one comes."""
        self._allocated = self._activation_bytes = None
        self._allocated = _allocate(self._decoder, plan)

    @torch.inference_mode()
    def execute(self, batch: ScheduledBatch) -> list[int]:
        """See `Executor.execute`."""
        memory = self._memory()
        memory.cache.swap(batch.swap_out, batch.swap_in)
        if not batch.sequences:
            return []
        hidden = self.hidden_states(batch)
        chosen = [row for row, samples in enumerate(batch.samples) if samples]
        if not chosen:
            return []
        last_rows = torch.tensor([batch.query_starts[row + 1] - 1 for row in chosen])
        logits = self._decoder.logits(hidden.index_select(0, last_rows))
        return sample(logits, [batch.sequences[row] for row in chosen])

    @torch.inference_mode()
    def hidden_states(self, batch: ScheduledBatch) -> torch.Tensor:
        """What the final norm gives for each token of `batch`, `[T, hidden_size]`; nothing is sampled."""
        memory = self._memory()
        _begin(memory, batch)
        return self._decoder.forward(torch.tensor(batch.token_ids), torch.tensor(batch.positions), memory.attention)

    def memory_parts(self) -> dict[str, int]:
        """See `Executor.memory_parts`."""
        memory = self._memory()
        if self._activation_bytes is None:
            self._activation_bytes = activation_peak_bytes(self._decoder, memory.plan)
        return {
            "weights": self._decoder.num_bytes + self._decoder.table_bytes,
            "kv_cache": memory.cache.pool_bytes,
            "block_tables": memory.tables.array.nbytes,
            "activation": self._activation_bytes,
            "workspace": memory.cache.scratch_bytes,
        }

    def close(self) -> None:
        """See `Executor.close`."""
        self._allocated = None

    def _memory(self) -> _Allocated:
        if self._allocated is None:
            raise LabkitError("the engine is closed, or its last reconfiguration failed", works="a new engine")
        return self._allocated


def _allocate(decoder: Decoder, plan: MemoryPlan) -> _Allocated:
    config = plan.config
    decoder.reserve_positions(int(config.max_model_len or 0))
    max_blocks = min(-(-int(config.max_model_len or 0) // config.block_size), plan.num_gpu_blocks)
    spec = model_of_rank(plan.model, decoder.tp_size)
    cache = KVCache(
        spec,
        num_blocks=plan.num_gpu_blocks,
        num_swap_blocks=plan.num_swap_blocks,
        block_size=config.block_size,
        kv_cache_dtype=config.kv_cache_dtype,
        dtype=decoder.dtype,
        max_blocks_per_seq=max_blocks,
    )
    tables = BlockTables(int(config.max_num_seqs or 0), max_blocks)
    return _Allocated(plan, cache, tables, PagedAttention(spec, cache))


def _begin(memory: _Allocated, batch: ScheduledBatch) -> None:
    """Bring the tables up to date and tell attention who owns which rows."""
    block_size = memory.cache.block_size
    positions = np.array(batch.positions, dtype=np.int64)
    slots = positions % block_size
    numbers = positions // block_size
    spans = []
    for row, slot in enumerate(batch.slots):
        start, stop = batch.query_starts[row], batch.query_starts[row + 1]
        entries = memory.tables.update(slot, batch.block_tables[row])
        slots[start:stop] += entries[numbers[start:stop]].astype(np.int64) * block_size
        spans.append(Span(start, stop, memory.tables.run(slot, batch.seq_lens[row])))
    memory.attention.begin(spans, torch.from_numpy(slots))
