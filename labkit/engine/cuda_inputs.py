"""What a step's kernels read, brought to the device in one copy: rows, block tables and sampling parameters."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from labkit_kernels.entries import pack_entries, write_entries
from labkit_kernels.sampling import SamplingTensors

from labkit.engine.batch import ScheduledBatch
from labkit.engine.sequence import Sequence
from labkit.memory.step_shapes import StepShape

_ALIGNMENT_BYTES = 16
# Steps that are launched kernel by kernel come in many shapes; each is some 10 KiB of views.
_MOST_SHAPES = 256
_PARAMETERS = (("temperature", np.float32), ("top_k", np.int32), ("top_p", np.float32), ("min_p", np.float32))


class SlotTables:
    """Block table and sampling parameters of each running sequence by its slot; one more row stands for padding.

    Attributes:
        device: int32 [slots + 1, blocks], what kernels read; `host` is its mirror.
        seeds, parameters: numpy arrays [slots + 1] by slot.
    """

    def __init__(self, num_slots: int, max_blocks: int, device: torch.device) -> None:
        self.padding = num_slots
        # Rows begin at whole 16 bytes, which a kernel is compiled for.
        width = -(-max_blocks // 4) * 4
        self.device = torch.zeros(num_slots + 1, width, dtype=torch.int32, device=device)
        self.host = np.zeros((num_slots + 1, width), np.int32)
        self.seeds = np.zeros(num_slots + 1, np.int64)
        self.parameters = {name: np.zeros(num_slots + 1, dtype) for name, dtype in _PARAMETERS}
        self.parameters["top_p"][:] = 1.0
        self._owners: list[Sequence | None] = [None] * num_slots
        self._sources: list[list[int] | None] = [None] * num_slots
        self._lengths = [0] * num_slots
        self._changes: list[tuple[int, int, int]] = []

    def update(self, sequence: Sequence, slot: int, block_table: list[int]) -> None:
        """Note what is new of a sequence; tables only grow, and one that comes back has another list."""
        if self._owners[slot] is not sequence:
            self._owners[slot] = sequence
            self._take_parameters(sequence, slot)
        if self._sources[slot] is not block_table:
            self._sources[slot], self._lengths[slot] = block_table, 0
        start, stop = self._lengths[slot], len(block_table)
        if start < stop:
            self.host[slot, start:stop] = block_table[start:]
            self._changes.append((slot, start, stop))
            self._lengths[slot] = stop

    def send_changes(self) -> None:
        """Bring the device's tables up to date, in stream order."""
        if not self._changes:
            return
        width = self.host.shape[1]
        flat = np.concatenate(
            [np.arange(slot * width + start, slot * width + stop) for slot, start, stop in self._changes]
        )
        entries = torch.from_numpy(pack_entries(flat, self.host.reshape(-1)[flat]))
        if self.device.is_cuda:
            entries = entries.pin_memory().to(self.device.device, non_blocking=True)
        write_entries(self.device, entries)
        self._changes = []

    def _take_parameters(self, sequence: Sequence, slot: int) -> None:
        sampling = sequence.request.sampling
        self.seeds[slot] = sequence.seed
        self.parameters["temperature"][slot] = 0.0 if sampling.is_greedy else sampling.temperature
        self.parameters["top_k"][slot] = min(sampling.top_k, 2**31 - 1)
        self.parameters["top_p"][slot] = sampling.top_p
        self.parameters["min_p"][slot] = sampling.min_p


@dataclass(frozen=True)
class HostStep:
    """One step as arrays, sequences with one new token first.

    Attributes:
        arrays: name → array, in the order in which they are packed.
        shape: its places.
        sampled: [num_samples] index into the batch's sequences of each token that counts; -1 for others.
    """

    arrays: dict[str, np.ndarray]
    shape: StepShape
    sampled: np.ndarray


def shape_of(batch: ScheduledBatch) -> StepShape:
    """The places that a step fills."""
    counts = np.diff(batch.query_starts)
    num_decodes = int((counts == 1).sum())
    return StepShape(batch.num_tokens, num_decodes, len(counts) - num_decodes, len(counts))


