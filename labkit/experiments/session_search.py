"""`search_session`: the guided search on a session, kept as an Optuna study so that it can go on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from labkit.engine.step_constants import StepConstants
from labkit.errors import DoesNotFitError, LabkitError, OutOfRangeError, UnsupportedError, WorkerError
from labkit.experiments.calibrate import calibrate
from labkit.experiments.card_files import constants_for
from labkit.experiments.grid_sweep import KNOBS, RUN_ID, grid_points
from labkit.experiments.measured_memory import MeasuredMemory, memory_of
from labkit.experiments.run import RunOptions
from labkit.experiments.search import Learnt, Outcome, Point, SearchResult, Simulate, guided_search
from labkit.experiments.virtual_run import VirtualOptions, simulate
from labkit.experiments.worker import OnEvent
from labkit.measure.run_record import RunRecord
from labkit.measure.summary import summarize
from labkit.specs.workload import Workload
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
# The second load of a launch: a quarter of the requests, four times as far apart.
_LIGHT = 4
# Grids and traffics from these sizes on are simulated on the light load first, and the best tenth on the whole one.
_MANY_POINTS, _MANY_REQUESTS, _FEWEST_WHOLE = 24, 100, 8
FITS, LIGHT_RUN_ID = "fits in memory", "labkit_light_run_id"


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
    """Search `space` around the session's configuration; returns the answer and the records of the launches, two a
    launch: the traffic, and a quarter of it four times as far apart.

    Launches are runs of this machine's engine where the session's card is here; else they are simulated, and the
    answer says so. Real runs of the first two launches calibrate the simulation, and winner and default are run once
    more; what is simulated would only repeat itself.

    Args:
        space: knob → values.
        goal: one of `GOALS`, larger is better.
        limits: at most one of "ttft_p99_s", "inter_token_p99_s", "e2e_p99_s", with its largest value in seconds.
        engine_version: of vLLM, whose rules the simulation of a card that is not here follows.
        constants: of the simulation; by default the best that is known of model, card and engine.
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
    points = grid_points(space, session.config)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(study_name=study_name, storage=storage, load_if_exists=True, direction="maximize")
    search = _Search(session, session.workload, goal, name, engine_version, constants)
    default = {knob: getattr(session.config, knob) for knob in space}
    known = [default, *(point for point in points if point != default)]
    # A study's knobs keep their values, so the default's are among them from the first trial on.
    choices = {knob: list(dict.fromkeys([*values, default[knob]])) for knob, values in space.items()}
    launches = _Launches(search, study, choices, on_event)
    result = guided_search(
        points, search.simulation(known), launches.launch,
        default=default, latency_limit_s=limit_s, max_runs=max_runs,
        repeats=search.is_real, resimulate=lambda: search.recalibrated(launches.measured, known),
    )  # fmt: skip
    return result, tuple(launches.records)


