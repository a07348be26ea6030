"""Sampling without a sort: temperature, top-k, top-p and min-p as thresholds on the logits, then a Gumbel draw.

One program a row. The thresholds are searched by halving the order-preserving integer keys of float32 and snapping to
the nearest logit after each count, over the few logits near the largest one where they provably hold the answer, else
over the row. Order of the filters as in transformers: temperature, top-k, top-p, min-p. Tokens of equal logit are kept
or dropped together. The draw is argmax of log p + Gumbel noise (Maddison et al. 2014, arXiv 1411.0030) with noise of
`random_bits`: it depends on nothing but logits, parameters, seed and position. Reference: `reference_ops.sample`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import triton
import triton.language as tl

from labkit_kernels.checks import (
    QUERY_DTYPES,
    KernelValueError,
    check_device,
    check_dtype,
    check_last_stride,
    check_out,
    check_shape,
)
from labkit_kernels.random_bits import log2_exponential, neighbour_words, scattered_words

MAX_CANDIDATES = 16384
NUM_PIVOTS = 8
MAX_VOCAB = 2**30
# `_key` of -inf.
LOWEST_KEY = tl.constexpr(-2139095041)
PARAMETER_DTYPES = {
    "temperature": torch.float32, "top_k": torch.int32, "top_p": torch.float32, "min_p": torch.float32,
    "seeds": torch.int64, "positions": torch.int32,
}  # fmt: skip


@dataclass(frozen=True)
class SamplingTensors:
    """Parameters of each row, `[rows]` on the device of the logits, so that a captured graph reads fresh ones.

    temperature float32, 0 = greedy; top_k int32, 0 = all; top_p float32, 1 = all; min_p float32, 0 = all; seeds int64
    of the requests; positions int32 of the token to be drawn.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor

    def check(self, logits: torch.Tensor) -> None:
        """Raises KernelValueError or KernelTypeError naming the bad tensor."""
        for name, tensor in self.named():
            check_dtype(name, tensor, (PARAMETER_DTYPES[name],))
            check_device(name, tensor, logits.device)
            check_shape(name, tensor, (logits.shape[0],))
            check_last_stride(name, tensor)

    def named(self) -> list[tuple[str, torch.Tensor]]:
        """Names and tensors in the kernel's order."""
        return [(field.name, getattr(self, field.name)) for field in fields(self)]


@triton.jit
def _key(x):
    """Integers in the order of the float32 numbers."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(key):
    key = key.to(tl.int32)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _load_logits(logits, at, vocab):
    """Float32 logits, -inf past the end and for NaN; -0 becomes 0 so that equal numbers have equal keys."""
    x = tl.load(logits + at, mask=at < vocab, other=float("-inf")).to(tl.float32) + 0.0
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def _largest(logits, vocab, TILE: tl.constexpr):
    """Largest logit of a row and its lowest token id."""
    best = tl.full([TILE], float("-inf"), tl.float32)
    best_id = tl.arange(0, TILE)
    for first in range(0, vocab, TILE):
        at = first + tl.arange(0, TILE)
        x = _load_logits(logits, at, vocab)
        better = x > best
        best = tl.where(better, x, best)
        best_id = tl.where(better, at, best_id)
    top = tl.max(best, 0)
    return top, tl.min(tl.where(best == top, best_id, 0x7FFFFFFF), 0)


@triton.jit
def _pivot_sums(logits, vocab, top, factor, PIVOTS: tl.constexpr, TILE: tl.constexpr):
    """How many tokens, and what mass relative to the top's, lie within 1, 2, 4, … nats of it; last: all."""
    reach = tl.exp2(tl.arange(0, PIVOTS).to(tl.float32)) * 1.4426950408889634
    reach = tl.where(tl.arange(0, PIVOTS) == PIVOTS - 1, float("inf"), reach)
    counts = tl.zeros([PIVOTS, TILE], tl.int32)
    masses = tl.zeros([PIVOTS, TILE], tl.float32)
    for first in range(0, vocab, TILE):
        at = first + tl.arange(0, TILE)
        z = (_load_logits(logits, at, vocab) - top) * factor
        near = (z[None, :] >= -reach[:, None]) & (at < vocab)[None, :]
        counts += near.to(tl.int32)
        masses += tl.where(near, tl.exp2(z)[None, :], 0.0)
    return tl.sum(counts, 1), tl.sum(masses, 1)


