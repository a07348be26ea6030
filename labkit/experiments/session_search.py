"""`search_session`: the guided search on a session, kept as an Optuna study so that it can go on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from labkit.engine.step_constants import StepConstants
from labkit.errors import LabkitError, OutOfRangeError, UnsupportedError
from labkit.experiments.grid_sweep import KNOBS, RUN_ID, grid_points
from labkit.experiments.search import Outcome, Point, SearchResult, guided_search
from labkit.experiments.virtual_run import VirtualOptions, simulate
from labkit.experiments.worker import OnEvent
from labkit.measure.run_record import RunRecord
from labkit.measure.summary import summarize
from labkit.text import nearest

if TYPE_CHECKING:
    import optuna

    from labkit.experiments.lab_session import LabSession

GOALS = ("output_tokens_per_s", "requests_per_s")
_LATENCIES: Mapping[str, Callable[[Any], Any]] = {
    "ttft_p99_s": lambda summary: summary.ttft_s,
    "inter_token_p99_s": lambda summary: summary.inter_token_s,
    "e2e_p99_s": lambda summary: summary.e2e_s,
}


def search_session(
    session: LabSession,
    space: Mapping[str, Sequence[Any]],
    *,
    goal: str = "output_tokens_per_s",
    limits: Mapping[str, float] | None = None,
    max_runs: int = 8,
    engine_version: str = "0.33.0",
    constants: StepConstants | None = None,
    study_name: str | None = None,
    storage: str | None = None,
    on_event: OnEvent | None = None,
) -> tuple[SearchResult, tuple[RunRecord, ...]]:
    """Search `space` around the session's configuration; returns the answer and the records of the launches.

    Launches are runs of this machine's engine where the session's card is here; else they are simulated, and the
    answer says so.

    Args:
        space: knob → values.
        goal: one of `GOALS`, larger is better.
        limits: at most one of "ttft_p99_s", "inter_token_p99_s", "e2e_p99_s", with its largest value in seconds.
        engine_version: of vLLM, whose rules the simulation of a card that is not here follows.
        study_name, storage: Optuna's; with both, launches made before are not repeated.

    Raises:
        UnsupportedError: the session's card has no known bandwidth (a CPU), or there is no traffic.
        OutOfRangeError, UnknownNameError: goal, limit, knob or value that does not exist.
    """
    import optuna

    name, limit_s = _checked(goal, dict(limits or {}))
    if session.workload is None:
        raise UnsupportedError("a search needs traffic", works="a session with a workload")
    if not session.gpu.mem_bandwidth_bytes_per_s:
        raise UnsupportedError("a search needs a card to simulate", works="gpu='H100 SXM' or another of `labkit gpus`")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(study_name=study_name, storage=storage, load_if_exists=True, direction="maximize")
    records: list[RunRecord] = []
    is_real = session.runs_on_card
    engine = "labkit" if is_real else "vllm"

    def virtual(point: Point) -> RunRecord:
        return simulate(
            session.model, session.gpu, session.workload, session.config.replace(**point),  # type: ignore[arg-type]
            engine=engine, engine_version=engine_version, constants=constants,
            options=VirtualOptions(has_server=not is_real), run_id=f"search-{len(records) + 1}", name=_name(point),
        )  # fmt: skip

    def expect(point: Point) -> Outcome | None:
        try:
            record = virtual(point)
        except LabkitError:
            return None
        return None if record.status != "finished" else _outcome(record, goal, name)

    def launch(point: Point) -> Outcome:
        known = _stored(study, point)
        if known is not None:
            return known
        record = session.run(session.config.replace(**point), on_event=on_event) if is_real else virtual(point)
        records.append(record)
        outcome = _outcome(record, goal, name)
        _keep(study, point, outcome, record.run_id)
        return outcome

    default = {knob: getattr(session.config, knob) for knob in space}
    result = guided_search(
        grid_points(space, session.config), expect, launch, default=default, latency_limit_s=limit_s, max_runs=max_runs
    )
    return result, tuple(records)


def _checked(goal: str, limits: dict[str, float]) -> tuple[str, float | None]:
    if goal not in GOALS:
        raise OutOfRangeError(f"there is no goal {goal!r}", works=nearest(goal, GOALS) or ", ".join(GOALS))
    unknown = [name for name in limits if name not in _LATENCIES]
    if unknown or len(limits) > 1 or any(not value > 0 for value in limits.values()):
        raise OutOfRangeError("a search takes one limit above zero", works=", ".join(_LATENCIES), knob="limits")
    return next(iter(limits.items()), ("", None))


def _outcome(record: RunRecord, goal: str, latency: str) -> Outcome:
    summary = summarize(record)
    values = _LATENCIES[latency](summary) if latency else None
    fits = 1.0 if record.plan.verdict == "fits" else 0.8
    return Outcome(getattr(summary, goal) or 1e-9, values.p99 if values else None, fits, record.run_id)


def _name(point: Point) -> str:
    return ", ".join(f"{knob} {value}" for knob, value in point.items())


def _stored(study: optuna.Study, point: Point) -> Outcome | None:
    for trial in study.get_trials(deepcopy=False):
        if trial.user_attrs.get(KNOBS) == dict(point) and trial.value is not None:
            return Outcome(trial.value, trial.user_attrs.get("latency_s"), 1.0, trial.user_attrs.get(RUN_ID, ""))
    return None


def _keep(study: optuna.Study, point: Point, outcome: Outcome, run_id: str) -> None:
    trial = study.ask()
    trial.set_user_attr(KNOBS, dict(point))
    trial.set_user_attr(RUN_ID, run_id)
    trial.set_user_attr("latency_s", outcome.latency_s)
    study.tell(trial, outcome.value)
