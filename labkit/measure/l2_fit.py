"""What counts of a card's L2, fitted to counted launches, and how far the fit reaches beyond them.

Usage: python -m labkit.measure.l2_fit COUNTERS OUT. COUNTERS is what `labkit.measure.validate_l2` wrote on a card; OUT
has each series of launches simulated by a fit to all others. No card, about a minute.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from labkit.errors import FileFormatError, LabkitError
from labkit.measure.l2_calibration import L2Calibration, load_l2_calibration
from labkit.measure.l2_points import Point, points
from labkit.measure.l2_simulator import simulate_attention, simulate_calibrations
from labkit.measure.roofline import Ceilings, Roofline, card_ceilings, roofline
from labkit.measure.run_record import Counters
from labkit.results import at_most, write_results
from labkit.specs.gpu_catalogue import catalogue_gpu
from labkit.specs.gpu_spec import GpuSpec
from labkit.text import plain

CAPACITY_SHARES = (0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.8, 0.9, 1.0)
WAYS: tuple[int | None, ...] = (None, 4, 16)
# How long programs keep step, what meets later, and the power of short rows: see `L2Calibration`.
LOCKSTEPS = {"next": (0.0, 20.0, 28.0, 32.0, 40.0), "further": (0.0, 6.0, 12.0), "cluster": (0.0, 3.0, 6.0, 8.0)}
LATER_SHARES, ROW_POWERS = (0.0, 0.1, 0.15, 0.2), (1.0, 1.5, 2.0)


@dataclass(frozen=True)
class Compared:
    """A point with its counters, both ways; `counted` is the card's, `roofline` what its ceilings allow for them."""

    point: Point
    counted: Counters
    simulated: Counters
    roofline: Roofline

    @property
    def hit_error(self) -> float:
        """Simulated less counted hit rate, in percentage points."""
        return 100 * (self.simulated.l2_hit_rate - self.counted.l2_hit_rate)

    @property
    def bytes_error(self) -> float:
        """Simulated over counted DRAM bytes less one, in percent."""
        return 100 * (self.simulated.dram_bytes / self.counted.dram_bytes - 1)


def fit(gpu: GpuSpec, counted: Sequence[tuple[Point, Counters]]) -> L2Calibration:
    """The share of the L2 and its ways by the DRAM bytes, then what is coalesced before it by the hit rate; the worst
    launches count most."""
    return fits_without(gpu, counted, (None,))[0]


def fits_without(
    gpu: GpuSpec, counted: Sequence[tuple[Point, Counters]], groups: Sequence[str | None]
) -> tuple[L2Calibration, ...]:
    """For each of `groups` the fit to the launches of all others; None leaves none out."""
    base = load_l2_calibration(gpu)
    caches = [replace(base, capacity_share=share, ways=ways) for share in CAPACITY_SHARES for ways in WAYS]
    volumes = _errors(gpu, counted, caches, lambda here, there: here.dram_bytes / there.dram_bytes - 1)
    by_cache: dict[L2Calibration, tuple[list[L2Calibration], np.ndarray]] = {}
    found = []
    for group in groups:
        kept = np.array([point.group != group for point, _ in counted])
        cache = caches[int(volumes[kept].sum(0).argmin())]
        if cache not in by_cache:
            tried = _coalescing(cache)
            hits = _errors(gpu, counted, tried, _hit_and_read_error)
            by_cache[cache] = tried, hits
        tried, hits = by_cache[cache]
        best = tried[int(hits[kept].sum(0).argmin())]
        found.append(replace(best, calibrated=True, source=f"fitted to {kept.sum()} counted launches"))
    return tuple(found)


def _coalescing(cache: L2Calibration) -> list[L2Calibration]:
    found = itertools.product(*LOCKSTEPS.values(), LATER_SHARES, ROW_POWERS)
    return [
        replace(
            cache, lockstep_next=beside, lockstep_further=further, lockstep_cluster=cluster, coalesced_later=later,
            coalesced_row_power=power,
        )
        for beside, further, cluster, later, power in found
    ]  # fmt: skip


def _hit_and_read_error(here: Counters, there: Counters) -> float:
    """The larger of the hit rate's error and a third of that of the reads, which a rate alone may hide."""
    reads = (here.l2_read_bytes or 0) / (there.l2_read_bytes or 1) - 1
    return max(abs(here.l2_hit_rate - there.l2_hit_rate), abs(reads) / 3)


