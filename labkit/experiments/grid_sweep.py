"""Sweeps: every combination of some knobs, run one after another, kept as an Optuna study so that they can go on."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from labkit.errors import DoesNotFitError, OutOfRangeError
from labkit.experiments.worker import OnEvent
from labkit.measure.run_record import RunRecord
from labkit.measure.summary import summarize
from labkit.specs.engine_config import EngineConfig

if TYPE_CHECKING:
    import optuna

    from labkit.experiments.lab_session import LabSession

MAX_RUNS = 10_000
RUN_ID, KNOBS = "labkit_run_id", "labkit_knobs"


def grid_points(grid: Mapping[str, Sequence[Any]], base: EngineConfig) -> list[dict[str, Any]]:
    """Every combination of the grid's values, the last knob fastest, each checked against the knob's range.

    Raises:
        UnknownNameError, OutOfRangeError: a knob or value that `EngineConfig` refuses, an empty grid, or more than
            10,000 combinations.
    """
    values = {name: list(entries) for name, entries in grid.items()}
    total = 1
    for entries in values.values():
        total *= len(entries)
    if not values or not 1 <= total <= MAX_RUNS:
        raise OutOfRangeError(
            "a sweep needs one combination of values at least", needed=f"1 to {MAX_RUNS:,}", available=f"{total:,}"
        )
    points = [dict(zip(values, combination, strict=True)) for combination in itertools.product(*values.values())]
    for point in points:
        base.replace(**point)
    return points


def sweep(
    session: LabSession,
    grid: Mapping[str, Sequence[Any]],
    *,
    study_name: str | None = None,
    storage: str | None = None,
    on_event: OnEvent | None = None,
    **run_settings: Any,
) -> tuple[tuple[RunRecord, ...], optuna.Study]:
    """Run every combination of `grid` on the session and return the new records and the study.

    The study's value is output tokens per second, larger is better. A combination that does not fit is no failure of
    the sweep: it is told as pruned with the constraint "fits in memory" violated.

    Args:
        grid: knob → values.
        study_name, storage: Optuna's; with both, a sweep that was cancelled or killed goes on where it stopped.
        run_settings: passed to `LabSession.run`.

    Raises:
        UnknownNameError, OutOfRangeError: from the grid, before anything runs.
        WorkerError, StoreError: as `LabSession.run`; what was done is in the study and in the store.
    """
    import optuna

    points = grid_points(grid, session.config)
    # Optuna's own lines on stderr would land in the middle of a notebook or a progress bar.
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(
        study_name=study_name,
        storage=storage,
        load_if_exists=True,
        direction="maximize",
        sampler=optuna.samplers.RandomSampler(seed=0),
    )
    left = _left_to_do(study, points)
    records = []
    start = time.monotonic()
    for count, point in enumerate(left):
        if on_event is not None:
            on_event(sweep_progress("sweep", count, len(left), time.monotonic() - start))
        record = _run_point(session, study, point, {name: list(values) for name, values in grid.items()}, on_event,
                            run_settings)  # fmt: skip
        if record is not None:
            records.append(record)
            if record.status == "cancelled":
                break
    return tuple(records), study


def sweep_progress(phase: str, done: int, total: int, elapsed_s: float) -> dict[str, Any]:
    """The "progress" event of a sweep that has done so many of its runs."""
    left_s = elapsed_s / done * (total - done) if done else None
    return {
        "type": "progress", "phase": phase, "done": done, "total": total, "unit": "runs", "elapsed_s": elapsed_s,
        "remaining_s": left_s,
    }  # fmt: skip


def _left_to_do(study: optuna.Study, points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    from optuna.trial import TrialState

    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        # Left by a process that was killed in the middle of this combination: it is run again.
        study.tell(trial.number, state=TrialState.FAIL)
    done = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED))
    known = [trial.user_attrs.get(KNOBS) for trial in done]
    return [point for point in points if point not in known]


def _run_point(
    session: LabSession,
    study: optuna.Study,
    point: dict[str, Any],
    grid: dict[str, list[Any]],
    on_event: OnEvent | None,
    run_settings: dict[str, Any],
) -> RunRecord | None:
    from optuna.trial import TrialState

    study.enqueue_trial(point)
    trial = study.ask()
    for name, values in grid.items():
        trial.suggest_categorical(name, values)
    trial.set_user_attr(KNOBS, point)
    try:
        record = session.run(session.config.replace(**point), on_event=on_event, **run_settings)
    except DoesNotFitError as error:
        trial.set_user_attr("error", str(error))
        trial.set_constraint("fits in memory", 1.0)
        study.tell(trial, state=TrialState.PRUNED)
        return None
    except BaseException:
        study.tell(trial, state=TrialState.FAIL)
        raise
    trial.set_user_attr(RUN_ID, record.run_id)
    if record.status == "cancelled":
        study.tell(trial, state=TrialState.FAIL)
        return record
    trial.set_constraint("fits in memory", 0.0)
    study.tell(trial, summarize(record).output_tokens_per_s or 0.0)
    return record