def arrange(batch: ScheduledBatch, tables: SlotTables, block_size: int, shape: StepShape | None = None) -> HostStep:
    """The step's arrays.

    Args:
        batch: what was scheduled; `tables` is up to date with it.
        block_size: of the cache.
        shape: of a captured graph, with room for the batch; None takes the places that the batch fills.
    """
    filled = shape_of(batch)
    shape = shape or filled
    starts = np.array(batch.query_starts, dtype=np.int64)
    order = np.argsort(np.diff(starts) != 1, kind="stable")
    counts = np.diff(starts)[order]
    token_ids, positions = np.array(batch.token_ids, dtype=np.int64), _positions(batch)
    # Those that decode are mostly the older ones, and so come first already.
    if (order[1:] < order[:-1]).any():
        rows = np.concatenate([np.arange(starts[index], starts[index + 1]) for index in order])
        token_ids, positions = token_ids[rows], positions[rows]
    slots, seq_lens = np.array(batch.slots, dtype=np.int64)[order], np.array(batch.seq_lens, dtype=np.int32)[order]
    block_ids = tables.host[np.repeat(slots, counts), positions // block_size].astype(np.int64)
    arrays = {
        "token_ids": _padded(token_ids, shape.num_tokens, 0),
        "positions": _padded(positions, shape.num_tokens, 0),
        "slot_mapping": _padded(block_ids * block_size + positions % block_size, shape.num_tokens, -1),
        "decode_slots": _padded(slots[: filled.num_decodes], shape.num_decodes, tables.padding),
        "decode_lens": _padded(seq_lens[: filled.num_decodes], shape.num_decodes, 0),
    }
    ends = np.cumsum(counts)
    if shape.num_prompts:
        query_starts = np.concatenate(([filled.num_decodes], ends[filled.num_decodes :])).astype(np.int32)
        arrays |= {
            "prompt_slots": _padded(slots[filled.num_decodes :], shape.num_prompts, tables.padding),
            "prompt_lens": _padded(seq_lens[filled.num_decodes :], shape.num_prompts, 0),
            "query_starts": _padded(query_starts, shape.num_prompts + 1, query_starts[-1]),
            "sample_rows": _padded(ends - 1, shape.num_samples, 0),
        }
    gives = np.array(batch.samples, dtype=bool)[order]
    arrays |= _sampling_arrays(tables, _padded(slots, shape.num_samples, tables.padding), seq_lens, gives)
    sampled = _padded(np.where(gives, order, -1), shape.num_samples, -1)
    return HostStep(arrays, shape, sampled)


def _positions(batch: ScheduledBatch) -> np.ndarray:
    """`batch.positions` as int64 `[T]`, without a list of them."""
    ends = np.array(batch.query_starts[1:], dtype=np.int64)
    before = np.array(batch.seq_lens, dtype=np.int64) - ends
    return np.arange(batch.num_tokens) + np.repeat(before, np.diff(batch.query_starts))


def owners_of(step: HostStep, batch: ScheduledBatch) -> list[Sequence | None]:
    """The sequence of each place whose token counts."""
    return [batch.sequences[index] if index >= 0 else None for index in step.sampled]


def rows_in_order(step: HostStep, batch: ScheduledBatch) -> list[int]:
    """Index among the device's tokens of each token that the batch asked for."""
    row_of = np.full(len(batch.sequences), -1)
    rows = np.arange(len(step.sampled))
    asked = step.sampled >= 0
    row_of[step.sampled[asked]] = rows[asked]
    return row_of[np.array(batch.samples, dtype=bool)].tolist()


def padding_step(shape: StepShape, tables: SlotTables) -> HostStep:
    """A step of padding alone, for capture."""
    return arrange(ScheduledBatch(), tables, 1, shape)


def _sampling_arrays(
    tables: SlotTables, slots: np.ndarray, seq_lens: np.ndarray, gives: np.ndarray
) -> dict[str, np.ndarray]:
    """How each sequence's token is drawn and where it is kept; one that counts for nothing goes to the padding slot."""
    return {
        "sample_slots": np.where(_padded(gives, len(slots), False), slots, tables.padding),
        "seeds": tables.seeds[slots],
        **{name: values[slots] for name, values in tables.parameters.items()},
        "draws": _padded(seq_lens, len(slots), 0),
    }


def _padded(values: np.ndarray, count: int, fill: int) -> np.ndarray:
    """`values` and then `fill` up to `count`."""
    if len(values) == count:
        return values
    out = np.full(count, fill, dtype=values.dtype)
    out[: len(values)] = values
    return out


@dataclass(frozen=True)
class StepTensors:
    """`HostStep` on the device."""

    tensors: dict[str, torch.Tensor]
    shape: StepShape

    @property
    def sampling(self) -> SamplingTensors:
        """Parameters of the rows that give a token."""
        parts = self.tensors
        return SamplingTensors(
            parts["temperature"], parts["top_k"], parts["top_p"], parts["min_p"], parts["seeds"], parts["draws"]
        )


class Staging:
    """Brings steps to the same place on the device, so that a captured graph finds the next one where the last was.

    Two pinned buffers take turns, because the copy of a step may still wait when the next one is put together.

    Args:
        max_tokens, max_places: of a step, the latter for sequences.
        device: where to.
    """

    def __init__(self, max_tokens: int, max_places: int, device: torch.device) -> None:
        num_bytes = 3 * 8 * max_tokens + 96 * (max_places + 1) + 16 * 32
        pinned = device.type == "cuda"
        self._hosts = [torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        self._device = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._turn = 0
        self._known: dict[StepShape, _Places] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        return self._device.nbytes

    def send(self, step: HostStep) -> StepTensors:
        """The step's tensors; valid, in stream order, until the next `send`."""
        self._turn ^= 1
        places = self._known.get(step.shape) or self._placed(step)
        for target, values in zip(places.hosts[self._turn], step.arrays.values(), strict=True):
            target[:] = values
        self._device[: places.end].copy_(self._hosts[self._turn][: places.end], non_blocking=True)
        return places.tensors

    def _placed(self, step: HostStep) -> _Places:
        """Where arrays of such a step go, worked out once for each shape."""
        hosts: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
        tensors, start = {}, 0
        for name, values in step.arrays.items():
            stop, dtype = start + values.nbytes, _TORCH_DTYPES[values.dtype.name]
            tensors[name] = self._device[start:stop].view(dtype)
            for views, host in zip(hosts, self._hosts, strict=True):
                views.append(host[start:stop].view(dtype).numpy())
            start = -(-stop // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        if len(self._known) >= _MOST_SHAPES:
            self._known.clear()
        self._known[step.shape] = _Places(hosts, start, StepTensors(tensors, step.shape))
        return self._known[step.shape]


@dataclass(frozen=True)
class _Places:
    """Where the arrays of steps of one shape lie: views of both pinned buffers, where they end, and the device's."""

    hosts: tuple[list[np.ndarray], list[np.ndarray]]
    end: int
    tensors: StepTensors


_TORCH_DTYPES = {"int64": torch.int64, "int32": torch.int32, "float32": torch.float32}