def _errors(
    gpu: GpuSpec, counted: Sequence[tuple[Point, Counters]], tried: Sequence[L2Calibration],
    error: Callable[[Counters, Counters], float],
) -> np.ndarray:  # fmt: skip
    """Fourth powers of `error` of simulated and counted, float64 `[counted, tried]`."""
    rows = [
        [error(each.counters, counters) for each in simulate_calibrations(point.shape, gpu, point.variant, tried)]
        for point, counters in counted
    ]
    return np.array(rows) ** 4


def compare(
    gpu: GpuSpec, counted: Sequence[tuple[Point, Counters]], calibration: L2Calibration,
    ceilings: Ceilings | None = None,
) -> tuple[Compared, ...]:  # fmt: skip
    """Each counted point beside its simulation; `ceilings` of the card, None takes the data sheet's."""
    ceilings = ceilings or card_ceilings(gpu, calibration)
    return tuple(
        Compared(
            point, counters,
            simulate_attention(point.shape, gpu, point.variant, calibration=calibration).counters,
            roofline(counters.dram_bytes, point.shape.flops, ceilings, counters.kernel_time_s),
        )
        for point, counters in counted
    )  # fmt: skip


@dataclass(frozen=True)
class HeldOut:
    """The launches of one series, simulated by the fit to all others."""

    group: str
    calibration: L2Calibration
    compared: tuple[Compared, ...]


def held_out(gpu: GpuSpec, counted: Sequence[tuple[Point, Counters]]) -> tuple[HeldOut, ...]:
    """Every series of `counted`, in turn."""
    groups = list(dict.fromkeys(point.group for point, _ in counted))
    return tuple(
        HeldOut(group, fitted, compare(gpu, [each for each in counted if each[0].group == group], fitted))
        for group, fitted in zip(groups, fits_without(gpu, counted, groups), strict=True)
    )


def error_bars(compared: Sequence[Compared]) -> dict[str, dict[str, Any]]:
    """The bars of a comparison: hit rate within 3 points mean and 8 worst, DRAM bytes within 5 % mean."""
    hits = [abs(each.hit_error) for each in compared]
    volumes = [abs(each.bytes_error) for each in compared]
    return {
        "hit_rate_mean_error_points": at_most(statistics.fmean(hits) if hits else None, 3),
        "hit_rate_worst_error_points": at_most(max(hits, default=None), 8),
        "dram_bytes_mean_error_percent": at_most(statistics.fmean(volumes) if volumes else None, 5),
    }


def read_counted(
    path: str | os.PathLike[str], part: str = "rows", asked: Sequence[Point] | None = None
) -> tuple[str, list[tuple[Point, Counters]]]:
    """Card and counted launches of a file that `labkit.measure.validate_l2` wrote; launches of today's grid only.

    Args:
        part: "rows", or "unseen" with its points as `asked`.

    Raises:
        FileFormatError: no such file, or one of another form.
    """
    known = {field.name for field in dataclasses.fields(Counters)}
    try:
        content = json.loads(Path(path).read_text("utf-8"))
        rows = {row["name"]: row["counted"] for row in content[part]}
        counted = [
            (point, Counters(**{name: value for name, value in rows[point.name].items() if name in known}))
            for point in (points() if asked is None else asked)
            if point.name in rows
        ]
        return content["card"], counted
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise FileFormatError(f"{plain(path, 200)} has no counted launches: {plain(error, 120)}") from error


def write_held_out(counters_file: str, out: str) -> dict[str, dict[str, Any]]:
    """Fit without each series, write how far the others foretell it, and return the bars.

    Raises:
        FileFormatError: as `read_counted`.
    """
    card, counted = read_counted(counters_file)
    found = held_out(catalogue_gpu(card), counted)
    rows = [
        {"left_out": each.group, "launches": len(each.compared), "calibration": asdict(each.calibration)}
        | {name: entry["value"] for name, entry in error_bars(each.compared).items()}
        for each in found
    ]
    bars = error_bars([compared for each in found for compared in each.compared])
    command = f"python -m labkit.measure.l2_fit {counters_file} {out}"
    write_results(out, command=command, rows=rows, summary=bars, card=card)
    return bars


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: COUNTERS OUT; 0 where every bar is met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("counters", help="counted launches, such as results/counters.json")
    parser.add_argument("out", help="where the errors go, such as results/counters-held-out.json")
    options = parser.parse_args(arguments)
    try:
        bars = write_held_out(options.counters, options.out)
    except LabkitError as error:
        print(error, file=sys.stderr)
        return 2
    for name, entry in bars.items():
        print(f"{name}: {entry['value']} {'met' if entry['ok'] else 'missed'}")
    return 0 if all(entry["ok"] for entry in bars.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
