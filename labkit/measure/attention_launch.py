"""What the programs of an attention launch read, in launch order: the kernels' grids and loops without a card.

Decode follows `labkit_kernels.paged_decode` (work items, then heads), prefill `paged_prefill` (heads, then row blocks
from the last to the first, splits outermost), a shared prefix `cascade` (both beside each other).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
from labkit_kernels.decode_split import split_decode

from labkit.errors import OutOfRangeError, UnsupportedError
from labkit.measure.attention_shape import AttentionShape, check_variant
from labkit.specs.gpu_spec import GpuSpec
from labkit.text import plain

# Shared memory of an SM in KiB that programs can have, and its warps: CUDA programming guide, compute capabilities.
_SM_LIMITS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {"7.0": (96, 64), "7.5": (64, 32), "8.0": (164, 64), "8.6": (100, 48), "8.9": (100, 48), "9.0": (228, 64),
     "10.0": (228, 64), "12.0": (100, 48)}
)  # fmt: skip
_OTHER_SM = (64, 32)
# Each program leaves 1 KiB to the system.
_PROGRAM_KIB = 1
MIN_TILES_OF_SPLIT, MAX_SPLITS = 4, 32
# How long programs that start together keep step, beside decode of 16-bit values: 8-bit ones are unpacked first, row
# blocks compute more in a step. Neighbours that start later find more of each other's reads on their way where a step
# waits longer for them. Counted on an H200.
UNPACKING_PACE, ROWS_PACE, UNPACKING_MEETS = 0.5, 0.3, 2.0


@dataclass(frozen=True)
class Programs:
    """The programs of one launch, int64 `[programs]` each, in the order in which the card starts them.

    Attributes:
        sequence, kv_head: whose keys a program reads; sequence -1 is the shared prefix as a sequence of its own.
        start, end: first token, and one past the last.
        tile: KV tokens of one step.
        slots: programs that the card holds at once.
        query_bytes: bytes of queries that all programs ask for, and when each is read once.
        merge_bytes: bytes of partial results that are read again, soon after they were written.
        pace: how long programs that start together keep step, beside decode of 16-bit values.
        meets_later: how often those that start later meet, beside it.
    """

    sequence: np.ndarray
    kv_head: np.ndarray
    start: np.ndarray
    end: np.ndarray
    tile: int
    slots: int
    query_bytes: tuple[int, int]
    merge_bytes: int = 0
    pace: float = 1.0
    meets_later: float = 1.0


def build_launches(
    shape: AttentionShape, gpu: GpuSpec, variant: str = "full", programs_per_sm: int | None = None
) -> tuple[Programs, ...]:
    """The launches of `variant` (one of VARIANTS) that run at the same time.

    Args:
        programs_per_sm: programs that an SM holds; None estimates it from shared memory and warps.

    Raises:
        UnknownNameError: no such variant.
        UnsupportedError: the card's SMs are not known.
        OutOfRangeError: a decode variant with more than 8 query tokens, or a shared prefix of less than a block.
    """
    check_variant(variant)
    if not gpu.sm_count:
        raise UnsupportedError(
            f"how many SMs {plain(gpu.name, 60)} has is not known", works="a card of the catalogue, such as H100",
            knob="gpu",
        )  # fmt: skip
    if variant == "prefill":
        return (_prefill(shape, gpu, programs_per_sm),)
    if max(shape.batch.query_lens) > 8:
        raise OutOfRangeError(
            f"the decode kernel takes 1 to 8 query tokens a sequence, not {max(shape.batch.query_lens)}",
            works='variant="prefill"', knob="query_lens",
        )  # fmt: skip
    if variant == "shared prefix":
        return _cascade(shape, gpu, programs_per_sm)
    zeros = np.zeros(len(shape.batch.context_lens), dtype=np.int64)
    return (_decode(shape, gpu, variant, zeros, programs_per_sm),)


def _capability(gpu: GpuSpec) -> int:
    major, _, minor = (gpu.compute_capability or "8.0").partition(".")
    return int(major) * 10 + int(minor or 0)


def _resident(gpu: GpuSpec, stages: int, tile: int, head_bytes: int, warps: int, given: int | None) -> int:
    """Programs of an SM at once: `stages` buffers of a tile's K and V each, and their warps, must fit."""
    if given is not None:
        return given
    shared_kib, max_warps = _SM_LIMITS.get(gpu.compute_capability or "", _OTHER_SM)
    program_kib = _PROGRAM_KIB + stages * tile * head_bytes / 1024
    return int(max(1, min(shared_kib // program_kib, max_warps // warps)))


def _decode(
    shape: AttentionShape, gpu: GpuSpec, variant: str, skipped: np.ndarray, programs_per_sm: int | None
) -> Programs:
    """The decode kernel over each sequence's tokens from `skipped` on."""
    from labkit_kernels.heuristics import DecodeConfig, decode_config  # imports torch

    lens, queries = np.asarray(shape.batch.context_lens) - skipped, np.asarray(shape.batch.query_lens)
    heads = 1 if variant == "one program for each query head" else shape.group
    programs = shape.num_heads // heads
    if variant == "tile = block":
        config = DecodeConfig(tile=shape.block_size, stages=2, prefetch=False)
    else:
        rows = heads * int(queries.max())
        config = decode_config(_capability(gpu), shape.kv_kind, shape.head_dim, rows, len(lens))
    whole = variant in ("tile = block", "no split")
    first = np.zeros_like(lens)
    if shape.window is not None:
        first = np.maximum(lens - queries - shape.window + 1, 0) // config.tile * config.tile
    longest = max(1, -(-int(lens.max()) // config.tile))
    sm_count = gpu.sm_count or 1
    items = split_decode(
        lens, first, config.tile, max(1.0, sm_count * config.ctas_per_sm / programs), longest if whole else None
    )
    count = len(items.sequence)
    kv_heads = np.arange(programs) * heads // shape.group
    row_bytes = heads * shape.head_dim * 2
    pieces = np.bincount(items.sequence, minlength=len(lens))
    asked = int(queries[items.sequence].sum()) * programs * row_bytes
    split = int((queries * pieces)[pieces > 1].sum()) * programs * heads * (shape.value_dim + 1) * 4
    slots = sm_count * _resident(gpu, config.stages, config.tile, shape.head_bytes, config.warps, programs_per_sm)
    unpacks = shape.kv_kind != "native"
    return Programs(
        sequence=np.repeat(items.sequence, programs), kv_head=np.tile(kv_heads, count),
        start=np.repeat(items.start + skipped[items.sequence], programs),
        end=np.repeat(items.end + skipped[items.sequence], programs),
        tile=config.tile, slots=slots, query_bytes=(asked, int(queries.sum()) * shape.num_heads * shape.head_dim * 2),
        merge_bytes=split, pace=UNPACKING_PACE if unpacks else 1.0, meets_later=UNPACKING_MEETS if unpacks else 1.0,
    )  # fmt: skip


def _prefill(shape: AttentionShape, gpu: GpuSpec, programs_per_sm: int | None) -> Programs:
    """The prefill kernel: row blocks of (token, head of the group)."""
    from labkit_kernels.heuristics import prefill_config

    contexts, queries = np.asarray(shape.batch.context_lens), np.asarray(shape.batch.query_lens)
    group, total = shape.group, int(queries.sum())
    config = prefill_config(_capability(gpu), shape.kv_kind, shape.head_dim, int(queries.max()) * group)
    programs = (total * group // config.rows + len(queries)) * shape.num_kv_heads
    tiles = -(-int(contexts.max()) // shape.block_size) * shape.block_size // config.tile
    sm_count = gpu.sm_count or 1
    fits = min(sm_count // programs, tiles // MIN_TILES_OF_SPLIT, MAX_SPLITS) if 2 * programs <= sm_count else 1
    blocks = -(-queries * group // config.rows)
    sequence = np.repeat(np.arange(len(queries)), blocks)[::-1]
    row = ((np.arange(len(sequence)) - np.repeat(np.cumsum(blocks) - blocks, blocks)) * config.rows)[::-1]
    before = (contexts - queries)[sequence]
    end = before + np.minimum((row + config.rows - 1) // group, queries[sequence] - 1) + 1
    start = np.zeros_like(end)
    if shape.window is not None:
        start = np.maximum(before + row // group - shape.window + 1, 0) // config.tile * config.tile
    return _row_programs(
        shape, (sequence, start, end), max(1, fits), config.tile, total,
        sm_count * _resident(gpu, config.stages, config.tile, shape.head_bytes, config.warps, programs_per_sm),
    )  # fmt: skip


def _row_programs(
    shape: AttentionShape, rows: tuple[np.ndarray, np.ndarray, np.ndarray], splits: int, tile: int, num_tokens: int,
    slots: int,
) -> Programs:  # fmt: skip
    """Programs of the grid (row blocks, KV heads, splits), the first axis fastest."""
    sequence, start, end = rows
    tiles = -(-(end - start) // tile)
    share = -(-tiles // splits) * tile
    starts = [np.minimum(start + split * share, end) for split in range(splits)]
    ends = [np.minimum(begin + share, end) for begin in starts]
    heads = shape.num_kv_heads
    query_bytes = num_tokens * shape.num_heads * shape.head_dim * 2
    return Programs(
        sequence=np.tile(sequence, heads * splits), kv_head=np.tile(np.repeat(np.arange(heads), len(sequence)), splits),
        start=np.concatenate([np.tile(begin, heads) for begin in starts]),
        end=np.concatenate([np.tile(stop, heads) for stop in ends]),
        tile=tile, slots=slots, query_bytes=(query_bytes * splits, query_bytes),
        merge_bytes=splits * num_tokens * shape.num_heads * (shape.value_dim + 1) * 4 if splits > 1 else 0,
        pace=ROWS_PACE,
    )  # fmt: skip


def _cascade(shape: AttentionShape, gpu: GpuSpec, programs_per_sm: int | None) -> tuple[Programs, Programs]:
    """The shared part, whose rows all see every shared key, and each sequence's own part beside it."""
    from labkit_kernels.heuristics import shared_config, shared_splits

    shared, num_tokens = shape.shared_tokens, sum(shape.batch.query_lens)
    if not 0 < shared < min(shape.batch.context_lens) or shape.window is not None:
        raise OutOfRangeError(
            f"the kernel for a shared prefix cannot take {shape.batch.shared_prefix_tokens} shared tokens",
            needed="one whole block at least, less than the shortest sequence, and no window",
            knob="shared_prefix_tokens",
        )
    config = shared_config(_capability(gpu), shape.kv_kind, shape.head_dim, num_tokens * shape.group)
    blocks = -(-num_tokens * shape.group // config.rows)
    sm_count = gpu.sm_count or 1
    splits = shared_splits(-(-shared // config.tile), blocks * shape.num_kv_heads, sm_count)
    rows = (np.full(blocks, -1), np.zeros(blocks, dtype=np.int64), np.full(blocks, shared))
    slots = sm_count * _resident(gpu, config.stages, config.tile, shape.head_bytes, config.warps, programs_per_sm)
    own = _decode(shape, gpu, "full", np.full(len(shape.batch.context_lens), shared), programs_per_sm)
    return replace(_row_programs(shape, rows, splits, config.tile, num_tokens, slots), pace=own.pace), own
