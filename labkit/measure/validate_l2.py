"""Compares the simulated L2 with counters of the card that is here; usage: python -m labkit.measure.validate_l2 OUT.

Counts every point in this process, some of them under ncu too, fits what counts of the L2 to the counts, and writes the
table with the bars that it is held to. One card, about three minutes.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from labkit.errors import LabkitError
from labkit.measure.attention_shape import AttentionShape, BatchShape
from labkit.measure.card_ceilings import measure_ceilings
from labkit.measure.counters import CORE_METRICS, mean_metrics, to_counters
from labkit.measure.cupti import CountersUnavailable
from labkit.measure.l2_calibration import L2Calibration, load_l2_calibration
from labkit.measure.l2_fit import Compared, compare, error_bars, fit
from labkit.measure.l2_points import NCU_POINTS, UNPACKED, Point, points
from labkit.measure.l2_simulator import simulate_attention
from labkit.measure.ncu import run_ncu
from labkit.measure.replay import KERNELS, NUM_LAUNCHES, replay_command
from labkit.measure.run_record import Counters
from labkit.results import at_least, at_most, write_results
from labkit.specs.gpu_spec import GpuSpec

# Which reads of several SMs meet on their way to the L2 differs from launch to launch.
REPEATS = 5


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
    return {
        "points": at_least(len(compared), 60),
        **error_bars(compared),
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
