"""`CudaExecutor`: steps on a card: one copy in, kernels or a captured graph, sampling on the device, one copy back.

It runs on CPU tensors too when Triton interprets its kernels, eagerly and slowly; that is how it is tested without a
card.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from labkit_kernels.sampling import sample

from labkit.engine.batch import ScheduledBatch
from labkit.engine.cuda_attention import AttentionRows, CudaAttention
from labkit.engine.cuda_cache import CacheFormat, CudaKVCache, cache_format
from labkit.engine.cuda_forward import Forward, FusedForward, make_forward, why_eager
from labkit.engine.cuda_graphs import StepGraphs, capture_stream
from labkit.engine.cuda_inputs import (
    SlotTables,
    Staging,
    StepTensors,
    arrange,
    owners_of,
    padding_step,
    rows_in_order,
    shape_of,
)
from labkit.engine.cuda_memory import StepCosts, give_back, in_room, look_at, pool_of, with_blocks
from labkit.engine.cuda_profile import PROMPT_SIZES, decode_sizes, prompt_step
from labkit.engine.cuda_swap import SwapTimes
from labkit.engine.sampler import penalize
from labkit.engine.sequence import Sequence
from labkit.engine.tensor_parallel import agreed_blocks
from labkit.errors import LabkitError
from labkit.format import GIB
from labkit.memory.card_parts import captures_largest, card_constants, padded_tokens
from labkit.memory.records import MemoryPlan
from labkit.memory.step_shapes import MANY_PROMPTS, StepShape, graph_shapes
from labkit.models.decoder import Decoder
from labkit.models.linear import project
from labkit.specs.model_spec import LayerSpec

# What can change without touching memory: only the scheduler reads it.
_SCHEDULING_KNOBS = frozenset({"enable_chunked_prefill", "enable_prefix_caching", "preemption_mode"})


@dataclass
class _Allocated:
    """What an executor allocates for one plan."""

    cache: CudaKVCache
    tables: SlotTables
    staging: Staging
    attention: CudaAttention
    forward: Forward
    last_tokens: torch.Tensor
    results: list[torch.Tensor]
    graphs: StepGraphs | None = None
    graphs_bytes: int = 0

    @property
    def tables_bytes(self) -> int:
        """Device bytes of block tables, inputs, the decode kernel's scratch and the fused kernels' rotary tables."""
        rotary = self.forward.num_bytes if isinstance(self.forward, FusedForward) else 0
        scratch = self.attention.num_bytes + rotary
        return self.tables.device.nbytes + self.staging.num_bytes + self.last_tokens.nbytes + scratch


@dataclass(frozen=True)
class PendingStep:
    """A step that the device computes: where its tokens will be, and in which order.

    Attributes:
        tokens: int64, on the host once `done` has happened.
        rows: for each token that the batch asked for, its index in `tokens`.
        done: None where there is no device to wait for.
    """

    tokens: torch.Tensor
    rows: list[int]
    done: torch.cuda.Event | None


@dataclass
class _Measured:
    """What was measured once and holds for later plans too."""

    costs: dict[tuple, StepCosts] = field(default_factory=dict)
    warm_shapes: set[tuple] = field(default_factory=set)
    outside_bytes: int = 0
    seen_bytes: int = 0
    library_bytes: int = 0


class CudaExecutor:
    """Owns KV cache, tables, graphs and attention of one engine; borrows the decoder.

    The pool takes what is left of the budget: utilization of the card's total, less weights, tables, the peak of the
    largest step and the graphs, each measured. `plan` is then the given one with the blocks that were allocated.

    Attributes:
        why_eager: why this model's steps are never captured; "" where they are.
        budget_parts: bytes by part that were taken off the budget before the pool, as measured until then.
        times: a list to which each step adds the events of its begin and end on the device; None adds nothing.

    Args:
        decoder: on the card, with plain (not packed) weights.
        plan: resolved configuration.

    Raises:
        DoesNotFitError: the card does not have the budget free, or no block fits.
        UnsupportedError: layers or a KV type that the kernels lack.
    """

    def __init__(self, decoder: Decoder, plan: MemoryPlan) -> None:
        self._decoder = decoder
        self._device = decoder.device
        self._on_card = self._device.type == "cuda"
        self._measured = _Measured()
        self._stream = capture_stream(self._device) if self._on_card else None
        self._allocated: _Allocated | None = None
        self._turn = 0
        self.why_eager = why_eager(decoder)
        self.budget_parts: dict[str, int] = {}
        self.times: list[tuple[torch.cuda.Event, torch.cuda.Event]] | None = None
        if self._on_card:
            torch.cuda.set_device(self._device)
            self._measured.outside_bytes = look_at(self._device).other_bytes
        self._asked = plan
        self.plan = plan
        in_room(plan, self._device, lambda: self._allocate(plan, []))

    def reconfigure(self, plan: MemoryPlan) -> None:
        """See `Executor.reconfigure`; memory is touched only when a knob of memory changed."""
        changed = set(plan.config.differences(self._asked.config)) - _SCHEDULING_KNOBS
        if self._allocated is not None and not changed and plan.model == self._asked.model:
            self._asked = plan
            self.plan = with_blocks(
                plan, self._allocated.cache.form, self._allocated.cache.num_blocks, self.plan.num_swap_blocks
            )
            return
        self._note_other_programs()
        spare = self._drop()
        self._asked = plan
        in_room(plan, self._device, lambda: self._allocate(plan, spare))

    def execute(self, batch: ScheduledBatch) -> list[int]:
        """See `Executor.execute`."""
        return self.collect(self.submit(batch))

    @torch.inference_mode()
    def submit(self, batch: ScheduledBatch) -> PendingStep:
        """Queue a step without waiting; a negative token id stands for the last token of that sequence's slot."""
        memory = self._memory()
        memory.cache.swap(batch.swap_out, batch.swap_in, now=_reads_what_comes(batch))
        if not batch.sequences:
            return PendingStep(torch.empty(0, dtype=torch.int64), [], None)
        _bring_tables(memory, batch)
        penalized = [entry for entry in batch.sequences if entry.request.sampling.repetition_penalty != 1.0]
        shape = None if memory.graphs is None or penalized else memory.graphs.shape_for(shape_of(batch))
        step = arrange(batch, memory.tables, memory.cache.form.block_size, shape)
        started = None if self.times is None else torch.cuda.Event(enable_timing=True)
        if started is not None:
            started.record()
        tensors = memory.staging.send(step)
        if shape is not None:
            tokens = memory.graphs.replay(shape)  # type: ignore[union-attr]
        else:
            tokens = self._compute(memory, tensors, owners_of(step, batch) if penalized else [])
        return self._send_back(memory, tokens, rows_in_order(step, batch), started)

    @torch.inference_mode()
    def hidden_states(self, batch: ScheduledBatch) -> torch.Tensor:
        """What the final norm gives for each token of `batch`, `[T, hidden_size]` in its order; nothing is sampled."""
        memory = self._memory()
        _bring_tables(memory, batch)
        step = arrange(batch, memory.tables, memory.cache.form.block_size)
        hidden = self._hidden(memory, memory.staging.send(step))
        counts = np.diff(batch.query_starts)
        placed = np.argsort(np.repeat(counts != 1, counts), kind="stable")
        return hidden.index_select(0, torch.from_numpy(np.argsort(placed)).to(self._device))

    def collect(self, pending: PendingStep) -> list[int]:
        """Wait for a step and return its tokens as `execute` does."""
        if pending.done is not None:
            pending.done.synchronize()
        values = pending.tokens.tolist()
        return [values[row] for row in pending.rows]

    def time_swaps(self, times: SwapTimes | None) -> None:
        """Have the events of swapped blocks' copies added to `times`, until the plan changes; see `SwapLane`."""
        self._memory().cache.time_swaps(times)

    def memory_parts(self) -> dict[str, int]:
        """See `Executor.memory_parts`."""
        memory = self._memory()
        costs = self._measured.costs.get(self._shape_key(self._asked), StepCosts())
        return {
            "weights": self._weights_bytes,
            "kv_cache": memory.cache.pool_bytes,
            "block_tables": memory.tables_bytes,
            "activation": costs.activation_bytes,
            "cuda_graphs": memory.graphs_bytes,
            "workspace": self._workspace_bytes(memory.graphs_bytes) + memory.cache.staged_bytes,
            "outside": self._measured.outside_bytes,
        }

    @torch.inference_mode()
    def attention_reads(self, sequences: list[Sequence]) -> list[Callable[[], torch.Tensor]]:
        """For each layer a call that launches its attention over what decoding `sequences` have in the cache, with
        made-up queries; it writes nothing there. Valid until the next step."""
        memory, device = self._memory(), self._device
        tables = [torch.tensor(sequence.block_table, dtype=torch.int32) for sequence in sequences]
        lengths = [sequence.num_computed_tokens for sequence in sequences]
        memory.attention.begin(
            AttentionRows(
                slot_mapping=torch.empty(0, dtype=torch.int64, device=device),
                decode_lens=torch.tensor(lengths, dtype=torch.int32).to(device),
                decode_tables=torch.nn.utils.rnn.pad_sequence(tables, batch_first=True).to(device),
            )
        )

        def read_of(index: int, layer: LayerSpec) -> Callable[[], torch.Tensor]:
            shape = (len(sequences), layer.num_heads // self._decoder.tp_size, layer.head_dim)
            q = torch.randn(shape, dtype=self._decoder.dtype, device=device)
            return lambda: memory.attention.read(index, q)

        return [read_of(index, layer) for index, layer in enumerate(self._decoder.spec.layers)]

    def close(self) -> None:
        """See `Executor.close`."""
        self._drop()
        gc.collect()
        give_back(self._device)

    def _note_other_programs(self) -> None:
        """What came or went outside torch since memory was last set up is theirs: steps take next to nothing there."""
        if self._on_card and self._allocated is not None:
            self._measured.outside_bytes += look_at(self._device).other_bytes - self._measured.seen_bytes

    def _drop(self) -> list[torch.Tensor]:
        """Give up the last plan's memory, all but what its pool lay in; without graphs it is in no cycle."""
        if self._allocated is None:
            return []
        self._allocated.graphs = None
        self._allocated.cache.finish_swaps()
        spare = [self._allocated.cache.memory]
        self._allocated = None
        return spare

    @property
    def _weights_bytes(self) -> int:
        return self._decoder.num_bytes + self._decoder.table_bytes

    def _memory(self) -> _Allocated:
        if self._allocated is None:
            raise LabkitError("the engine is closed, or its last reconfiguration failed", works="a new engine")
        return self._allocated

    def _workspace_bytes(self, graphs_bytes: int = 0) -> int:
        """What libraries hold: inside torch (their workspaces), and outside it since the engine began."""
        if not self._on_card:
            return 0
        grown = look_at(self._device).other_bytes - self._measured.outside_bytes - graphs_bytes
        return self._measured.library_bytes + max(0, grown)

    @torch.inference_mode()
    def _allocate(self, plan: MemoryPlan, spare: list[torch.Tensor]) -> None:
        """`spare` holds the last pool's memory until it is known whether the new one takes the same."""
        config, decoder = plan.config, self._decoder
        decoder.reserve_positions(int(config.max_model_len or 0))
        form = cache_format(plan.model, config.block_size, config.kv_cache_dtype, decoder.dtype, decoder.tp_size)
        self.plan, pool_bytes = with_blocks(plan, form, plan.num_gpu_blocks, plan.num_swap_blocks), None
        if self._on_card:
            if self._shape_key(plan) not in self._measured.costs:
                spare.clear()
            give_back(self._device)
            costs = self._costs(plan, form)
            # Kernels are loaded when they are first launched, some of them after the pool is taken.
            workspace = max(self._workspace_bytes(), self._measured.library_bytes + card_constants().modules_bytes)
            workspace += form.staged_bytes(_swap_blocks(plan, form))
            self.budget_parts = {
                "weights": self._weights_bytes, "block_tables": costs.tables_bytes,
                "activation": costs.activation_bytes, "cuda_graphs": costs.graphs_bytes, "workspace": workspace,
            }  # fmt: skip
            card, mine = look_at(self._device), self._weights_bytes + self._measured.library_bytes
            facts = {"weights": self._weights_bytes, "workspace": workspace}
            facts["others"] = max(0, card.allocated_bytes - mine - sum(pool.nbytes for pool in spare))
            num_blocks, pool_bytes = agreed_blocks(decoder.ranks, lambda: pool_of(plan, form, card, costs, **facts))
            self.plan = with_blocks(plan, form, num_blocks, _swap_blocks(plan, form))
        memory = self._build(self.plan, self._pool_memory(form, pool_bytes, spare))
        if self._on_card and self._captures(plan):
            self._capture(memory, plan)
        self._allocated = memory
        if self._on_card:
            self._measured.seen_bytes = look_at(self._device).other_bytes

    def _pool_memory(self, form: CacheFormat, pool_bytes: int | None, spare: list[torch.Tensor]) -> torch.Tensor:
        """The last pool's memory when it has the right size; else it goes before the new one comes."""
        wanted = form.pool_bytes(self.plan.num_gpu_blocks) if pool_bytes is None else pool_bytes
        if spare and spare[0].nbytes == wanted:
            return spare.pop()
        if spare:
            spare.clear()
            give_back(self._device)
        return torch.empty(wanted, dtype=torch.uint8, device=self._device)

    def _build(self, plan: MemoryPlan, pool: torch.Tensor) -> _Allocated:
        config, decoder, device = plan.config, self._decoder, self._device
        max_num_seqs, max_model_len = int(config.max_num_seqs or 1), int(config.max_model_len or 1)
        form = cache_format(plan.model, config.block_size, config.kv_cache_dtype, decoder.dtype, decoder.tp_size)
        cache = CudaKVCache(form, plan.num_gpu_blocks, plan.num_swap_blocks, pool)
        attention = CudaAttention(
            plan.model, cache, max_num_seqs=max_num_seqs, max_model_len=max_model_len, tp_size=decoder.tp_size
        )
        return _Allocated(
            cache=cache,
            tables=SlotTables(max_num_seqs, -(-max_model_len // config.block_size), device),
            staging=Staging(int(config.max_num_batched_tokens or 1), max_num_seqs + MANY_PROMPTS, device),
            attention=attention,
            forward=make_forward(decoder, attention),
            last_tokens=torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device),
            results=[torch.zeros(max_num_seqs, dtype=torch.int64, pin_memory=self._on_card) for _ in range(2)],
        )

    def _captures(self, plan: MemoryPlan) -> bool:
        return not plan.config.enforce_eager and not self.why_eager

    def _shape_key(self, plan: MemoryPlan) -> tuple:
        config = plan.config
        return (
            config.max_num_seqs, config.max_num_batched_tokens, config.max_model_len, config.block_size,
            config.kv_cache_dtype, self._captures(plan),
        )  # fmt: skip

    def _costs(self, plan: MemoryPlan, form: CacheFormat) -> StepCosts:
        """What a step takes beside the pool, measured over a pool of one block, once for each shape of step."""
        key = self._shape_key(plan)
        if key not in self._measured.costs:
            pool = torch.empty(form.pool_bytes(1), dtype=torch.uint8, device=self._device)
            trial = self._build(with_blocks(plan, form, 1, 0), pool)
            self._warm_libraries()
            peak = self._peak(trial, plan)
            self._compile(trial, plan)
            largest = captures_largest(plan.model, plan.gpu, plan.config)
            costs = StepCosts(peak, 0, trial.tables_bytes, largest)
            graphs = self._graphs_estimate(trial, plan, costs) if self._captures(plan) else 0
            self._measured.costs[key] = dataclasses.replace(costs, graphs_bytes=graphs)
            del trial, pool
            give_back(self._device)
        return self._measured.costs[key]

    def _compile(self, trial: _Allocated, plan: MemoryPlan) -> None:
        """Launch every variant of the kernels once, so that none is compiled while requests wait."""
        prompts = [prompt_step(plan, trial.tables, size) for size in PROMPT_SIZES]
        decodes = [StepShape(size, size, 0, size) for size in decode_sizes(int(plan.config.max_num_seqs or 1))]
        for step in [*prompts, *(padding_step(shape, trial.tables) for shape in decodes)]:
            if self._is_new_shape(plan, step.shape):
                self._compute(trial, trial.staging.send(step))
                # The staging buffers have room for two steps on their way, no more.
                torch.cuda.synchronize(self._device)

    def _warm_libraries(self) -> None:
        """Have the matrix library take its workspace for each stream that it will run on, once and counted."""
        before = look_at(self._device).allocated_bytes
        for stream in (torch.cuda.current_stream(self._device), self._stream):
            with torch.cuda.stream(stream):
                some = torch.zeros(16, 16, dtype=self._decoder.dtype, device=self._device)
                some = some.mm(some)
        torch.cuda.synchronize(self._device)
        self._measured.library_bytes += max(0, look_at(self._device).allocated_bytes - before)

    def _peak(self, trial: _Allocated, plan: MemoryPlan) -> int:
        """Most bytes that the largest step has at one moment; what its first run leaves behind is the libraries'."""
        before = look_at(self._device).allocated_bytes
        self._compute(trial, trial.staging.send(prompt_step(plan, trial.tables)))
        torch.cuda.synchronize(self._device)
        kept = look_at(self._device).allocated_bytes
        self._measured.library_bytes += max(0, kept - before)
        torch.cuda.reset_peak_memory_stats(self._device)
        self._compute(trial, trial.staging.send(prompt_step(plan, trial.tables)))
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device) - kept

    def _graphs_estimate(self, trial: _Allocated, plan: MemoryPlan, costs: StepCosts) -> int:
        """From the two largest graphs of each kind over a pool of one block: the very first owns the memory, the others
        share it, and the driver, which grows in steps, keeps a little for each."""
        graphs = StepGraphs(lambda shape: self._prepared(trial, shape), self._stream)  # type: ignore[arg-type]
        used, num_left = self._used_bytes(), 0
        for shapes in graph_shapes(plan.config, largest=costs.captures_largest):
            for shape in shapes[:-3:-1]:
                graphs.capture(shape, warm_up=self._is_new_shape(plan, shape))
            num_left += max(0, len(shapes) - 2)
        return max(0, self._used_bytes() - used) + num_left * card_constants().graph_driver_bytes

    def _capture(self, memory: _Allocated, plan: MemoryPlan) -> None:
        before, padded = self._used_bytes(), padded_tokens(plan.model, plan.gpu, plan.config)
        graphs = StepGraphs(lambda shape: self._prepared(memory, shape), self._stream, padded)  # type: ignore[arg-type]
        costs = self._measured.costs[self._shape_key(plan)]
        for shapes in graph_shapes(plan.config, largest=costs.captures_largest):
            for shape in reversed(shapes):
                graphs.capture(shape, warm_up=self._is_new_shape(plan, shape))
        memory.graphs = graphs
        memory.graphs_bytes = max(0, self._used_bytes() - before)

    def _prepared(self, memory: _Allocated, shape: StepShape) -> Callable[[], torch.Tensor]:
        tensors = memory.staging.send(padding_step(shape, memory.tables))
        return lambda: self._compute(memory, tensors)

    def _is_new_shape(self, plan: MemoryPlan, shape: StepShape) -> bool:
        """Whether this process has not launched the kernels of such a step yet."""
        key = (shape, *self._shape_key(plan)[2:5])
        is_new = key not in self._measured.warm_shapes
        self._measured.warm_shapes.add(key)
        return is_new

    def _used_bytes(self) -> int:
        torch.cuda.empty_cache()
        card = look_at(self._device)
        return card.total_bytes - card.free_bytes

    def _compute(
        self, memory: _Allocated, step: StepTensors, penalized: list[Sequence | None] | None = None
    ) -> torch.Tensor:
        """Tokens int64 [places]; those that count are kept by slot for the next step as well."""
        parts, hidden = step.tensors, self._hidden(memory, step)
        if "sample_rows" in parts:
            hidden = hidden.index_select(0, parts["sample_rows"])
        tokens = self._decoder.ranks.from_first(sample(self._logits(hidden, penalized or []), step.sampling))
        memory.last_tokens.index_copy_(0, parts["sample_slots"], tokens)
        return tokens

    def _hidden(self, memory: _Allocated, step: StepTensors) -> torch.Tensor:
        """[rows, hidden_size] after the final norm, sequences with one new token first."""
        parts, count, tables = step.tensors, step.shape.num_decodes, memory.tables.device
        prompts = step.shape.num_prompts > 0
        rows = AttentionRows(
            slot_mapping=parts["slot_mapping"],
            decode_lens=parts["decode_lens"],
            decode_tables=tables.index_select(0, parts["decode_slots"]),
            prompt_lens=parts["prompt_lens"] if prompts else None,
            prompt_tables=tables.index_select(0, parts["prompt_slots"]) if prompts else None,
            query_starts=parts["query_starts"] if prompts else None,
        )
        known = parts["token_ids"]
        if count:
            newest = memory.last_tokens.index_select(0, parts["decode_slots"])
            newest = torch.where(known[:count] < 0, newest, known[:count])
            known = newest if count == known.shape[0] else torch.cat((newest, known[count:]))
        memory.attention.begin(rows)
        return memory.forward(known, parts["positions"])

    def _logits(self, hidden: torch.Tensor, penalized: list[Sequence | None]) -> torch.Tensor:
        """[S, vocab] in the model's type; float32 where a cap or a penalty changes them."""
        logits = self._decoder.whole_logits(project(hidden, self._decoder.weights.head))
        cap = self._decoder.spec.final_softcap
        if cap is not None:
            logits = logits.float().div_(cap).tanh_().mul_(cap)
        if penalized:
            logits = logits.float()
        for row, sequence in enumerate(penalized):
            if sequence is not None and sequence.request.sampling.repetition_penalty != 1.0:
                penalize(logits[row], sequence.token_ids, sequence.request.sampling.repetition_penalty)
        return logits

    def _send_back(self, memory: _Allocated, tokens: torch.Tensor, rows: list[int], started: Any) -> PendingStep:
        self._turn ^= 1
        result = memory.results[self._turn][: tokens.shape[0]]
        result.copy_(tokens, non_blocking=True)
        done = None
        if self._on_card:
            done = torch.cuda.Event(enable_timing=started is not None)
            done.record()
            if started is not None and self.times is not None:
                self.times.append((started, done))
        return PendingStep(result, rows, done)


def _bring_tables(memory: _Allocated, batch: ScheduledBatch) -> None:
    for sequence, slot, block_table in zip(batch.sequences, batch.slots, batch.block_tables, strict=True):
        memory.tables.update(sequence, slot, block_table)
    memory.tables.send_changes()


def _reads_what_comes(batch: ScheduledBatch) -> bool:
    """Whether a sequence is computed in the step with which its blocks come back."""
    coming = {block for block, _ in batch.swap_in}
    return bool(coming) and any(table[0] in coming for table in batch.block_tables)


def _swap_blocks(plan: MemoryPlan, form: CacheFormat) -> int:
    return int(plan.config.swap_space * GIB) // form.block_bytes
