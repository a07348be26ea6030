"""Thresholds on a row of logits: the number that a count or a mass of larger ones determines, found without a sort."""

from __future__ import annotations

import triton
import triton.language as tl

# `float_key` of -inf.
LOWEST_KEY = tl.constexpr(-2139095041)


@triton.jit
def float_key(x):
    """Integers in the order of the float32 numbers."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def float_of_key(key):
    key = key.to(tl.int32)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def load_logits(logits, at, vocab):
    """Float32 logits, -inf past the end and for NaN; -0 becomes 0 so that equal numbers have equal keys."""
    x = tl.load(logits + at, mask=at < vocab, other=float("-inf")).to(tl.float32) + 0.0
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def _source(logits, values, at, n, compact):
    """Logits of the row, or of its scratch where `compact`."""
    x = tl.load(values + at, mask=(at < n) & compact, other=float("-inf"))
    return tl.maximum(x, load_logits(logits, at, tl.where(compact, 0, n)))


@triton.jit
def _fixed_mass(x, top, factor):
    """exp(scaled distance to the top) in units of 2⁻⁴⁰: whole numbers, so sums do not depend on their order."""
    return (tl.exp2((x - top) * factor) * 1099511627776.0).to(tl.int64)


@triton.jit
def mass_above(logits, values, n, compact, key, top, factor, TILE: tl.constexpr):
    total = tl.zeros([TILE], tl.int64)
    for first in range(0, n, TILE):
        at = first + tl.arange(0, TILE)
        x = _source(logits, values, at, n, compact)
        total += tl.where((at < n) & (float_key(x) >= key), _fixed_mass(x, top, factor), 0)
    return tl.sum(total, 0)


@triton.jit
def search_key(
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
            key = float_key(x)
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
