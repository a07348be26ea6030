"""Compares the simulated L2 with counters of the card that is here; usage: python -m labkit.measure.validate_l2 OUT.

Counts every point in this process, some of them under ncu too, fits what counts of the L2 to the counts, and writes the
table with the bars that it is held to. One card, about three minutes.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from labkit.errors import LabkitError
from labkit.measure.attention_shape import AttentionShape, BatchShape
from labkit.measure.card_ceilings import measure_ceilings
from labkit.measure.counters import CORE_METRICS, mean_metrics, to_counters
from labkit.measure.cupti import CountersUnavailable
from labkit.measure.l2_calibration import L2Calibration, load_l2_calibration
from labkit.measure.l2_simulator import simulate_attention, simulate_calibrations
from labkit.measure.ncu import run_ncu
from labkit.measure.replay import KERNELS, NUM_LAUNCHES, replay_command
from labkit.measure.roofline import Ceilings, Roofline, card_ceilings, roofline
from labkit.measure.run_record import Counters
from labkit.results import at_least, at_most, write_results
from labkit.specs.gpu_spec import GpuSpec

UNPACKED = "one program for each query head"
CAPACITY_SHARES = (0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.8, 0.9, 1.0)
WAYS: tuple[int | None, ...] = (None, 4, 16)
COALESCED_SHARES = (0.0, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6)
# Which reads of several SMs meet on their way to the L2 differs from launch to launch.
REPEATS = 5
# Points that ncu counts as well: plain, unpacked, shared and prefill.
NCU_POINTS = ("decode 64 × 4096 block 16 bfloat16", "decode 64 × 4096 group 4 unpacked", "shared 50 % of 32 × 4096",
              "prefill 4 × 2048 over 2048")  # fmt: skip


@dataclass(frozen=True)
class Point:
    """One launch to be compared."""

    name: str
    shape: AttentionShape
    variant: str


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


def points() -> tuple[Point, ...]:
    """The grid: block size, KV type, packing, group, shared prefix, prefill and batch size."""
    decode, found = BatchShape.decode, []
    for block, dtype in itertools.product((8, 16, 32, 64, 128, 256), ("bfloat16", "fp8")):
        shape = AttentionShape(decode(64, 4096), block_size=block, kv_cache_dtype=dtype)
        found.append(Point(f"decode 64 × 4096 block {block} {dtype}", shape, "full"))
    for block in (16, 32, 64, 128):
        shape = AttentionShape(decode(64, 4096), block_size=block)
        found.append(Point(f"decode 64 × 4096 tile = block {block}", shape, "tile = block"))
    for group, (variant, word) in itertools.product((1, 2, 4, 8), (("full", "packed"), (UNPACKED, "unpacked"))):
        shape = AttentionShape(decode(64, 4096), num_heads=8 * group)
        found.append(Point(f"decode 64 × 4096 group {group} {word}", shape, variant))
    for percent, variant in itertools.product((0, 25, 50, 75, 100), ("full", UNPACKED)):
        shape = AttentionShape(decode(32, 4096, 4096 * percent // 100))
        word = "" if variant == "full" else " unpacked"
        found.append(Point(f"shared {percent} % of 32 × 4096{word}", shape, variant))
    for percent, block in itertools.product((25, 50, 95), (16, 128)):
        shape = AttentionShape(decode(32, 8192, 8192 * percent // 100), block_size=block)
        found.append(Point(f"prefix kernel {percent} % of 32 × 8192 block {block}", shape, "shared prefix"))
    for batch, dtype in itertools.product((1, 4, 16, 128, 256), ("bfloat16", "fp8")):
        context = 32768 if batch == 1 else 1024 if batch >= 128 else 8192
        shape = AttentionShape(decode(batch, context), kv_cache_dtype=dtype)
        found.append(Point(f"decode {batch} × {context} {dtype}", shape, "full"))
    for (batch, new, cached), group in itertools.product(
        ((1, 8192, 0), (1, 2048, 14336), (4, 2048, 2048), (16, 512, 2048), (4, 512, 8192)), (1, 4)
    ):
        shape = AttentionShape(BatchShape((new + cached,) * batch, (new,) * batch), num_heads=8 * group)
        found.append(
            Point(f"prefill {batch} × {new} over {cached}{'' if group == 4 else ' group 1'}", shape, "prefill")
        )
    for percent, group in itertools.product((50, 100), (1, 4)):
        shape = AttentionShape(decode(64, 2048, 2048 * percent // 100), num_heads=8 * group, kv_cache_dtype="fp8")
        found.append(Point(f"shared {percent} % of 64 × 2048 fp8 group {group} unpacked", shape, UNPACKED))
    for batch in (8, 32, 128, 256):
        shape = AttentionShape(decode(batch, 2048, 1024), block_size=64)
        found.append(Point(f"shared 50 % of {batch} × 2048 block 64", shape, "full"))
    for shared in (1024, 2048):
        shape = AttentionShape(BatchShape((2560,) * 16, (512,) * 16, shared))
        found.append(Point(f"prefill 16 × 512 over 2048, {shared} shared", shape, "prefill"))
    return tuple(found)


def fit(gpu: GpuSpec, counted: Sequence[tuple[Point, Counters]]) -> L2Calibration:
    """The share of the L2 and its ways by the DRAM bytes, then what is coalesced before it by the hit rate; the worst
    launches count most."""
    base = load_l2_calibration(gpu)
    caches = [replace(base, capacity_share=share, ways=ways) for share in CAPACITY_SHARES for ways in WAYS]
    best = _best(gpu, counted, caches, lambda here, there: here.dram_bytes / there.dram_bytes - 1)
    tried = [
        replace(best, coalesced_near=near, coalesced_first=first, coalesced_far=far)
        for near, first, far in itertools.product(COALESCED_SHARES, repeat=3)
        if near + first + far <= 1
    ]
    best = _best(gpu, counted, tried, lambda here, there: here.l2_hit_rate - there.l2_hit_rate)
    return replace(best, calibrated=True, source=f"fitted to {len(counted)} counted launches")


def _best(
    gpu: GpuSpec, counted: Sequence[tuple[Point, Counters]], tried: Sequence[L2Calibration],
    error: Callable[[Counters, Counters], float],
) -> L2Calibration:  # fmt: skip
    """The calibration with the smallest sum of fourth powers of `error` of simulated and counted."""
    errors = [0.0] * len(tried)
    for point, counters in counted:
        for index, prediction in enumerate(simulate_calibrations(point.shape, gpu, point.variant, tried)):
            errors[index] += error(prediction.counters, counters) ** 4
    return tried[errors.index(min(errors))]


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


def simulation_time_s(gpu: GpuSpec) -> float:
    """Seconds of one core for a decode step of 64 × 4096, in the variant that takes longest."""
    shape, spent = AttentionShape(BatchShape.decode(64, 4096), num_heads=64, block_size=8), []
    for variant in ("full", "tile = block", UNPACKED):
        simulate_attention(shape, gpu, variant)
        begin = time.process_time()
        simulate_attention(shape, gpu, variant)
        spent.append(time.process_time() - begin)
    return max(spent)


def summary(
    compared: Sequence[Compared],
    agreement: Sequence[tuple[float, float]],
    simulation_s: float | None = None,
    count_s: float | None = None,
) -> dict[str, dict[str, Any]]:
    """The bars: at least 60 points, hit rate within 3 points mean and 8 worst, DRAM bytes within 5 % mean; both
    measuring methods within 1 point and 2 % of bytes of each other; a decode step simulated in 0.2 s of a core and a
    launch counted in less than a second."""
    hits = [abs(each.hit_error) for each in compared]
    volumes = [abs(each.bytes_error) for each in compared]
    return {
        "points": at_least(len(compared), 60),
        "hit_rate_mean_error_points": at_most(statistics.fmean(hits) if hits else None, 3),
        "hit_rate_worst_error_points": at_most(max(hits, default=None), 8),
        "dram_bytes_mean_error_percent": at_most(statistics.fmean(volumes) if volumes else None, 5),
        "methods_hit_rate_differ_points": at_most(max((abs(a) for a, _ in agreement), default=None), 1),
        "methods_dram_bytes_differ_percent": at_most(max((abs(b) for _, b in agreement), default=None), 2),
        "simulated_decode_64x4096_cpu_s": at_most(simulation_s, 0.2),
        "counted_launch_median_s": at_most(count_s, 1.0),
    }


def count_all(gpu: GpuSpec) -> tuple[list[tuple[Point, Counters]], list[dict[str, Any]], list[float]]:
    """Counters of every point that the card lets count, rows for those that it does not, and seconds of each count."""
    import torch

    from labkit.measure.kernel_launches import CardCounter

    counter, counted, refused, seconds = CardCounter(REPEATS, CORE_METRICS), [], [], []
    for point in points():
        begin = time.perf_counter()
        try:
            result = counter.count(point.shape, gpu, point.variant)
        except (LabkitError, ValueError, RuntimeError) as error:
            refused.append({"name": point.name, "error": str(error)[:300]})
            continue
        finally:
            torch.cuda.empty_cache()
        if result.counters is None or not result.counters.method.startswith("measured"):
            refused.append({"name": point.name, "error": "; ".join(result.notes)[:600]})
            continue
        counted.append((point, result.counters))
        seconds.append(time.perf_counter() - begin)
        print(f"{point.name}: {100 * result.counters.l2_hit_rate:.2f} % hits in {seconds[-1]:.2f} s", flush=True)
    return counted, refused, seconds


def count_with_ncu(gpu: GpuSpec, names: Sequence[str]) -> tuple[dict[str, Counters], str]:
    """Counters of the points called `names` on `gpu` under ncu, all in one process, and why there are none."""
    by_name = {point.name: point for point in points()}
    launches = [(by_name[name].shape, by_name[name].variant) for name in names]
    try:
        kernels = run_ncu(replay_command(launches), CORE_METRICS, kernel=KERNELS, card_uuid=gpu.uuid)
        if len(kernels) != NUM_LAUNCHES * len(names):
            raise CountersUnavailable(f"ncu saw {len(kernels)} launches", works=f"{NUM_LAUNCHES} of each point")
        return {
            name: to_counters(
                mean_metrics(kernels[index * NUM_LAUNCHES + 1 : (index + 1) * NUM_LAUNCHES]),
                "measured (ncu on a replay)", gpu.name,
            )
            for index, name in enumerate(names)
        }, ""  # fmt: skip
    except LabkitError as error:
        return {}, str(error)


def validate(out: str) -> int:
    """Count, fit, compare, write, count with ncu as well and write again; 0 where every bar is met."""
    from labkit.specs.gpu_loading import load_gpu

    gpu = load_gpu("auto")
    counted, refused, seconds = count_all(gpu)
    calibration = fit(gpu, counted) if counted else load_l2_calibration(gpu)
    compared = compare(gpu, counted, calibration, measure_ceilings())
    times = (simulation_time_s(gpu), statistics.median(seconds) if seconds else None)
    _write(out, gpu, compared, calibration, refused, times, {}, "not asked yet")
    others, why_not = count_with_ncu(gpu, NCU_POINTS)
    bars = _write(out, gpu, compared, calibration, refused, times, others, why_not)
    for name, entry in bars.items():
        print(f"{name}: {entry['value']} {'met' if entry['ok'] else 'missed'}")
    return 0 if all(entry["ok"] for entry in bars.values()) else 1


def _write(
    out: str, gpu: GpuSpec, compared: Sequence[Compared], calibration: L2Calibration, refused: list[dict[str, Any]],
    times: tuple[float | None, float | None], others: Mapping[str, Counters], why_not: str,
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """The table with its bars, which are returned."""
    by_name = {each.point.name: each.counted for each in compared}
    both = [(by_name[name], other) for name, other in others.items() if name in by_name]
    agreement = [
        (100 * (other.l2_hit_rate - here.l2_hit_rate), 100 * (other.dram_bytes / here.dram_bytes - 1))
        for here, other in both
    ]
    rows = [
        {"name": each.point.name, "variant": each.point.variant, "kv_bytes": each.point.shape.kv_bytes,
         "roofline": asdict(each.roofline),
         "counted": asdict(each.counted), "simulated": asdict(each.simulated), "hit_error_points": each.hit_error,
         "dram_bytes_error_percent": each.bytes_error}
        for each in compared
    ]  # fmt: skip
    twice = [
        {"name": name, "cupti": asdict(by_name[name]) if name in by_name else None, "ncu": asdict(other)}
        for name, other in others.items()
    ]
    bars = summary(compared, agreement, *times)
    write_results(
        out, command="python -m labkit.measure.validate_l2 results/counters.json", rows=rows, summary=bars,
        card=gpu.name, calibration=asdict(calibration), refused=refused, both_methods=twice, ncu_refused=why_not,
    )  # fmt: skip
    return bars


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: OUT.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", help="where the table goes, such as results/counters.json")
    options = parser.parse_args(arguments)
    try:
        return validate(options.out)
    except LabkitError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
