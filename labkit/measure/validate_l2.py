"""Compares the simulated L2 with counters of the card that is here; usage: python -m labkit.measure.validate_l2 OUT.

Counts every point in this process, some of them under ncu too, fits what counts of the L2 to the counts, holds the fit
against launches that it has not seen, and writes the table with its bars. One card, about three minutes. With
--counted FILE the launches are those that FILE counted before, and no card is needed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from labkit.errors import LabkitError
from labkit.measure.attention_shape import AttentionShape, BatchShape
from labkit.measure.card_ceilings import measure_ceilings
from labkit.measure.counters import CORE_METRICS, mean_metrics, to_counters
from labkit.measure.cupti import CountersUnavailable
from labkit.measure.l2_calibration import L2Calibration, load_l2_calibration
from labkit.measure.l2_fit import Compared, compare, error_bars, fit, read_counted
from labkit.measure.l2_points import NCU_POINTS, UNPACKED, Point, points, unseen_points
from labkit.measure.l2_simulator import simulate_attention
from labkit.measure.ncu import run_ncu
from labkit.measure.replay import KERNELS, NUM_LAUNCHES, replay_command
from labkit.measure.roofline import Ceilings
from labkit.measure.run_record import Counters
from labkit.results import at_least, at_most, write_results
from labkit.specs.gpu_catalogue import catalogue_gpu
from labkit.specs.gpu_spec import GpuSpec

# Which reads of several SMs meet on their way to the L2 differs from launch to launch.
REPEATS = 12


def simulation_time_s(gpu: GpuSpec) -> float:
    """Seconds of one core for a decode step of 64 × 4096, in the variant that takes longest."""
    shape, spent = AttentionShape(BatchShape.decode(64, 4096), num_heads=64, block_size=8), []
    for variant in ("full", "tile = block", UNPACKED):
        simulate_attention(shape, gpu, variant)
        begin = time.process_time()
        simulate_attention(shape, gpu, variant)
        spent.append(time.process_time() - begin)
    return max(spent)


@dataclass(frozen=True)
class Validation:
    """All that was counted and simulated on one card.

    Attributes:
        compared: the grid, to which `calibration` was fitted; `unseen`: launches that the fit has not seen.
        refused: rows for what the card did not let count.
        simulation_s: of one core, for a decode step of 64 × 4096; `count_s`: median of counting a launch.
        ncu: counters of some points under ncu, by name; `ncu_refused`: why there are none.
    """

    gpu: GpuSpec
    compared: tuple[Compared, ...]
    unseen: tuple[Compared, ...]
    calibration: L2Calibration
    refused: tuple[dict[str, Any], ...] = ()
    simulation_s: float | None = None
    count_s: float | None = None
    ncu: Mapping[str, Counters] = field(default_factory=dict)
    ncu_refused: str = "not asked yet"

    @property
    def by_both(self) -> tuple[tuple[str, Counters, Counters], ...]:
        """Name, CUPTI's counters and ncu's of each point that both counted."""
        here = {each.point.name: each.counted for each in self.compared}
        return tuple((name, here[name], other) for name, other in self.ncu.items() if name in here)


def summary(found: Validation) -> dict[str, dict[str, Any]]:
    """The bars: at least 60 points; hit rate within 3 points mean and 8 worst and DRAM bytes within 5 % mean, for
    launches that the fit has not seen too; both measuring methods within 1 point and 2 % of bytes of each other; a
    decode step simulated in 0.2 s of a core and a launch counted in less than a second."""
    hits = [100 * abs(other.l2_hit_rate - here.l2_hit_rate) for _, here, other in found.by_both]
    volumes = [100 * abs(other.dram_bytes / here.dram_bytes - 1) for _, here, other in found.by_both]
    return {
        "points": at_least(len(found.compared), 60),
        **error_bars(found.compared),
        **{f"unseen_{name}": entry for name, entry in error_bars(found.unseen).items()},
        "methods_hit_rate_differ_points": at_most(max(hits, default=None), 1),
        "methods_dram_bytes_differ_percent": at_most(max(volumes, default=None), 2),
        "simulated_decode_64x4096_cpu_s": at_most(found.simulation_s, 0.2),
        "counted_launch_median_s": at_most(found.count_s, 1.0),
    }


def count_all(
    gpu: GpuSpec, asked: Sequence[Point]
) -> tuple[list[tuple[Point, Counters]], list[dict[str, Any]], list[float]]:
    """Counters of every point that the card lets count, rows for those that it does not, and seconds of each count."""
    import torch

    from labkit.measure.kernel_launches import CardCounter

    counter, counted, refused, seconds = CardCounter(REPEATS, CORE_METRICS), [], [], []
    for point in asked:
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
    counted, refused, seconds = count_all(gpu, points())
    others, more_refused, _ = count_all(gpu, unseen_points())
    calibration = fit(gpu, counted) if counted else load_l2_calibration(gpu)
    ceilings = measure_ceilings()
    compared, unseen = (compare(gpu, launches, calibration, ceilings) for launches in (counted, others))
    found = Validation(
        gpu, compared, unseen, calibration, (*refused, *more_refused), simulation_time_s(gpu),
        statistics.median(seconds) if seconds else None,
    )  # fmt: skip
    write_validation(out, found)
    by_ncu, why_not = count_with_ncu(gpu, NCU_POINTS)
    bars = write_validation(out, replace(found, ncu=by_ncu, ncu_refused=why_not))
    for name, entry in bars.items():
        print(f"{name}: {entry['value']} {'met' if entry['ok'] else 'missed'}")
    return 0 if all(entry["ok"] for entry in bars.values()) else 1


def simulate_again(counters_file: str, out: str) -> int:
    """Fit, compare and write anew what `counters_file` counted on a card; 0 where every bar is met.

    Raises:
        FileFormatError: it is no such file.
    """
    card, counted = read_counted(counters_file)
    others = read_counted(counters_file, "unseen", unseen_points())[1]
    content = json.loads(Path(counters_file).read_text("utf-8"))
    gpu, values = catalogue_gpu(card), {name: entry["value"] for name, entry in content["summary"].items()}
    calibration, ceilings = fit(gpu, counted), Ceilings(**content["rows"][0]["roofline"]["ceilings"])
    compared, unseen = (compare(gpu, launches, calibration, ceilings) for launches in (counted, others))
    bars = write_validation(out, Validation(
        gpu, compared, unseen, calibration, tuple(content["refused"]), values["simulated_decode_64x4096_cpu_s"],
        values["counted_launch_median_s"], {each["name"]: Counters(**each["ncu"]) for each in content["both_methods"]},
        content["ncu_refused"],
    ), f" --counted {counters_file}", counted_at=content.get("counted_at", content["made"]))  # fmt: skip
    return 0 if all(entry["ok"] for entry in bars.values()) else 1


def write_validation(out: str, found: Validation, options: str = "", **more: Any) -> dict[str, dict[str, Any]]:
    """The table with its bars, which are returned; `options` of the command, `more` entries of the file."""
    both = [{"name": name, "cupti": asdict(here), "ncu": asdict(other)} for name, here, other in found.by_both]
    bars, command = summary(found), f"python -m labkit.measure.validate_l2 results/counters.json{options}"
    write_results(
        out, command=command, summary=bars, card=found.gpu.name,
        rows=[_row(each) for each in found.compared], unseen=[_row(each) for each in found.unseen],
        calibration=asdict(found.calibration), refused=list(found.refused), both_methods=both,
        ncu_refused=found.ncu_refused, **more,
    )  # fmt: skip
    return bars


def _row(each: Compared) -> dict[str, Any]:
    point = each.point
    return {
        "name": point.name, "variant": point.variant, "group": point.group, "kv_bytes": point.shape.kv_bytes,
        "roofline": asdict(each.roofline), "counted": asdict(each.counted), "simulated": asdict(each.simulated),
        "hit_error_points": each.hit_error, "dram_bytes_error_percent": each.bytes_error,
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: OUT.json [--counted FILE]."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", help="where the table goes, such as results/counters.json")
    parser.add_argument("--counted", help="a table whose launches were counted before: simulate them again, no card")
    options = parser.parse_args(arguments)
    try:
        return simulate_again(options.counted, options.out) if options.counted else validate(options.out)
    except LabkitError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
