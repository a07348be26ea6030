"""Sampling without a sort: temperature, top-k, top-p and min-p as thresholds on the logits, then a Gumbel draw.

Programs for parts of a row find its largest logit; then they draw where no filter is set, or else count what lies near
the largest and write the few logits that provably hold the answer to scratch; one program a row finishes. The
thresholds are searched by halving the order-preserving integer keys of float32 and snapping to the nearest logit after
each count, over the scratch, or over the row where too many logits may be kept. Order of the filters as in
transformers: temperature, top-k, top-p, min-p. Tokens of equal logit are kept or dropped together. The draw is argmax
of log p + Gumbel noise (Maddison et al. 2014, arXiv 1411.0030) with noise of `random_bits`: it depends on nothing but
logits, parameters, seed and position. Reference: `reference_ops.sample`.
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
from labkit_kernels.logit_search import key_range, load_logits, threshold_of_few, threshold_of_many
from labkit_kernels.ops import begin, overlap_options
from labkit_kernels.random_bits import log2_exponential, neighbour_words, scattered_words

# Numbers of a row in each of its two scratch arrays: candidates, and at the end what is kept of each part.
SCRATCH = 16384
NUM_PIVOTS = 8
# Logits of a part, and of one where few parts would leave the card idle.
PART, SMALL_PART, FEW_PARTS, LARGE_VOCAB = 8192, 2048, 256, 2**20
# Candidates that registers hold; how a row is walked through where more may be kept.
FEW, ROW_TILE, ROW_STAGES, FINISH_WARPS = 2048, 8192, 1, 16
MAX_VOCAB = 2**22
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
def _lowest_of_largest(values, ids):
    """Largest value and the lowest id that has it."""
    top = tl.max(values, 0)
    return top, tl.min(tl.where(values == top, ids, 0x7FFFFFFF), 0)


@triton.jit
def _row_top(floats, ints, parts, PARTS: tl.constexpr, WIDTH: tl.constexpr):
    """Largest logit of a row and its lowest token id, from those of its parts."""
    at = tl.arange(0, PARTS)
    tops = tl.load(floats + at * WIDTH, mask=at < parts, other=float("-inf"))
    return _lowest_of_largest(tops, tl.load(ints + at * WIDTH, mask=at < parts, other=0x7FFFFFFF))


@triton.jit
def _reach(index, PIVOTS: tl.constexpr):
    """Distance of each pivot to the top, in base-2 units: 1, 2, 4, 6, 8, 10, 13 nats, the last infinite."""
    nats = tl.where(index < 2, index + 1, tl.where(index < 6, 2 * index, 13)).to(tl.float32)
    return tl.where(index == PIVOTS - 1, float("inf"), nats * 1.4426950408889634)


@triton.jit
def _pivot_sums(
    logits, first, vocab, top, factor,
    BY_MASS: tl.constexpr, PIVOTS: tl.constexpr, PART: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """How many tokens of a part, and BY_MASS what mass relative to the top's, lie within each pivot's reach of it."""
    reach = _reach(tl.arange(0, PIVOTS), PIVOTS)
    counts = tl.zeros([PIVOTS, TILE], tl.int32)
    masses = tl.zeros([PIVOTS, TILE], tl.float32)
    for start in range(0, PART, TILE):
        at = first + start + tl.arange(0, TILE)
        z = (load_logits(logits, at, vocab) - top) * factor
        near = (z[None, :] >= -reach[:, None]) & (at < vocab)[None, :]
        counts += near.to(tl.int32)
        if BY_MASS:
            masses += tl.where(near, tl.exp2(z)[None, :], 0.0)
    return tl.sum(counts, 1), tl.sum(masses, 1)


@triton.jit
def _compact(
    logits, first, vocab, top, factor, reach, count, values, ids, MAX: tl.constexpr, PART: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Writes the logits of a part within `reach` of the top and their ids to the row's scratch from `count` on.

    Lines of 128 that one warp holds are counted by themselves: a running sum along a whole tile waits for each warp.
    """
    LINE: tl.constexpr = min(TILE, 128)
    inside = tl.arange(0, TILE // LINE)[:, None] * LINE + tl.arange(0, LINE)[None, :]
    for start in range(0, PART, TILE):
        at = first + start + inside
        x = load_logits(logits, at, vocab)
        keep = ((x - top) * factor >= -reach) & (at < vocab)
        one = keep.to(tl.int32)
        lines = tl.sum(one, 1)
        where = (count + tl.cumsum(lines, 0) - lines)[:, None] + tl.cumsum(one, 1) - one
        tl.store(values + where, x, mask=keep & (where < MAX))
        tl.store(ids + where, at, mask=keep & (where < MAX))
        count += tl.sum(lines, 0)


@triton.jit
def _candidates(
    floats, ints, part, parts, vocab, k, p,
    MAX: tl.constexpr, PIVOTS: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The smallest pivot whose tokens hold every one to keep, if they fit into scratch.

    Returns how many tokens to look at, whether they are in scratch, the row's mass, the pivot's reach, and how many of
    the tokens lie before part `part`.
    """
    at, index = tl.arange(0, PARTS)[:, None], tl.arange(0, PIVOTS)[None, :]
    there = (at < parts) & (index < PIVOTS)
    part_counts = tl.load(ints + at * WIDTH + 2 + index, mask=there, other=0)
    masses = tl.sum(tl.load(floats + at * WIDTH + 2 + index, mask=there, other=0.0), 0)
    counts = tl.sum(part_counts, 0)
    index = tl.arange(0, PIVOTS)
    mass = tl.sum(tl.where(index == PIVOTS - 1, masses, 0.0), 0)
    holds = tl.where(k > 0, counts >= k, masses >= p * mass * 1.001) | (index == PIVOTS - 1)
    chosen = tl.min(tl.where(holds & (counts <= MAX), index, PIVOTS), 0)
    compact = chosen < PIVOTS
    n = tl.where(compact, tl.sum(tl.where(index == chosen, counts, 0), 0), vocab)
    before = tl.sum(tl.sum(tl.where((at < part) & (index == chosen)[None, :], part_counts, 0), 1), 0)
    return n, compact, mass, _reach(chosen, PIVOTS), before


@triton.jit
def _bracket(
    floats, ints, parts, top, factor, k, p, PIVOTS: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Keys between which the threshold of top-k, else of top-p, lies, and what the logits from each on are worth."""
    at, index = tl.arange(0, PARTS)[:, None], tl.arange(0, PIVOTS)[None, :]
    there = (at < parts) & (index < PIVOTS)
    counts = tl.sum(tl.load(ints + at * WIDTH + 2 + index, mask=there, other=0), 0).to(tl.float32)
    masses = tl.sum(tl.load(floats + at * WIDTH + 2 + index, mask=there, other=0.0), 0)
    index = tl.arange(0, PIVOTS)
    by_count = k > 0
    need = tl.where(by_count, k.to(tl.float32), p * tl.sum(tl.where(index == PIVOTS - 1, masses, 0.0), 0))
    margin = tl.where(by_count, 0.0, 0.001)
    worth = tl.where(by_count, counts, masses)
    low = tl.min(tl.where((worth >= need * (1.0 + margin)) | (index == PIVOTS - 1), index, PIVOTS), 0)
    high = tl.max(tl.where(worth < need * (1.0 - margin), index, -1), 0)
    low_key, high_key = key_range(top, factor, _reach(low, PIVOTS), tl.where(high < 0, 0.0, _reach(high, PIVOTS)))
    return (
        low_key, high_key, tl.sum(tl.where(index == low, worth, 0.0), 0),
        tl.sum(tl.where(index == high, worth, 0.0), 0),
    )  # fmt: skip


@triton.jit
def _draw(logits, first, last, vocab, top, factor, threshold, least, seed, position, TILE: tl.constexpr):
    """Largest noisy logit among those kept from `first` to `last`, and its token id."""
    best = tl.full([TILE], float("-inf"), tl.float32)
    best_id = tl.full([TILE], 0x7FFFFFFF, tl.int32)
    for start in range(first, last, TILE):
        at = start + tl.arange(0, TILE)
        x = load_logits(logits, at, vocab)
        z = (x - top) * factor
        noisy = z - log2_exponential(neighbour_words(start, seed, position, TILE))
        better = (x >= threshold) & (z >= least) & (at < vocab) & (noisy > best)
        best = tl.where(better, noisy, best)
        best_id = tl.where(better, at, best_id)
    return _lowest_of_largest(best, best_id)


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
    return _lowest_of_largest(best, best_id)


@triton.jit
def _filter_and_draw(
    logits, vocab, n, compact, mass, top, factor, k, p, least, seed, position, values, ids, threshold_at, floats, ints,
    parts, FEW: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, PIVOTS: tl.constexpr, PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    if compact & (n <= FEW):
        threshold = threshold_of_few(values, n, mass, top, factor, k, p, FEW)
        _best, token = _draw_scratch(values, ids, n, top, factor, threshold, least, seed, position, FEW)
    else:
        low, high, worth_low, worth_high = _bracket(floats, ints, parts, top, factor, k, p, PIVOTS, PARTS, WIDTH)
        if compact:
            threshold = threshold_of_many(
                values, n, low, high, worth_low, worth_high, mass, top, factor, k, p, TILE, STAGES
            )
            _best, token = _draw_scratch(values, ids, n, top, factor, threshold, least, seed, position, FEW)
        else:
            threshold = threshold_of_many(
                logits, vocab, low, high, worth_low, worth_high, mass, top, factor, k, p, TILE, STAGES
            )
            _best, token = _draw(logits, 0, vocab, vocab, top, factor, threshold, least, seed, position, TILE)
    tl.store(threshold_at, threshold)
    return token


@triton.jit
def _row_parameters(temperature, top_k, top_p, min_p, row, vocab, top):
    """Whether to draw, whether top-k or top-p filter, 1 / temperature in base 2, k (0 = all), p, least log2 share."""
    warmth = tl.load(temperature + row)
    k = tl.load(top_k + row)
    p = tl.load(top_p + row)
    share = tl.load(min_p + row)
    draws = (warmth > 0.0) & (k != 1) & (top > float("-inf"))
    k = tl.where(k < vocab, k, 0)
    factor = 1.4426950408889634 / tl.where(warmth > 0.0, warmth, 1.0)
    least = tl.where(share > 0.0, tl.log2(tl.maximum(share, 1e-37)), float("-inf"))
    return draws, (k > 0) | (p < 1.0), factor, k, p, least


@triton.jit
def _tops_kernel(
    logits, temperature, top_k, top_p, min_p, seeds, positions, floats, ints, vocab, l_row, parts,
    PART: tl.constexpr, WIDTH: tl.constexpr, MAX: tl.constexpr, DRAW_TILE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Largest logit of each part of a row and its lowest token id; with a DRAW_TILE also the draw of a row without any
    filter, relative to the part's own top."""
    begin(OVERLAP)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    logits += row * l_row
    first = part * PART
    at = first + tl.arange(0, PART)
    top, token = _lowest_of_largest(load_logits(logits, at, vocab), at)
    here = row * (MAX + parts * WIDTH) + MAX + part * WIDTH
    tl.store(floats + here, top)
    tl.store(ints + here, token)
    if DRAW_TILE > 0:
        draws, filters, factor, _k, _p, least = _row_parameters(temperature, top_k, top_p, min_p, row, vocab, top)
        if draws & (not filters) & (least == float("-inf")):
            best, token = _draw(
                logits, first, tl.minimum(first + PART, vocab), vocab, top, factor, float("-inf"), least,
                tl.load(seeds + row), tl.load(positions + row), DRAW_TILE,
            )  # fmt: skip
            tl.store(floats + here + 1, best)
            tl.store(ints + here + 1, token)


@triton.jit
def _greedy_kernel(
    floats, ints, tokens, parts, PARTS: tl.constexpr, WIDTH: tl.constexpr, MAX: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    here = row * (MAX + parts * WIDTH) + MAX
    _top, token = _row_top(floats + here, ints + here, parts, PARTS, WIDTH)
    tl.store(tokens + row, token.to(tl.int64))


@triton.jit
def _parts_kernel(
    logits, temperature, top_k, top_p, min_p, seeds, positions, floats, ints, vocab, l_row, parts,
    PART: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr, PIVOTS: tl.constexpr, PIVOT_TILE: tl.constexpr,
    DRAW_TILE: tl.constexpr, MAX: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Counts and masses near the top for a row that top-k or top-p filters; a part's draw for one with min-p alone."""
    begin(OVERLAP)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    logits += row * l_row
    values = floats + row * (MAX + parts * WIDTH)
    ids = ints + row * (MAX + parts * WIDTH)
    floats, ints = values + MAX, ids + MAX
    top, _top_id = _row_top(floats, ints, parts, PARTS, WIDTH)
    draws, filters, factor, k, _p, least = _row_parameters(temperature, top_k, top_p, min_p, row, vocab, top)
    first = part * PART
    if draws:
        if filters:
            # Top-k finds its threshold by counting alone.
            if k > 0:
                counts, masses = _pivot_sums(logits, first, vocab, top, factor, False, PIVOTS, PART, PIVOT_TILE)
            else:
                counts, masses = _pivot_sums(logits, first, vocab, top, factor, True, PIVOTS, PART, PIVOT_TILE)
            tl.store(ints + part * WIDTH + 2 + tl.arange(0, PIVOTS), counts)
            tl.store(floats + part * WIDTH + 2 + tl.arange(0, PIVOTS), masses)
        elif least > float("-inf"):
            best, token = _draw(
                logits, first, tl.minimum(first + PART, vocab), vocab, top, factor, float("-inf"), least,
                tl.load(seeds + row), tl.load(positions + row), DRAW_TILE,
            )  # fmt: skip
            tl.store(floats + part * WIDTH + 1, best)
            tl.store(ints + part * WIDTH + 1, token)


@triton.jit
def _compact_kernel(
    logits, temperature, top_k, top_p, min_p, floats, ints, vocab, l_row, parts,
    MAX: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr, PIVOTS: tl.constexpr,
    TILE: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Puts a set that holds every token to keep into scratch if a small one was found, in the order of the ids."""
    begin(OVERLAP)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    values = floats + row * (MAX + parts * WIDTH)
    ids = ints + row * (MAX + parts * WIDTH)
    floats, ints = values + MAX, ids + MAX
    top, _top_id = _row_top(floats, ints, parts, PARTS, WIDTH)
    draws, filters, factor, k, p, _least = _row_parameters(temperature, top_k, top_p, min_p, row, vocab, top)
    if draws & filters:
        _n, compact, _mass, reach, before = _candidates(
            floats, ints, part, parts, vocab, k, p, MAX, PIVOTS, PARTS, WIDTH
        )
        if compact:
            _compact(
                logits + row * l_row, part * PART, vocab, top, factor, reach, before, values, ids, MAX, PART, TILE,
            )  # fmt: skip


@triton.jit
def _sample_kernel(
    logits, temperature, top_k, top_p, min_p, seeds, positions, floats, ints, thresholds, tokens, vocab, l_row, parts,
    MAX: tl.constexpr, PARTS: tl.constexpr, WIDTH: tl.constexpr, PIVOTS: tl.constexpr,
    FEW: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The token of each row."""
    begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    values = floats + row * (MAX + parts * WIDTH)
    ids = ints + row * (MAX + parts * WIDTH)
    floats, ints = values + MAX, ids + MAX
    top, token = _row_top(floats, ints, parts, PARTS, WIDTH)
    draws, filters, factor, k, p, least = _row_parameters(temperature, top_k, top_p, min_p, row, vocab, top)
    tl.store(thresholds + row, float("-inf"))
    if draws:
        if filters:
            n, compact, mass, _far, _before = _candidates(
                floats, ints, 0, parts, vocab, k, p, MAX, PIVOTS, PARTS, WIDTH
            )
            token = _filter_and_draw(
                logits + row * l_row, vocab, n, compact, mass, top, factor, k, p, least, tl.load(seeds + row),
                tl.load(positions + row), values, ids, thresholds + row, floats, ints, parts, FEW, TILE, STAGES,
                PIVOTS, PARTS, WIDTH,
            )  # fmt: skip
        else:
            at = tl.arange(0, PARTS)
            best = tl.load(floats + at * WIDTH + 1, mask=at < parts, other=float("-inf"))
            if least == float("-inf"):
                part_top = tl.load(floats + at * WIDTH, mask=at < parts, other=float("-inf"))
                best = tl.where(part_top > float("-inf"), best + (part_top - top) * factor, float("-inf"))
            _best, token = _lowest_of_largest(best, tl.load(ints + at * WIDTH + 1, mask=at < parts, other=0x7FFFFFFF))
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


@dataclass(frozen=True)
class _Parts:
    """How rows are cut, and what is kept of each part: its top, its draw, and what is near the row's top."""

    size: int
    count: int
    width: int
    floats: torch.Tensor
    ints: torch.Tensor

    @classmethod
    def make(cls, logits: torch.Tensor, width: int, room: int = 0) -> _Parts:
        """`width` numbers of each part, at the end of `room` numbers a row."""
        rows, vocab = logits.shape
        is_small = rows * triton.cdiv(vocab, PART) < FEW_PARTS and vocab <= LARGE_VOCAB
        size = _tile(vocab, SMALL_PART if is_small else PART)
        count = triton.cdiv(vocab, size)
        shape, kinds = (rows, max(room, count * width)), (torch.float32, torch.int32)
        return cls(size, count, width, *(torch.empty(shape, dtype=kind, device=logits.device) for kind in kinds))

    @property
    def grid(self) -> tuple[int, int]:
        return self.floats.shape[0], self.count

    @property
    def num_candidates(self) -> int:
        """Numbers of a row before those of the parts."""
        return self.floats.shape[1] - self.count * self.width

    def options(self) -> dict[str, object]:
        """Compile-time facts and how to launch."""
        facts = {"PARTS": max(2, triton.next_power_of_2(self.count)), "WIDTH": self.width}
        return facts | {"MAX": self.num_candidates} | overlap_options(self.floats.device)

    def find_tops(self, logits: torch.Tensor, parameters: list[torch.Tensor] | None = None) -> None:
        """The first launch; with parameters it draws too."""
        options = self.options()
        del options["PARTS"]
        _tops_kernel[self.grid](
            logits, *(parameters or [logits] * 6), self.floats, self.ints, logits.shape[1], logits.stride(0),
            self.count, PART=self.size, DRAW_TILE=min(self.size, 2048) if parameters else 0, num_warps=8, **options,
        )  # fmt: skip


def greedy(logits: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Token id int64 `[rows]` of the largest logit of each row of `[rows, vocab]`, the lowest id among equals.

    NaN counts as -inf. Raises KernelValueError or KernelTypeError naming the argument.
    """
    out = _check_logits(logits, out)
    if logits.shape[0]:
        parts = _Parts.make(logits, 1)
        parts.find_tops(logits)
        _greedy_kernel[(logits.shape[0],)](parts.floats, parts.ints, out, parts.count, num_warps=1, **parts.options())
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
    parts = _Parts.make(logits, 2 + NUM_PIVOTS, SCRATCH)
    named = [tensor for _, tensor in parameters.named()]
    facts = (vocab, logits.stride(0), parts.count)
    common = parts.options() | {"PIVOTS": NUM_PIVOTS}
    parts.find_tops(logits, named)
    _parts_kernel[parts.grid](
        logits, *named, parts.floats, parts.ints, *facts, PART=parts.size, PIVOT_TILE=min(parts.size, 1024),
        DRAW_TILE=min(parts.size, 2048), num_warps=8, **common,
    )  # fmt: skip
    _compact_kernel[parts.grid](
        logits, *named[:4], parts.floats, parts.ints, *facts, PART=parts.size,
        TILE=min(parts.size, 4096), num_warps=8, **common,
    )  # fmt: skip
    _sample_kernel[(rows,)](
        logits, *named, parts.floats, parts.ints, thresholds, out, *facts,
        FEW=_tile(vocab, FEW), TILE=_tile(vocab, ROW_TILE), STAGES=ROW_STAGES, num_warps=FINISH_WARPS, **common,
    )  # fmt: skip
    return out