@triton.jit
def _compact(logits, vocab, top, factor, reach, values, ids, MAX: tl.constexpr, TILE: tl.constexpr):
    """Writes the logits within `reach` of the top and their ids to the row's scratch, in order; returns how many."""
    count = 0
    for first in range(0, vocab, TILE):
        at = first + tl.arange(0, TILE)
        x = _load_logits(logits, at, vocab)
        keep = ((x - top) * factor >= -reach) & (at < vocab)
        one = keep.to(tl.int32)
        where = count + tl.cumsum(one, 0) - one
        tl.store(values + where, x, mask=keep & (where < MAX))
        tl.store(ids + where, at, mask=keep & (where < MAX))
        count += tl.sum(one, 0)
    tl.debug_barrier()
    return count


@triton.jit
def _source(logits, values, at, n, compact):
    """Logits of the row, or of its scratch where `compact`."""
    x = tl.load(values + at, mask=(at < n) & compact, other=float("-inf"))
    return tl.maximum(x, _load_logits(logits, at, tl.where(compact, 0, n)))


@triton.jit
def _fixed_mass(x, top, factor):
    """exp(scaled distance to the top) in units of 2⁻⁴⁰: whole numbers, so sums do not depend on their order."""
    return (tl.exp2((x - top) * factor) * 1099511627776.0).to(tl.int64)


@triton.jit
def _mass_above(logits, values, n, compact, key, top, factor, TILE: tl.constexpr):
    total = tl.zeros([TILE], tl.int64)
    for first in range(0, n, TILE):
        at = first + tl.arange(0, TILE)
        x = _source(logits, values, at, n, compact)
        total += tl.where((at < n) & (_key(x) >= key), _fixed_mass(x, top, factor), 0)
    return tl.sum(total, 0)


