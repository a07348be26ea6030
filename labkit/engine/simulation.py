"""A virtual executor and clock for deterministic simulation of the engine, without torch or a device.

The virtual cache holds, for each token slot, a number made of the token and
of the slot before it, as real KV depends on all tokens before; the next token is made of everything that the block
table leads to. A block that is shared wrongly, overwritten or lost therefore changes tokens.

`labkit.engine.fault_simulation` drives it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from labkit.engine.batch import ScheduledBatch
from labkit.engine.sampling_params import EngineRequest
from labkit.memory.records import MemoryBreakdown, MemoryPlan
from labkit.specs.engine_config import EngineConfig
from labkit.specs.gpu_spec import GpuSpec
from labkit.specs.model_spec import LayerSpec, ModelSpec

VOCAB_SIZE, EOS_TOKEN_ID = 50, 0
_MASK = 2**64 - 1


def bare_plan(model: ModelSpec, config: EngineConfig, num_gpu_blocks: int, num_swap_blocks: int = 0) -> MemoryPlan:
    """A plan of so many blocks, with no memory behind it; `config` is resolved already."""
    tokens = num_gpu_blocks * config.block_size
    return MemoryPlan(
        model=model,
        gpu=GpuSpec(name="virtual", total_bytes=0, origin="cpu"),
        config=config,
        engine="labkit",
        engine_version="",
        breakdown=MemoryBreakdown(kind="simulated", total_bytes=0),
        block_bytes=0,
        num_gpu_blocks=num_gpu_blocks,
        num_swap_blocks=num_swap_blocks,
        kv_cache_tokens=tokens,
        max_concurrency=tokens / max(1, int(config.max_model_len or 1)),
        max_model_len_that_fits=tokens,
        verdict="fits",
        margin_bytes=0,
        binding_limit="num_gpu_blocks_override",
        formulas={},
    )


def virtual_model() -> ModelSpec:
    """A model of which only the vocabulary and the end token matter."""
    layer = LayerSpec(kind="full", num_heads=1, num_kv_heads=1, head_dim=1)
    return ModelSpec(
        name="virtual",
        architecture="",
        model_type="",
        layers=(layer,),
        hidden_size=1,
        intermediate_size=1,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=2**20,
        eos_token_ids=(EOS_TOKEN_ID,),
    )


def _mix(value: int, token_id: int) -> int:
    value = (value * 6364136223846793005 + token_id * 1442695040888963407 + 88172645463325252) & _MASK
    value ^= value >> 29
    return (value * 0xBF58476D1CE4E5B9) & _MASK


def _next_token(context_sum: int) -> int:
    return (_mix(context_sum, 7) >> 33) % VOCAB_SIZE


def reference_tokens(request: EngineRequest, num_tokens: int) -> list[int]:
    """The first `num_tokens` output tokens of the virtual model, from a plain loop without cache."""
    value = total = 0
    for token_id in request.prompt_token_ids:
        value = _mix(value, token_id)
        total = (total + value) & _MASK
    output: list[int] = []
    while len(output) < num_tokens:
        output.append(_next_token(total))
        value = _mix(value, output[-1])
        total = (total + value) & _MASK
    return output


class VirtualExecutor:
    """An `Executor` without torch or device; time passes only when it computes.

    Attributes:
        now_s: the virtual time; pass `clock` as the engine's clock.
        before_step: called first; may raise.
        half_way: called when half of the sequences are computed; may raise.
        watch_write: called with each block that is about to be written.
    """

    def __init__(self, plan: MemoryPlan) -> None:
        self.now_s = 0.0
        self.before_step: Callable[[], None] = lambda: None
        self.half_way: Callable[[], None] = lambda: None
        self.watch_write: Callable[[int], None] = lambda block_id: None
        self.reconfigure(plan)

    def clock(self) -> float:
        """Virtual seconds."""
        return self.now_s

    def reconfigure(self, plan: MemoryPlan) -> None:
        """See `Executor.reconfigure`; new memory holds garbage."""
        self._block_size = plan.config.block_size
        garbage = np.uint64(0xDEADBEEFDEADBEEF)
        self._pool = np.full((plan.num_gpu_blocks, self._block_size), garbage)
        self._host = np.full((plan.num_swap_blocks, self._block_size), garbage)

    def execute(self, batch: ScheduledBatch) -> list[int]:
        """See `Executor.execute`."""
        self.before_step()
        for block_id, host_id in batch.swap_out:
            self._host[host_id] = self._pool[block_id]
        for block_id, host_id in batch.swap_in:
            self._pool[block_id] = self._host[host_id]
        tokens = []
        for row in range(len(batch.sequences)):
            if row == len(batch.sequences) // 2:
                self.half_way()
            self._write(batch, row)
            if batch.samples[row]:
                context = self._pool[batch.block_tables[row]].ravel()[: batch.seq_lens[row]]
                tokens.append(_next_token(int(context.sum(dtype=np.uint64))))
        self.now_s += 0.001 + 1e-5 * batch.num_tokens
        return tokens

    def memory_parts(self) -> dict[str, int]:
        """See `Executor.memory_parts`."""
        return {"kv_cache": self._pool.nbytes}

    def close(self) -> None:
        """See `Executor.close`."""

    def _write(self, batch: ScheduledBatch, row: int) -> None:
        table, size = batch.block_tables[row], self._block_size
        start, stop = batch.query_starts[row], batch.query_starts[row + 1]
        position = batch.positions[start]
        value = int(self._pool[table[(position - 1) // size], (position - 1) % size]) if position else 0
        for number in sorted({position // size for position in batch.positions[start:stop]}):
            self.watch_write(table[number])
        for index in range(start, stop):
            value = _mix(value, batch.token_ids[index])
            position = batch.positions[index]
            self._pool[table[position // size], position % size] = value
