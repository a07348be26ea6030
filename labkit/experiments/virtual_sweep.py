"""Every combination of some knobs on a virtual GPU, with progress, and cancelled when asked."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from labkit.errors import DoesNotFitError
from labkit.experiments.grid_sweep import grid_points, sweep_progress
from labkit.experiments.session_simulate import simulate_session
from labkit.experiments.virtual_run import IsCancelled, simulate
from labkit.experiments.worker import OnEvent
from labkit.measure.l2_step import with_simulated_counters
from labkit.measure.run_record import RunRecord
from labkit.specs import name_of
from labkit.specs.engine_config import EngineConfig
from labkit.specs.gpu_spec import GpuSpec
from labkit.specs.model_spec import ModelSpec
from labkit.specs.workload import Workload

if TYPE_CHECKING:
    from labkit.experiments.lab_session import LabSession


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
) -> Iterator[RunRecord]:
    """One record a combination, the last knob fastest; what does not fit is a failed record with its reason.

    Args:
        on_event: takes a "progress" event before each run and one at the end.
        is_cancelled: asked between and within runs; a run cut short is given as well, then it ends.
        settings: passed to `simulate`.

    Raises:
        UnknownNameError, OutOfRangeError: a knob or value that does not exist, before anything runs.
    """
    base = base or EngineConfig()

    def run(point: dict[str, Any], number: int) -> RunRecord:
        name = ", ".join(f"{knob} {value}" for knob, value in point.items())
        record = simulate(
            model, gpu, workload, base.replace(**point), is_cancelled=is_cancelled, name=name,
            run_id=f"virtual-{number}", **settings,
        )  # fmt: skip
        return with_simulated_counters(record, gpu)

    return _each(grid_points(grid, base), run, on_event, is_cancelled)


def simulate_session_sweep(
    session: LabSession, grid: Mapping[str, Sequence[Any]], *, on_event: OnEvent, is_cancelled: IsCancelled
) -> Iterator[RunRecord]:
    """As `simulate_sweep` on the session's model, card, traffic and settings, with records as `simulate_session` gives;
    what does not fit gives none, but a "log" event that says why.

    Raises:
        UnknownNameError, OutOfRangeError: as `simulate_sweep`.
        UnsupportedError, WorkerError: as `simulate_session`.
    """

    def run(point: dict[str, Any], number: int) -> RunRecord | None:
        config = session.config.replace(**point)
        name = name_of(config, session.config)
        try:
            return simulate_session(
                session, config, name=name, on_event=lambda event: None, is_cancelled=is_cancelled
            )  # fmt: skip
        except DoesNotFitError as error:
            on_event({"type": "log", "level": "warning", "message": f"{name}: {error}"})
            return None

    return _each(grid_points(grid, session.config), run, on_event, is_cancelled)


def _each(
    points: Sequence[dict[str, Any]],
    run: Callable[[dict[str, Any], int], RunRecord | None],
    on_event: OnEvent,
    is_cancelled: IsCancelled,
) -> Iterator[RunRecord]:
    start, done = time.monotonic(), 0
    for number, point in enumerate(points, 1):
        if is_cancelled():
            break
        on_event(sweep_progress("simulate", done, len(points), time.monotonic() - start))
        record = run(point, number)
        done = number
        if record is not None:
            yield record
    on_event(sweep_progress("simulate", done, len(points), time.monotonic() - start))