@triton.jit
def _search(
    logits, values, n, compact, low, high, top, factor, need, BY_MASS: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Largest key from low to high with at least `need` tokens, or mass, at or above it; low is taken to have it."""
    low = low.to(tl.int64)
    high = high.to(tl.int64)
    while low < high:
        middle = low + (high - low + 1) // 2
        total = tl.zeros([TILE], tl.int64)
        above = tl.full([TILE], 0x7FFFFFFF, tl.int32)
        below = tl.full([TILE], -0x80000000, tl.int32)
        for first in range(0, n, TILE):
            at = first + tl.arange(0, TILE)
            x = _source(logits, values, at, n, compact)
            key = _key(x)
            inside = (at < n) & (key >= middle)
            if BY_MASS:
                total += tl.where(inside, _fixed_mass(x, top, factor), 0)
            else:
                total += inside.to(tl.int64)
            above = tl.minimum(above, tl.where(inside, key, 0x7FFFFFFF))
            below = tl.maximum(below, tl.where(inside, -0x80000000, key))
        enough = tl.sum(total, 0) >= need
        low = tl.where(enough, tl.min(above, 0).to(tl.int64), low)
        high = tl.where(enough, high, tl.max(below, 0).to(tl.int64))
    return low


@triton.jit
def _candidates(
    logits, vocab, top, factor, k, p, values, ids, MAX: tl.constexpr, PIVOTS: tl.constexpr,
    PIVOT_TILE: tl.constexpr, COMPACT_TILE: tl.constexpr,
):  # fmt: skip
    """Puts a set that holds every token to keep into scratch if a small one is found.

    Returns how many tokens to look at, whether they are in scratch, and the row's mass.
    """
    counts, masses = _pivot_sums(logits, vocab, top, factor, PIVOTS, PIVOT_TILE)
    index = tl.arange(0, PIVOTS)
    mass = tl.sum(tl.where(index == PIVOTS - 1, masses, 0.0), 0)
    holds = tl.where(k > 0, counts >= k, masses >= p * mass * 1.001) | (index == PIVOTS - 1)
    chosen = tl.min(tl.where(holds & (counts <= MAX), index, PIVOTS), 0)
    compact = chosen < PIVOTS
    reach = tl.exp2(chosen.to(tl.float32)) * 1.4426950408889634
    reach = tl.where(chosen == PIVOTS - 1, float("inf"), reach)
    n = vocab
    if compact:
        n = _compact(logits, vocab, top, factor, reach, values, ids, MAX, COMPACT_TILE)
    return n, compact, mass


@triton.jit
def _draw_row(logits, vocab, top, factor, threshold, least, seed, position, TILE: tl.constexpr):
    """Token id of the largest noisy logit among those kept, over the whole row."""
    best = tl.full([TILE], float("-inf"), tl.float32)
    best_id = tl.full([TILE], 0x7FFFFFFF, tl.int32)
    for first in range(0, vocab, TILE):
        at = first + tl.arange(0, TILE)
        x = _load_logits(logits, at, vocab)
        z = (x - top) * factor
        noisy = z - log2_exponential(neighbour_words(first, seed, position, TILE))
        better = (x >= threshold) & (z >= least) & (at < vocab) & (noisy > best)
        best = tl.where(better, noisy, best)
        best_id = tl.where(better, at, best_id)
    return tl.min(tl.where(best == tl.max(best, 0), best_id, 0x7FFFFFFF), 0)


@triton.jit
def _draw_scratch(values, ids, n, top, factor, threshold, least, seed, position, TILE: tl.constexpr):
    """The same over the row's scratch."""
    best = tl.full([TILE], float("-inf"), tl.float32)
    best_id = tl.full([TILE], 0x7FFFFFFF, tl.int32)
    for first in range(0, n, TILE):
        at = first + tl.arange(0, TILE)
        x = tl.load(values + at, mask=at < n, other=float("-inf"))
        token = tl.load(ids + at, mask=at < n, other=0)
        z = (x - top) * factor
        noisy = z - log2_exponential(scattered_words(token, seed, position))
        better = (x >= threshold) & (z >= least) & (at < n) & (noisy > best)
        best = tl.where(better, noisy, best)
        best_id = tl.where(better, token, best_id)
    return tl.min(tl.where(best == tl.max(best, 0), best_id, 0x7FFFFFFF), 0)


@triton.jit
def _filter_and_draw(
    logits, vocab, top, factor, k, p, least, seed, position, values, ids, threshold_at,
    MAX: tl.constexpr, PIVOTS: tl.constexpr, TILE: tl.constexpr, PIVOT_TILE: tl.constexpr, COMPACT_TILE: tl.constexpr,
):  # fmt: skip
    n, compact, row_mass = _candidates(
        logits, vocab, top, factor, k, p, values, ids, MAX, PIVOTS, PIVOT_TILE, COMPACT_TILE
    )
    high = _key(top)
    low = tl.full([], LOWEST_KEY, tl.int64)
    mass = (row_mass * 1099511627776.0).to(tl.int64)
    if k > 0:
        low = _search(logits, values, n, compact, low, high, top, factor, k.to(tl.int64), False, TILE)
        if p < 1.0:
            mass = _mass_above(logits, values, n, compact, low, top, factor, TILE)
    if p < 1.0:
        need = tl.maximum((p.to(tl.float64) * mass.to(tl.float64)).to(tl.int64), 1)
        low = _search(logits, values, n, compact, low, high, top, factor, need, True, TILE)
    threshold = _value(low)
    tl.store(threshold_at, threshold)
    token = 0
    if compact:
        token = _draw_scratch(values, ids, n, top, factor, threshold, least, seed, position, TILE)
    else:
        token = _draw_row(logits, vocab, top, factor, threshold, least, seed, position, TILE)
    return token


@triton.jit
def _sample_kernel(
    logits, temperature, top_k, top_p, min_p, seeds, positions, values, ids, thresholds, tokens, vocab, l_row,
    MAX: tl.constexpr, PIVOTS: tl.constexpr, TILE: tl.constexpr, PIVOT_TILE: tl.constexpr, COMPACT_TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * l_row
    top, token = _largest(logits, vocab, TILE)
    warmth = tl.load(temperature + row)
    k = tl.load(top_k + row)
    p = tl.load(top_p + row)
    share = tl.load(min_p + row)
    tl.store(thresholds + row, float("-inf"))
    if (warmth > 0.0) & (k != 1) & (top > float("-inf")):
        factor = 1.4426950408889634 / warmth
        least = tl.where(share > 0.0, tl.log2(tl.maximum(share, 1e-37)), float("-inf"))
        seed = tl.load(seeds + row)
        position = tl.load(positions + row)
        k = tl.where(k < vocab, k, 0)
        if (k > 0) | (p < 1.0):
            token = _filter_and_draw(
                logits, vocab, top, factor, k, p, least, seed, position, values + row * MAX, ids + row * MAX,
                thresholds + row, MAX, PIVOTS, TILE, PIVOT_TILE, COMPACT_TILE,
            )  # fmt: skip
        else:
            token = _draw_row(logits, vocab, top, factor, float("-inf"), least, seed, position, TILE)
    tl.store(tokens + row, token.to(tl.int64))


@triton.jit
def _greedy_kernel(logits, tokens, vocab, l_row, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    _, token = _largest(logits + row * l_row, vocab, TILE)
    tl.store(tokens + row, token.to(tl.int64))


def _check_logits(logits: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    check_dtype("logits", logits, QUERY_DTYPES)
    check_shape("logits", logits, (None, None))
    check_last_stride("logits", logits)
    if not 1 <= logits.shape[1] <= MAX_VOCAB:
        raise KernelValueError(f"logits has {logits.shape[1]} tokens in a row; works: 1 to {MAX_VOCAB}")
    out = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device) if out is None else out
    check_out("out", out, (logits.shape[0],), torch.int64, logits.device)
    return out


def _tile(vocab: int, most: int) -> int:
    return max(16, min(most, triton.next_power_of_2(vocab)))


def greedy(logits: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Token id int64 `[rows]` of the largest logit of each row of `[rows, vocab]`, the lowest id among equals.

    NaN counts as -inf. Raises KernelValueError or KernelTypeError naming the argument.
    """
    out = _check_logits(logits, out)
    if logits.shape[0]:
        vocab = logits.shape[1]
        _greedy_kernel[(logits.shape[0],)](logits, out, vocab, logits.stride(0), TILE=_tile(vocab, 8192), num_warps=16)
    return out


def sample(
    logits: torch.Tensor,
    parameters: SamplingTensors,
    *,
    out: torch.Tensor | None = None,
    thresholds: torch.Tensor | None = None,
) -> torch.Tensor:
    """One token id int64 `[rows]` drawn from each row of logits `[rows, vocab]`; temperature 0 or top-k 1 is greedy.

    `thresholds` float32 `[rows]` receives the smallest logit that top-k and top-p let through (-inf for all). Scratch
    is 128 KiB a row. NaN counts as -inf. Raises KernelValueError or KernelTypeError naming the argument.
    """
    out = _check_logits(logits, out)
    parameters.check(logits)
    rows, vocab = logits.shape
    thresholds = torch.empty(rows, device=logits.device) if thresholds is None else thresholds
    check_out("thresholds", thresholds, (rows,), torch.float32, logits.device)
    if rows == 0:
        return out
    values = torch.empty(rows, MAX_CANDIDATES, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, MAX_CANDIDATES, dtype=torch.int32, device=logits.device)
    _sample_kernel[(rows,)](
        logits, *(tensor for _, tensor in parameters.named()), values, ids, thresholds, out, vocab, logits.stride(0),
        MAX=MAX_CANDIDATES, PIVOTS=NUM_PIVOTS, TILE=_tile(vocab, 2048), PIVOT_TILE=_tile(vocab, 1024),
        COMPACT_TILE=_tile(vocab, 4096), num_warps=16,
    )  # fmt: skip
    return out
