"""Thresholds on a row of logits: the number that a count or a mass of larger ones determines, found without a sort."""

from __future__ import annotations

import triton
import triton.language as tl

# `float_key` of -inf.
LOWEST_KEY = tl.constexpr(-2139095041)
# Guided steps of a search before plain halving.
GUESSES = tl.constexpr(24)


@triton.jit
def float_key(x):
    """Integers in the order of the float32 numbers."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def float_of_key(key):
    """The float32 number that `float_key` makes `key` of."""
    key = key.to(tl.int32)
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def load_logits(logits, at, vocab):
    """Float32 logits, -inf past the end and for NaN; -0 becomes 0 so that equal numbers have equal keys."""
    x = tl.load(logits + at, mask=at < vocab, other=float("-inf")).to(tl.float32) + 0.0
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def _both_sides(total, above, below, other_total, other_above, other_below):
    return total + other_total, tl.minimum(above, other_above), tl.maximum(below, other_below)


@triton.jit
def _middle(low, high):
    return low + (high - low + 1) // 2


@triton.jit
def _next(enough, low, high, above, below):
    return (
        tl.where(enough, float_key(above).to(tl.int64), low), tl.where(enough, high, float_key(below).to(tl.int64)),
    )  # fmt: skip


@triton.jit
def _halved(low, high, total, above, below, need):
    """low and high after a look at what is worth how much above the middle; snapped to the nearest logit."""
    total, above, below = tl.reduce((total, above, below), 0, _both_sides)
    return _next(total >= need, low, high, above, below)


@triton.jit
def _search_tile(x, worth, low, high, need):
    """Key of the largest logit from low to high with at least `need` worth at or above it; low is taken to have it."""
    while low < high:
        inside = x >= float_of_key(_middle(low, high))
        low, high = _halved(
            low, high, tl.where(inside, worth, 0), tl.where(inside, x, float("inf")),
            tl.where(inside, float("-inf"), x), need,
        )  # fmt: skip
    return low


@triton.jit
def _mass_above(source, n, least, top, factor, TILE: tl.constexpr, STAGES: tl.constexpr):
    total = tl.zeros([TILE], tl.float32)
    for first in tl.range(0, n, TILE, num_stages=STAGES):
        x = load_logits(source, first + tl.arange(0, TILE), n)
        total += tl.where(x >= least, tl.exp2((x - top) * factor), 0.0)
    return tl.sum(total, 0)


@triton.jit
def _between(low, high, worth_low, worth_high, need, step):
    """Key to look at next, above low and up to high: where a straight line between what is worth how much from low and
    from high on meets `need`, drawn a fifth to the middle so that both ends close in; after GUESSES steps the middle.
    """
    at, end = float_of_key(low), float_of_key(high)
    is_finite = at > float("-inf")
    at = tl.where(is_finite, at, end)
    share = (worth_low - need) / tl.maximum(worth_low - worth_high, 1e-30)
    share = tl.minimum(tl.maximum(share, 0.02), 0.98) * 0.8 + 0.1
    guess = tl.minimum(tl.maximum(float_key(at + (end - at) * share).to(tl.int64), low + 1), high)
    return tl.where((step < GUESSES) & is_finite, guess, _middle(low, high))


@triton.jit
def _search_row(
    source, n, low, high, worth_low, worth_high, top, factor, need,
    BY_MASS: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`_search_tile` over n logits in memory, each worth its mass or one; sums of fewer numbers are never larger.

    worth_low and worth_high: about what the logits from low and from high on are worth; they only guide the search.
    """
    step = 0
    while low < high:
        key = _between(low, high, worth_low, worth_high, need, step)
        step += 1
        middle = float_of_key(key)
        total = tl.zeros([TILE], tl.float32)
        above = tl.full([TILE], float("inf"), tl.float32)
        below = tl.full([TILE], float("-inf"), tl.float32)
        for first in tl.range(0, n, TILE, num_stages=STAGES):
            x = load_logits(source, first + tl.arange(0, TILE), n)
            inside = x >= middle
            worth = tl.exp2((x - top) * factor) if BY_MASS else 1.0
            total += tl.where(inside, worth, 0.0)
            above = tl.minimum(above, tl.where(inside, x, float("inf")))
            below = tl.maximum(below, tl.where(inside, float("-inf"), x))
        total, above, below = tl.reduce((total, above, below), 0, _both_sides)
        enough = total >= need
        worth_low, worth_high = tl.where(enough, total, worth_low), tl.where(enough, worth_high, total)
        low, high = _next(enough, low, high, above, below)
    return low


@triton.jit
def threshold_of_few(values, n, mass, top, factor, k, p, FEW: tl.constexpr):
    """Smallest logit that top-k and top-p let through, among n in scratch that registers hold.

    Masses are whole numbers of 2⁻⁴⁰, whose sums are exact.
    """
    at = tl.arange(0, FEW)
    x = load_logits(values, at, n)
    worth = (tl.exp2((x - top) * factor) * 1099511627776.0).to(tl.int64)
    mass = (mass * 1099511627776.0).to(tl.int64)
    low, high = tl.full([], LOWEST_KEY, tl.int64), float_key(top).to(tl.int64)
    if k > 0:
        low = _search_tile(x, (at < n).to(tl.int64), low, high, k)
        mass = tl.sum(tl.where(x >= float_of_key(low), worth, 0), 0)
    if p < 1.0:
        low = _search_tile(x, worth, low, high, tl.maximum((p.to(tl.float64) * mass.to(tl.float64)).to(tl.int64), 1))
    return float_of_key(low)


@triton.jit
def key_range(top, factor, reach_low, reach_high):
    """Keys that surely lie at or below all logits within reach_low of the top, and above all beyond reach_high."""
    far, near = reach_low / factor * 1.00001, reach_high / factor * 0.99999
    low = tl.where(reach_low < float("inf"), float_key(top - far).to(tl.int64), LOWEST_KEY)
    high = float_key(top).to(tl.int64)
    return low, tl.where(reach_high > 0.0, tl.minimum(float_key(top - near).to(tl.int64) + 1, high), high)


@triton.jit
def threshold_of_many(
    source, n, low, high, worth_low, worth_high, mass, top, factor, k, p,
    TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The same among n logits in memory, for the first of top-k and top-p between keys low and high.

    worth_low and worth_high: about how many logits, or what mass for top-p, lie from low and from high on.
    """
    if k > 0:
        low = _search_row(
            source, n, low, high, worth_low, worth_high, top, factor, k.to(tl.float32), False, TILE, STAGES
        )
        high, worth_high = float_key(top).to(tl.int64), 0.0
        if p < 1.0:
            mass = _mass_above(source, n, float_of_key(low), top, factor, TILE, STAGES)
            worth_low = mass
    if p < 1.0:
        low = _search_row(
            source, n, low, high, worth_low, worth_high, top, factor, tl.maximum(p * mass, 1e-12), True, TILE, STAGES
        )
    return float_of_key(low)
