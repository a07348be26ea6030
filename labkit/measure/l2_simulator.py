"""Trace-driven simulation of the L2 under one attention launch: hit rate, DRAM bytes and what the roofline allows.

Programs start in launch order, as many at once as the card holds, the next one where one ends; each reads one tile of K
and V a step. The accesses in that order go through a least-recently-used cache of the capacity that counts on the card.
Before the L2, cards since Ampere coalesce reads of one line that come from several SMs at the same moment: these never
reach it, so they are neither hits nor misses. Where the L2 has two partitions, a line that SMs of both read is fetched
once and misses in each.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from labkit.errors import UnsupportedError
from labkit.measure.attention_launch import Programs, build_launches
from labkit.measure.attention_shape import AttentionShape
from labkit.measure.l2_cache import hit_share, stack_distances
from labkit.measure.l2_calibration import LINE_BYTES, L2Calibration, load_l2_calibration
from labkit.measure.roofline import Ceilings, Roofline, card_ceilings, roofline
from labkit.measure.run_record import Counters
from labkit.specs.gpu_spec import GpuSpec
from labkit.text import plain

MAX_ACCESSES = 131_072
# A card starts programs cluster by cluster of SMs, on Hopper 8 in the first and then 16 (18 in some); reads of one
# cluster meet, those of different ones do not. Of programs side by side the first four start closest together.
CLUSTER_SMS, FIRST_CLUSTER_SMS, ROW_OF_NEIGHBOURS = 16, 8, 4
AGES_OF_A_FACTOR_E, LONG_ROW_POWER = 12, 0.5


@dataclass(frozen=True)
class L2Prediction:
    """What the simulation says of one launch.

    Attributes:
        asked_bytes: bytes that the programs read.
        l2_read_bytes: those of them that reach the L2.
        kv_bytes: K and V when each is read once, the least that DRAM must give.
        num_programs, num_accesses: size of the trace.
        uses_calibrated_l2: whether the card's L2 was fitted to its counters.
    """

    counters: Counters
    roofline: Roofline
    asked_bytes: float
    l2_read_bytes: float
    kv_bytes: int
    num_programs: int
    num_accesses: int
    uses_calibrated_l2: bool


@dataclass(frozen=True)
class Repeats:
    """Bytes of repeated reads of one tile in the same step, float64 `[ages]` each, by how far programs have drifted.

    Attributes:
        ages: float64 `[ages]`, 1 + steps since the launch began, times the square of programs of an SM over their pace.
        next_to: by programs of the first wave next to each other in one cluster of SMs, the first few of a row.
        further: by those that follow in the same row.
        same_cluster: by other programs of the first wave in one cluster.
        later: by programs next to each other that start later, those of slow kernels more than once.
    """

    ages: np.ndarray
    next_to: np.ndarray
    further: np.ndarray
    same_cluster: np.ndarray
    later: np.ndarray


@dataclass(frozen=True)
class AccessTrace:
    """A launch's reads of K and V, in the order in which they reach the L2; equal ones of one step are one entry.

    Attributes:
        names: int64 `[n]`, which tile.
        sizes: float64 `[n]` bytes.
        readers: int64 `[n]`, programs that read the tile in that step; `clusters`: groups of them whose reads may come
            from either half of the card: a cluster of SMs in the first wave, a program later.
        row_bytes: of K of one token and head, which lie side by side.
        asked_bytes: bytes of all, repeats of one step included.
        repeats: bytes of the repeats by who reads and when.
    """

    names: np.ndarray
    sizes: np.ndarray
    readers: np.ndarray
    clusters: np.ndarray
    row_bytes: float
    asked_bytes: float
    repeats: Repeats

    def coalesced_bytes(self, known: L2Calibration) -> float:
        """Bytes that are asked for and never reach the L2.

        Programs drift apart like random walks from their common start, faster the more of them share an SM: at age a
        the reads that still meet are 1 − exp(−c/√a). Rows shorter than a line take more requests, which meet less, and
        longer ones are several lines, each of which must be met.
        """
        shorter = min(1.0, self.row_bytes / LINE_BYTES) ** known.coalesced_row_power
        longer = max(1.0, self.row_bytes / LINE_BYTES) ** LONG_ROW_POWER
        reach, repeats = shorter / longer / np.sqrt(self.repeats.ages), self.repeats
        return float(
            -(repeats.next_to * np.expm1(-known.lockstep_next * reach)).sum()
            - (repeats.further * np.expm1(-known.lockstep_further * reach)).sum()
            - (repeats.same_cluster * np.expm1(-known.lockstep_cluster * reach)).sum()
            + shorter * known.coalesced_later * repeats.later.sum()
        )


@dataclass(frozen=True)
class _Stays:
    """How often what is fetched is read before it is pushed out: `reads[i]` times for `fetched_bytes[i]`."""

    reads: np.ndarray
    fetched_bytes: np.ndarray

    def second_misses(self, share_that_arrives: float) -> float:
        """Bytes that miss once more, in the L2's other partition: a line's home is in either, and reads come from both.

        With n reads both partitions are asked with probability 1 - 2^(1-n); in half of these the home was first.
        """
        arriving = 1 + (self.reads - 1) * share_that_arrives
        return float((self.fetched_bytes * (0.5 - 2.0**-arriving)).sum())


def simulate_attention(
    shape: AttentionShape,
    gpu: GpuSpec,
    variant: str = "full",
    *,
    calibration: L2Calibration | None = None,
    ceilings: Ceilings | None = None,
    programs_per_sm: int | None = None,
) -> L2Prediction:
    """Simulated counters of one attention launch (one layer) on `gpu`.

    Args:
        variant: one of `attention_shape.VARIANTS`.
        calibration: of the card's L2; None reads the package's.
        ceilings: for the roofline; None takes the data sheet's.
        programs_per_sm: programs that an SM holds at once; None estimates it.

    Raises:
        UnsupportedError: the card's L2, SMs or bandwidth are not known.
        OutOfRangeError, UnknownNameError: as `build_launches`.
    """
    if not gpu.l2_bytes:
        raise UnsupportedError(
            f"the L2 of {plain(gpu.name, 60)} is not known", works="a card of the catalogue, such as H100", knob="gpu"
        )
    known = calibration or load_l2_calibration(gpu)
    return simulate_calibrations(shape, gpu, variant, (known,), ceilings=ceilings, programs_per_sm=programs_per_sm)[0]


def simulate_calibrations(
    shape: AttentionShape, gpu: GpuSpec, variant: str, calibrations: Sequence[L2Calibration], *,
    ceilings: Ceilings | None = None, programs_per_sm: int | None = None,
) -> tuple[L2Prediction, ...]:  # fmt: skip
    """One prediction for each calibration, from one trace; arguments as `simulate_attention`."""
    launches = build_launches(shape, gpu, variant, programs_per_sm)
    trace = access_trace(shape, launches, gpu.sm_count or 1)
    distances = stack_distances(trace.names, trace.sizes)
    asked = trace.asked_bytes + sum(launch.query_bytes[0] + launch.merge_bytes for launch in launches)
    queries = sum(launch.query_bytes[1] for launch in launches)
    repeats = trace.asked_bytes - float(trace.sizes.sum())
    asked_queries = sum(launch.query_bytes[0] for launch in launches)
    found, caches = [], {}
    for known in calibrations:
        key = (known.capacity_share, known.ways)
        if key not in caches:
            misses = 1 - hit_share(distances, (gpu.l2_bytes or 0) * known.capacity_share, known.ways)
            caches[key] = _stays(trace, misses, asked_queries, queries)
        missed, coalesced = float(caches[key].fetched_bytes.sum()), trace.coalesced_bytes(known)
        reads = asked - coalesced
        second = caches[key].second_misses(1 - coalesced / repeats if repeats else 1) if known.partitions == 2 else 0.0
        floor = roofline(missed, shape.flops, ceilings or card_ceilings(gpu, known))
        counters = Counters(
            method=f"simulated (LRU of tiles, {variant}; L2 {'calibrated' if known.calibrated else 'uncalibrated'})",
            card=gpu.name,
            l2_hit_rate=max(0.0, 1 - (missed + second) / reads),
            dram_bytes=missed,
            dram_bytes_per_s=floor.dram_bytes_per_s,
            kernel_time_s=floor.floor_s,
            l2_read_bytes=reads,
        )
        num_programs = sum(len(launch.start) for launch in launches)
        found.append(
            L2Prediction(
                counters, floor, asked, reads, shape.kv_bytes, num_programs, len(trace.names), known.calibrated
            )
        )
    return tuple(found)


def access_trace(
    shape: AttentionShape, launches: Sequence[Programs], sm_count: int, max_accesses: int = MAX_ACCESSES
) -> AccessTrace:
    """The reads of launches that begin together, by the step at which they happen.

    Args:
        max_accesses: a longer trace takes several tiles as one.
    """
    total = sum(int(np.sum(-(-(launch.end - launch.start) // launch.tile))) for launch in launches)
    factor = max(1, -(-total // max_accesses))
    resident = sum(min(len(launch.start), launch.slots) for launch in launches)
    parts, crowding, meeting, before = [], [], [], 0
    for launch in launches:
        parts.append(_expand(shape, launch, factor, before))
        crowding.append(np.full(len(parts[-1][0]), (max(1.0, resident / sm_count) / launch.pace) ** 2))
        meeting.append(np.full(len(parts[-1][0]), launch.meets_later))
        before += len(launch.start)
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    when, names, _, program, is_first = columns
    # By step, then tile, then the cluster that reads; those that start later come after all clusters, in launch order.
    key = when * (int(names.max()) + 1) + names if len(names) else names
    cluster = np.where(is_first, (program % sm_count + FIRST_CLUSTER_SMS) // CLUSTER_SMS, sm_count)
    order = np.lexsort((cluster, key))
    key, cluster, age = key[order], cluster[order], ((1.0 + factor * when) * np.concatenate(crowding))[order]
    _, names, sizes, program, is_first = (column[order] for column in columns)
    is_repeat = np.diff(key, prepend=-1) == 0
    first = np.flatnonzero(~is_repeat)
    in_cluster = is_repeat & is_first & (np.diff(cluster, prepend=-1) == 0)
    largest = np.maximum.reduceat(sizes, first) if len(first) else sizes
    clusters = np.add.reduceat((~in_cluster).astype(np.int64), first) if len(first) else first
    return AccessTrace(
        names[first], largest.astype(np.float64), np.diff(np.append(first, len(names))), clusters, shape.row_bytes,
        float(sizes.sum()),
        _repeats(sizes, age, np.diff(program, prepend=-2) == 1, in_cluster,
                 is_repeat * ~is_first * np.concatenate(meeting)[order]),
    )  # fmt: skip


def _repeats(
    sizes: np.ndarray, age: np.ndarray, is_next: np.ndarray, in_cluster: np.ndarray, later: np.ndarray
) -> Repeats:
    """Repeats by who reads, from the reads of a trace in its order.

    Args:
        is_next: the program follows that of the read before; `in_cluster`: so does its cluster, and both start at once.
        later: how much the read counts as one of a program that starts later, 0 if it is none.
    """
    is_row = is_next & in_cluster
    starts = np.flatnonzero(~is_row)
    place = np.arange(len(sizes)) - np.repeat(starts, np.diff(np.append(starts, len(sizes))))
    is_close = is_row & (place < ROW_OF_NEIGHBOURS)
    # Ages that differ by less than a tenth are one.
    bins = np.round(np.log(age) * AGES_OF_A_FACTOR_E).astype(np.int64)
    count = int(bins.max(initial=0)) + 1
    shares = (is_close, is_row & ~is_close, in_cluster & ~is_row, later * is_next)
    parts = (np.bincount(bins, sizes * share, minlength=count) for share in shares)
    return Repeats(np.exp(np.arange(count) / AGES_OF_A_FACTOR_E), *parts)


def _stays(trace: AccessTrace, misses: np.ndarray, asked_queries: int, queries: int) -> _Stays:
    """Reads of each fetch: of every tile all its reads over all its fetches, and of the queries.

    Args:
        misses: `[n]` share of each entry that is not in the cache.
    """
    _, tile = np.unique(trace.names, return_inverse=True)
    fetches = np.bincount(tile, misses)
    reads = np.bincount(tile, trace.clusters) / np.maximum(fetches, 1e-9)
    fetched = np.bincount(tile, misses * trace.sizes)
    # Most tiles are alike; two digits of the number of reads are plenty.
    alike, kind = np.unique(np.round(reads, 2), return_inverse=True)
    of_queries = asked_queries / queries if queries else 1.0
    return _Stays(np.append(alike, of_queries), np.append(np.bincount(kind, fetched), float(queries)))


def _expand(shape: AttentionShape, launch: Programs, factor: int, before: int) -> tuple[np.ndarray, ...]:
    """Step, name, bytes and program of every read of a launch, `factor` tiles at a time, and whether that program is
    one of those that start at once; `before` programs of other launches come first."""
    stride = launch.tile * factor
    steps = -(-(launch.end - launch.start) // stride)
    program = np.repeat(np.arange(len(steps)), steps)
    step = np.arange(len(program)) - np.repeat(np.cumsum(steps) - steps, steps)
    begin = launch.start[program] + step * stride
    stop = np.minimum(begin + stride, launch.end[program])
    when = start_steps(steps, launch.slots)[program] + step
    tokens = max(shape.batch.context_lens)
    parts = []
    # Sequence 0 of the names holds what all share; a tile over the prefix's end is a shared and an own piece.
    for is_shared in (True, False):
        low = begin if is_shared else np.maximum(begin, shape.shared_tokens)
        high = np.minimum(stop, shape.shared_tokens) if is_shared else stop
        some = np.flatnonzero(high > low)
        sequence = np.zeros_like(some) if is_shared else launch.sequence[program[some]] + 1
        name = (sequence * shape.num_kv_heads + launch.kv_head[program[some]]) * tokens + begin[some]
        is_first = program[some] < launch.slots
        parts.append((when[some], name, (high - low)[some] * float(shape.head_bytes), program[some] + before, is_first))
    return tuple(np.concatenate(columns) for columns in zip(*parts, strict=True))


def start_steps(durations: np.ndarray, slots: int) -> np.ndarray:
    """Step at which each program begins when `slots` run at once and the next one takes the first free place.

    Args:
        durations: int `[programs]` steps of each, in launch order.
    """
    count = len(durations)
    starts = np.zeros(count, dtype=np.int64)
    if count <= slots:
        return starts
    if durations.min() == durations.max():
        return np.arange(count) // slots * int(durations[0])
    ends = durations[:slots].tolist()
    heapq.heapify(ends)
    for index in range(slots, count):
        begin = heapq.heappop(ends)
        starts[index] = begin
        heapq.heappush(ends, begin + int(durations[index]))
    return starts
