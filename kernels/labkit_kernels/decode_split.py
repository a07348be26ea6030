"""The split of a decode step in numpy: the reference of `decode_plan`, and its constants. Neither card nor triton."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

# Fitted to chunk sweeps on an H200 (kernels/NOTES.md), in tiles of one slot.
OVERLAP, ITEM_COST, REDUCE_COST, SPLIT_COST = 0.2, 0.75, 1.0, 0.07
MIN_CHUNK_TOKENS = 128
NUM_BUCKETS = 8


@dataclass(frozen=True)
class WorkItems:
    """Items in launch order, int64 `[items]` each: the sequence, and the tokens start … end that it reads."""

    sequence: np.ndarray
    start: np.ndarray
    end: np.ndarray
    chunk_tiles: int


def split_decode(
    seq_lens: np.ndarray, first_token: np.ndarray, tile: int, slots_per_head: float, chunk_tiles: int | None = None
) -> WorkItems:
    """The items of one decode step, longest first.

    Args:
        seq_lens: int `[batch]` tokens of each sequence.
        first_token: int `[batch]` where each begins to read: 0, or the tile of its window's first token.
        tile: KV tokens of one step of a program.
        slots_per_head: programs that the card holds at once, for each program of an item.
        chunk_tiles: tiles of a chunk where it is fixed; None lets the plan choose.
    """
    tiles = -(-(seq_lens - first_token) // tile)
    chunk = chunk_tiles or _best_chunk(tiles, slots_per_head, max(1, MIN_CHUNK_TOKENS // tile))
    full, rest = tiles // chunk, tiles % chunk
    sequence = np.repeat(np.arange(len(tiles)), full)
    part = np.arange(len(sequence)) - np.repeat(np.cumsum(full) - full, full)
    with_rest = np.flatnonzero((rest > 0) | (tiles == 0))
    by_length = np.argsort(-(rest[with_rest] * NUM_BUCKETS // chunk), kind="stable")
    sequence = np.concatenate([sequence, with_rest[by_length]])
    part = np.concatenate([part, full[with_rest[by_length]]])
    start = first_token[sequence] + part * chunk * tile
    return WorkItems(sequence, start, np.minimum(start + chunk * tile, seq_lens[sequence]), int(chunk))


def _best_chunk(tiles: np.ndarray, slots_per_head: float, min_chunk: int) -> int:
    """Tiles of a chunk with the smallest estimated finish, as the device finds it among longest / 1 … longest / k."""
    longest = max(int(tiles.max()), 1)
    max_items = min(len(tiles) - 1 + int(slots_per_head), len(tiles) * longest)
    candidates = min(256, max(32, 2 ** math.ceil(math.log2(max(1, int(slots_per_head))))))
    k = np.arange(candidates)
    chunk = np.maximum((longest + k) // (k + 1), min_chunk)
    whole = tiles[:, None] // chunk[None, :]
    rest = tiles[:, None] - whole * chunk[None, :]
    full, rest_items, rest_tiles = whole.sum(0), (rest > 0).sum(0), rest.sum(0)
    # Padding of a graph takes an item too.
    empty = int((tiles == 0).sum())
    finish = _finish_time(full, rest_items, rest_tiles, chunk, slots_per_head, -(-longest // chunk))
    finish = np.where((full + rest_items + empty <= max_items) | (k == 0), finish, np.inf)
    return int(chunk[int(np.argmin(finish))])


def _finish_time(
    full: np.ndarray, rest_items: np.ndarray, rest_tiles: np.ndarray, chunk: np.ndarray, slots: float,
    splits: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """Estimated finish in tiles of one slot; see `_finish_time` of the kernel."""
    waves = np.floor(full / slots)
    left = full - waves * slots
    items = left + rest_items
    rest_mean = rest_tiles / np.maximum(rest_items, 1)
    longest = np.where(left > 0, chunk, rest_mean)
    alone = longest * (OVERLAP + (1 - OVERLAP) * np.minimum(items / slots, 1))
    packed = np.maximum((left * chunk + rest_tiles) / slots + 0.5 * rest_mean, longest)
    last = np.where(items > 0, np.where(items <= slots, alone, packed), 0.0)
    merge = np.where(splits > 1, REDUCE_COST + SPLIT_COST * splits, 0.0)
    return waves * chunk + last + np.ceil((full + rest_items) / slots) * ITEM_COST + merge
