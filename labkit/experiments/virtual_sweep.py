"""`simulate_sweep`: every combination of some knobs on a virtual GPU, with progress, and cancelled when asked."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from labkit.experiments.grid_sweep import grid_points
from labkit.experiments.virtual_run import IsCancelled, simulate
from labkit.experiments.worker import OnEvent
from labkit.measure.l2_step import with_simulated_counters
from labkit.measure.run_record import RunRecord
from labkit.specs.engine_config import EngineConfig
from labkit.specs.gpu_spec import GpuSpec
from labkit.specs.model_spec import ModelSpec
from labkit.specs.workload import Workload


def simulate_sweep(
    model: ModelSpec,
    gpu: GpuSpec,
    workload: Workload,
    grid: Mapping[str, Sequence[Any]],
    base: EngineConfig | None = None,
    *,
    on_event: OnEvent = lambda event: None,
    is_cancelled: IsCancelled = lambda: False,
    **settings: Any,
) -> tuple[RunRecord, ...]:
    """One record a combination, the last knob fastest; what does not fit is a failed record with its reason.

    Args:
        on_event: takes a "progress" event before each run and one at the end.
        is_cancelled: asked between and within runs; what was done until then is returned, a run cut short included.
        settings: passed to `simulate`.

    Raises:
        UnknownNameError, OutOfRangeError: a knob or value that does not exist, before anything runs.
    """
    base = base or EngineConfig()
    points = grid_points(grid, base)
    records: list[RunRecord] = []
    start = time.monotonic()
    for point in points:
        if is_cancelled():
            break
        on_event(_progress(len(records), len(points), time.monotonic() - start))
        name = ", ".join(f"{knob} {value}" for knob, value in point.items())
        record = simulate(
            model, gpu, workload, base.replace(**point), is_cancelled=is_cancelled, name=name,
            run_id=f"virtual-{len(records) + 1}", **settings,
        )  # fmt: skip
        records.append(with_simulated_counters(record, gpu))
    on_event(_progress(len(records), len(points), time.monotonic() - start))
    return tuple(records)


def _progress(done: int, total: int, elapsed_s: float) -> dict[str, Any]:
    left_s = elapsed_s / done * (total - done) if done else None
    return {
        "type": "progress", "phase": "simulate", "done": done, "total": total, "unit": "runs", "elapsed_s": elapsed_s,
        "remaining_s": left_s,
    }  # fmt: skip
