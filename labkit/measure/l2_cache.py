"""Exact least-recently-used cache of a trace, for every capacity at once: the bytes between two uses of a name.

An access hits in a fully associative cache of C bytes when less than C bytes of other names were touched since its last
use (Mattson et al. 1970, IBM Systems Journal 9(2)). How many were touched is counted without a loop over accesses: of
the accesses between, those whose own last use lies before the window are the first of their name in it.
"""

from __future__ import annotations

import math

import numpy as np

COLD = np.inf


def stack_distances(names: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Bytes of other names touched since the last use of each access's name, itself not counted; inf at first use.

    Args:
        names: int64 `[n]`, what each access asks for.
        sizes: `[n]` bytes of each access; a name has one size.

    Returns:
        float64 `[n]`.
    """
    count = len(names)
    distances = np.full(count, COLD)
    last = last_use(names)
    reused = np.flatnonzero(last >= 0)
    if not len(reused):
        return distances
    before = np.concatenate(([0.0], np.cumsum(sizes, dtype=np.float64)))
    earlier = _bytes_of_earlier(last, np.asarray(sizes, dtype=np.float64))
    # Accesses up to the last use all have a last use before it, so their bytes are in `earlier` and are taken off.
    distances[reused] = earlier[reused] - before[last[reused] + 1]
    return np.maximum(distances, 0.0, out=distances)


def last_use(names: np.ndarray) -> np.ndarray:
    """Index of the access before with the same name, -1 at the first: int64 `[n]`."""
    order = np.argsort(names, kind="stable")
    last = np.full(len(names), -1, dtype=np.int64)
    same = names[order[1:]] == names[order[:-1]]
    last[order[1:][same]] = order[:-1][same]
    return last


def _bytes_of_earlier(last: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """For each access the bytes of the accesses before it whose last use is earlier than its own.

    Bottom-up merge: accesses in order of last use; at each level those of the left half of a block of positions come
    before those of the right half, and a running sum over the left ones is what each right one is owed.
    """
    count = len(last)
    earlier = np.zeros(count)
    # First uses (-1) come in the order of position, so that none counts another one: their own sum is never used.
    order = np.argsort(last, kind="stable")
    for bit in reversed(range(max(1, (count - 1).bit_length()))):
        right = (order >> bit) & 1 == 1
        left_sum = np.cumsum(np.where(right, 0.0, sizes[order]))
        block = order >> (bit + 1)
        begins = np.flatnonzero(np.diff(block, prepend=-1))
        base = np.repeat(
            np.concatenate(([0.0], left_sum[begins[1:] - 1])), np.diff(np.append(begins, count))
        )  # fmt: skip
        where = order[right]
        earlier[where] += (left_sum - base)[right]
        order = _left_first(order, right, begins)
    return earlier


def _left_first(order: np.ndarray, right: np.ndarray, begins: np.ndarray) -> np.ndarray:
    """Within each block the left ones before the right ones, otherwise in the order they had."""
    count = len(order)
    lengths = np.diff(np.append(begins, count))
    rights_before = np.cumsum(right) - right
    lefts = np.add.reduceat(~right, begins)
    begin = np.repeat(begins, lengths)
    rights_in_block = rights_before - np.repeat(rights_before[begins], lengths)
    lefts_in_block = np.arange(count) - begin - rights_in_block
    target = begin + np.where(right, np.repeat(lefts, lengths) + rights_in_block, lefts_in_block)
    moved = np.empty_like(order)
    moved[target] = order
    return moved


def hit_share(distances: np.ndarray, capacity_bytes: float, ways: int | None = None) -> np.ndarray:
    """Share of the bytes of each access that is still in a cache of `capacity_bytes`: float64 `[n]`.

    Args:
        ways: lines of a set; None is fully associative, so every share is 0 or 1. With hashed sets, d bytes touched
            since leave a line in place when fewer than `ways` of them fell on its set: a Poisson count with mean
            ways · d / capacity (Smith 1978, IEEE TSE 4(2); Hill and Smith 1989, IEEE TC 38(12)).
    """
    if ways is None:
        return (distances < capacity_bytes).astype(np.float64)
    grid = np.linspace(0.0, 4.0, 401)
    return np.interp(distances / capacity_bytes, grid, _poisson_below(ways * grid, ways), right=0.0)


def _poisson_below(mean: np.ndarray, ways: int) -> np.ndarray:
    """Probability that a Poisson count is below `ways`."""
    counts = np.arange(ways)[:, None]
    factorials = np.array([math.lgamma(k + 1) for k in range(ways)])[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        powers = np.where(counts == 0, 0.0, counts * np.log(mean)[None, :])
    return np.exp(powers - mean[None, :] - factorials).sum(0)