def light_load(workload: Workload) -> Workload:
    """A quarter of the requests, one at least."""
    count = max(1, len(workload.requests) // _LIGHT)
    return workload.with_requests(workload.requests[:count], f"the first {count} requests, as a lighter load")


class _Search:
    """What is searched, and how a point is simulated."""

    def __init__(
        self,
        session: LabSession,
        workload: Workload,
        goal: str,
        latency: str,
        engine_version: str,
        constants: StepConstants | None,
    ) -> None:
        self.session, self.workload, self.light = session, workload, light_load(workload)
        self.is_real = session.runs_on_card
        self._goal, self._latency, self._version = goal, latency, engine_version
        self._engine = "labkit" if self.is_real else "vllm"
        model = session.model
        self._known = constants or constants_for(
            session.gpu, model.name, engine=self._engine, engine_version=engine_version, is_moe=model.moe is not None
        )
        self._constants = self._known
        self._memory: MeasuredMemory | None = None

    def virtual(self, point: Point, workload: Workload, run_id: str) -> RunRecord:
        """A simulated run; a second load arrives more slowly."""
        session = self.session
        scale = 1.0 if workload is self.workload else float(_LIGHT)
        return simulate(
            session.model, session.gpu, workload, session.config.replace(**point), engine=self._engine,
            engine_version=self._version, constants=self._constants, memory=self._memory, run_id=run_id,
            name=name_of_point(point),
            options=VirtualOptions(arrival_scale=scale, has_server=not self.is_real),
        )  # fmt: skip

    def outcome(self, record: RunRecord, light: RunRecord | None = None) -> Outcome:
        """What a run gave."""
        summary = summarize(record)
        values = _LATENCIES[self._latency](summary) if self._latency else None
        fits = 1.0 if record.plan.verdict == "fits" else 0.8
        value = getattr(summary, self._goal) or 1e-9
        lighter = None if light is None else getattr(summarize(light), self._goal)
        return Outcome(value, values.p99 if values else None, fits, record.run_id, lighter)

    def simulation(self, points: Sequence[Point]) -> Simulate:
        """Point → expected outcome, the default first. With many points and requests the light load is simulated for
        all, and the whole one only for those that it likes."""
        if len(points) < _MANY_POINTS or len(self.workload.requests) < _MANY_REQUESTS:
            return lambda point: self.expected(point, self.workload)
        return _Halving(self, points)

    def expected(self, point: Point, workload: Workload) -> Outcome | None:
        """The simulated outcome; None for what does not run."""
        try:
            record = self.virtual(point, workload, "expected")
        except LabkitError:
            return None
        return None if record.status != "finished" else self.outcome(record)

    def recalibrated(self, records: Sequence[RunRecord], points: Sequence[Point]) -> Learnt | None:
        """A simulation whose constants the real runs have corrected; None where runs are simulated themselves."""
        usable = [record for record in records if record.status == "finished" and len(record.steps) > 3]
        if not self.is_real or not usable:
            return None
        self._constants = calibrate(self._known, usable[-4:])
        measured = usable[-1].measured
        if measured is not None:
            self._memory = memory_of(measured.parts(), usable[-1].plan)
        return Learnt(self.simulation(points), self._constants.relative_error)


class _Halving:
    """Expected outcomes in two rounds: of the light load for all points, and of the whole one for the default (the
    first) and the best tenth; the others are scaled by what the whole load gave the default over the light one."""

    def __init__(self, search: _Search, points: Sequence[Point]) -> None:
        light = {_key(point): search.expected(point, search.light) for point in points}
        known = {key: outcome for key, outcome in light.items() if outcome is not None}
        most = max(_FEWEST_WHOLE, len(points) // 10)
        chosen = sorted(known, key=lambda key: -known[key].value)[:most]
        whole = {
            _key(point): search.expected(point, search.workload)
            for point in points
            if _key(point) in chosen or point is points[0]
        }
        first, first_whole = (outcomes.get(_key(points[0])) for outcomes in (known, whole))
        value = latency = 1.0
        if first is not None and first_whole is not None:
            value = first_whole.value / first.value
            latency = (first_whole.latency_s or 1.0) / (first.latency_s or 1.0)
        self._outcomes: dict[tuple, Outcome | None] = {
            key: None if outcome is None else replace(
                outcome, value=outcome.value * value,
                latency_s=None if outcome.latency_s is None else outcome.latency_s * latency,
            )
            for key, outcome in light.items()
        } | whole  # fmt: skip

    def __call__(self, point: Point) -> Outcome | None:
        return self._outcomes[_key(point)]


def _key(point: Point) -> tuple:
    return tuple(point.items())


@dataclass
class _Launches:
    """Launches, real or simulated, each a trial of the study; those of an earlier search come from there.

    Attributes:
        records: of this search. measured: these and those of an earlier one, to learn from.
    """

    search: _Search
    study: optuna.Study
    space: Mapping[str, list[Any]]
    on_event: OnEvent | None
    records: list[RunRecord] = field(default_factory=list)
    measured: list[RunRecord] = field(default_factory=list)
    _taken: set[int] = field(default_factory=set)

    def launch(self, point: Point) -> Outcome:
        """Run a point at both loads.

        Raises:
            DoesNotFitError, WorkerError: it did not start, now or in the study.
        """
        known = self._known(point)
        if known is not None:
            return known
        from optuna.trial import TrialState

        trial = self._new_trial(point)
        self._taken.add(trial.number)
        try:
            record, light = (self._run(point, workload) for workload in (self.search.workload, self.search.light))
        except (DoesNotFitError, WorkerError) as error:
            trial.set_user_attr("error", str(error))
            trial.set_constraint(FITS, 1.0)
            self.study.tell(trial, state=TrialState.PRUNED)
            raise
        except BaseException:
            self.study.tell(trial, state=TrialState.FAIL)
            raise
        outcome = self.search.outcome(record, light)
        trial.set_user_attr(RUN_ID, record.run_id)
        trial.set_user_attr(LIGHT_RUN_ID, light.run_id)
        trial.set_user_attr("latency_s", outcome.latency_s)
        trial.set_user_attr("light_value", outcome.light_value)
        trial.set_constraint(FITS, 0.0)
        self.study.tell(trial, outcome.value)
        return outcome

    def _run(self, point: Point, workload: Workload) -> RunRecord:
        search = self.search
        if search.is_real:
            scale = 1.0 if workload is search.workload else float(_LIGHT)
            record = search.session.run(
                search.session.config.replace(**point), self.on_event, workload=workload,
                options=RunOptions(arrival_scale=scale),
            )  # fmt: skip
        else:
            record = search.virtual(point, workload, f"search-{len(self.records) + 1}")
        self.records.append(record)
        self.measured.append(record)
        return record

    def _new_trial(self, point: Point) -> optuna.Trial:
        self.study.enqueue_trial(dict(point), user_attrs={KNOBS: dict(point)})
        trial = self.study.ask()
        for knob, choices in self.space.items():
            trial.suggest_categorical(knob, choices)
        return trial

    def _known(self, point: Point) -> Outcome | None:
        """What the study has of this point and this search has not taken yet."""
        from optuna.trial import TrialState

        for trial in self.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED)):
            attributes = trial.user_attrs
            if trial.number in self._taken or attributes.get(KNOBS) != dict(point):
                continue
            self._taken.add(trial.number)
            if trial.value is None:
                raise DoesNotFitError(str(attributes.get("error", "it did not start")))
            self._learn_again(attributes)
            return Outcome(
                trial.value, attributes.get("latency_s"), 1.0, attributes.get(RUN_ID, ""), attributes.get("light_value")
            )
        return None

    def _learn_again(self, attributes: Mapping[str, Any]) -> None:
        """Take the runs behind a launch of an earlier search; those that the store has no more are done without."""
        for run_id in (attributes.get(RUN_ID, ""), attributes.get(LIGHT_RUN_ID, "")):
            if self.search.is_real and run_id:
                with suppress(LabkitError):
                    self.measured.append(self.search.session.store.get(run_id))


def name_of_point(point: Point) -> str:
    """The knobs of a point in words."""
    return ", ".join(f"{knob} {value}" for knob, value in point.items())


def _checked(goal: str, limits: dict[str, float]) -> tuple[str, float | None]:
    if goal not in GOALS:
        raise OutOfRangeError(f"there is no goal {goal!r}", works=nearest(goal, GOALS) or ", ".join(GOALS))
    unknown = [name for name in limits if name not in _LATENCIES]
    if unknown or len(limits) > 1 or any(not value > 0 for value in limits.values()):
        raise OutOfRangeError("a search takes one limit above zero", works=", ".join(_LATENCIES), knob="limits")
    return next(iter(limits.items()), ("", None))
