"""`tune`: plan, run a handful of configurations inside a time budget, recommend one, write the report."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

from labkit.advice.advise import advise
from labkit.advice.recommend import Recommendation, recommend
from labkit.doctor import examine
from labkit.errors import DoesNotFitError, LabkitError, OutOfRangeError, StoreError, WorkerError
from labkit.experiments.run import Speed
from labkit.experiments.runner import Runner
from labkit.experiments.store import RunStore
from labkit.experiments.worker import OnEvent
from labkit.measure.run_record import RunRecord
from labkit.measure.summary import summarize
from labkit.memory.records import MemoryPlan
from labkit.report import write_report
from labkit.session import Session
from labkit.specs import load_workload, name_of
from labkit.specs.engine_config import EngineConfig
from labkit.specs.gpu_spec import GpuSpec
from labkit.specs.model_spec import ModelSpec
from labkit.specs.workload import Workload
from labkit.specs.workload_steps import clip_lengths, first_requests, scale_rate

MAX_VARIANTS = 3
# The best variant and the baseline.
NUM_REPEATS = 2
# Requests a run needs before its percentiles say anything.
WANTED_REQUESTS = 16
FEWEST_REQUESTS = 4
READ_REQUESTS = 256
LENGTH_LIMITS = ((2048, 512), (1024, 256), (512, 128), (256, 64), (128, 32), (96, 32), (64, 32), (64, 16))
# A part of a run's time in which all its requests arrive: then they queue, and memory can bind.
ARRIVAL_SHARE = 0.25
# Runs slower than the trial run predicts must not overrun the budget.
SAFETY = 0.8
# These change what is served or what there is to serve it with, not how; and the lengths of the traffic are cut.
NOT_TRIED = (
    "cpu_memory_gib",
    "tensor_parallel_size",
    "num_gpu_blocks_override",
    "gpu_memory_utilization",
    "max_model_len",
)
STANDARD_VARIANTS: tuple[Mapping[str, Any], ...] = (
    MappingProxyType({"kv_cache_dtype": "fp8"}),
    MappingProxyType({"block_size": 32}),
    MappingProxyType({"max_num_batched_tokens": 256}),
    MappingProxyType({"max_num_seqs": 4}),
    MappingProxyType({"enable_prefix_caching": False}),
)
DEMO: Mapping[str, Any] = MappingProxyType(
    {
        "model": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "gpu": "cpu",
        "workload": "azure-2023-conv",
        "budget_s": 90.0,
        # Room for some 340 tokens of KV beside the weights: so little that memory binds, as on a full card.
        "config": EngineConfig(cpu_memory_gib=0.58, max_model_len=256),
    }
)


@dataclass(frozen=True)
class TuneResult:
    """What `tune` gave: the report's file, the recommendation in it, and the ids of the runs in the store."""

    report_path: Path
    recommendation: Recommendation
    run_ids: tuple[str, ...]


def tune(
    model: str | Path | ModelSpec,
    gpu: str | GpuSpec = "auto",
    workload: str | Path | Workload = "azure-2023-conv",
    *,
    out: str | Path = "tuning-report.html",
    budget_s: float = 120.0,
    config: EngineConfig | None = None,
    engine_version: str = "0.33.0",
    store: RunStore | str | Path | None = None,
    created: str | None = None,
    on_event: OnEvent | None = None,
    runner: Runner | None = None,
) -> TuneResult:
    """Find better settings than `config` for a model, a card and a traffic.

    A short trial run measures the speed of this machine; the traffic is then cut so that all runs fit in the budget
    (the cuts stand in the report). The first run is the baseline; the best variant and the baseline are repeated last,
    to know the noise.

    Args:
        out: the report.
        budget_s: time for all runs, in seconds; loading the model and writing the report come on top.
        config: the baseline; vLLM's defaults when None.
        engine_version: vLLM's, for which the command is written.
        created: date and time in the report; by default now.
        on_event: takes the events of all runs, "progress" with the time left of the whole.
        runner: carries out the runs; by default a worker process of this machine.

    Raises:
        OutOfRangeError: a budget under 5 seconds.
        LabkitError: model, card, traffic or store cannot be read, or the report cannot be written. What does not
            fit, fails in a run or is refused by the store after the first run began is no error of `tune`: the report
            has what was run.
    """
    if not 5 <= budget_s <= 86400:
        raise OutOfRangeError(f"budget_s cannot be {budget_s}", works="5 to 86400 seconds", knob="budget_s")
    created = created or datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    traffic = workload if isinstance(workload, Workload) else load_workload(workload, limit=READ_REQUESTS)
    with Session(model, gpu, traffic, config=config, store=store, runner=runner) as session:
        tuner = _Tuner(session, budget_s, on_event)
        tuner.run_all()
        plans, records = tuner.plans or [session.plan()], session.records()
        recommendation = recommend(plans, records, vllm_version=engine_version)
        machine = examine(test=False)
        path = write_report(
            out, records, plans, recommendation, created=created, machine=machine, vllm_version=engine_version
        )
    return TuneResult(path, recommendation, tuple(record.run_id for record in records))


def report_of_runs(
    run_ids: Sequence[str] | None = None,
    *,
    out: str | Path = "tuning-report.html",
    store: RunStore | str | Path | None = None,
    created: str | None = None,
    vllm_version: str = "0.33.0",
    on_event: OnEvent | None = None,
) -> Path:
    """Write the report of stored runs; without ids, of the newest run and all that had the same model and traffic.

    Args:
        on_event: takes a "log" event for each damaged run, which is left out.

    Raises:
        StoreError: no such run, the store is empty, or nothing of these runs can be read.
    """
    opened = store if isinstance(store, RunStore) else RunStore(store, must_exist=True)
    ids = list(run_ids or _ids_of_the_newest(opened))
    damaged: list[str] = []
    found = list(opened.get_readable(ids, damaged.append))
    if on_event is not None:
        for sentence in damaged:
            on_event({"type": "log", "level": "warning", "message": sentence})
    if not found:
        raise StoreError(damaged[0], works="the other runs of the store")
    records = sorted(found, key=lambda record: record.created)
    plans = [record.plan for record in records]
    created = created or max(record.created for record in records)
    return write_report(out, records, plans, created=created, vllm_version=vllm_version)


def _ids_of_the_newest(store: RunStore) -> list[str]:
    """Ids of the newest run and of those with its model, card and traffic, oldest first."""
    stored = [run for run in store.list_runs() if run.status != "running"]
    if not stored:
        raise StoreError(f"there is no run in {store.location}", works="labkit run or labkit tune first")
    newest = stored[0].record
    return [
        run.run_id
        for run in reversed(stored)
        if (run.record.model.name, run.record.gpu.name, run.record.workload)
        == (newest.model.name, newest.gpu.name, newest.workload)
    ]


class _Tuner:
    """The runs of one `tune`, with one progress over all of them."""

    def __init__(self, session: Session, budget_s: float, on_event: OnEvent | None) -> None:
        self.plans: list[MemoryPlan] = []
        self._session = session
        self._budget_s = budget_s
        self._on_event = on_event
        self._start = time.monotonic()
        self._runs_left_s = budget_s
        self._phase = "trial run"

    def run_all(self) -> None:
        """Trial, baseline, variants, the best of them and the baseline again; stops early where the baseline cannot
        run or the time is over.
        """
        baseline = self._session.config
        self.plans.append(self._session.run_plan(baseline))
        if self.plans[0].verdict == "does not fit":
            return
        traffic = self._traffic(self._trial(baseline))
        deadline = time.monotonic() + self._budget_s
        first = self._run(baseline, traffic, "baseline")
        if first is None or first.status != "finished":
            return
        variants = _variants(self._session, first)
        num_all = 1 + len(variants) + NUM_REPEATS
        for number, (config, name) in enumerate(self._after_baseline(first, variants), 2):
            if time.monotonic() + first.duration_s > deadline or self._session.is_cancelled:
                break
            self._runs_left_s = (num_all - number) * first.duration_s
            self._phase = f"run {number} of {num_all}"
            try:
                self._run(config, traffic, name)
            except StoreError as error:
                self._tell({"type": "log", "level": "error", "message": f"no further run: {error}"})
                break

    def _after_baseline(self, first: RunRecord, variants: Sequence[EngineConfig]) -> Iterator[tuple[EngineConfig, str]]:
        for config in variants:
            self.plans.append(self._session.run_plan(config))
            yield config, name_of(config, first.config)
        for record in _to_repeat(self._session.records(), first):
            yield record.config, f"{record.name} again"

    def _trial(self, config: EngineConfig) -> RunRecord:
        """A run of a few seconds that is not kept: some prompts and a little output, to learn the speed."""
        small = clip_lengths(first_requests(self._workload(), 6), 64, 10)
        return self._session.run(config, workload=small, name="trial", keep=False, on_event=self._tell)

    def _traffic(self, trial: RunRecord) -> Workload:
        speed = Speed()
        # The first step also pays for what torch prepares once.
        for step in trial.steps[1:] or trial.steps:
            speed.add(step)
        self._phase = "run 1"
        per_run_s = SAFETY * self._budget_s / (1 + MAX_VARIANTS + NUM_REPEATS)
        full = self._workload()
        for longest_input, longest_output in LENGTH_LIMITS:
            traffic = clip_lengths(full, longest_input, longest_output)
            count = _requests_in(traffic, speed, per_run_s)
            if count >= min(WANTED_REQUESTS, len(full.requests)):
                break
        traffic = first_requests(traffic, max(FEWEST_REQUESTS, count))
        return _arriving_within(traffic, ARRIVAL_SHARE * per_run_s)

    def _workload(self) -> Workload:
        if self._session.workload is None:
            raise LabkitError("there is no traffic to run", works="a workload")
        return self._session.workload

    def _run(self, config: EngineConfig, traffic: Workload, name: str) -> RunRecord | None:
        known = len(self._session.records())
        try:
            return self._session.run(config, workload=traffic, name=name, on_event=self._tell)
        except (DoesNotFitError, WorkerError):
            # It stands in the store and the report as failed, with its cause; the other runs go on.
            return None
        except StoreError:
            # Refused at its end: a "log" event has said where it is kept instead. Refused at its beginning: no run.
            if len(self._session.records()) == known:
                raise
            return self._session.records()[-1]

    def _tell(self, event: dict[str, Any]) -> None:
        if self._on_event is None or event["type"] == "done":
            return
        if event["type"] == "progress":
            remaining_s = event.get("remaining_s")
            event = {
                **event,
                "phase": self._phase if event["phase"] == "run" else f"{self._phase}: {event['phase']}",
                "elapsed_s": time.monotonic() - self._start,
                "remaining_s": None if remaining_s is None else remaining_s + self._runs_left_s,
            }
        self._on_event(event)


def _to_repeat(records: Sequence[RunRecord], first: RunRecord) -> list[RunRecord]:
    """The variant with the most output per second, then the baseline."""
    others = [record for record in records if record.status == "finished" and record.config != first.config]
    best = sorted(others, key=lambda record: summarize(record).output_tokens_per_s or 0.0)[-1:]
    return [*best, first]


def _requests_in(workload: Workload, speed: Speed, seconds: float) -> int:
    """How many of the first requests can be served in `seconds`, one after another."""
    inputs = outputs = 0
    for count, request in enumerate(workload.requests):
        inputs, outputs = inputs + request.input_tokens, outputs + request.output_tokens
        if (speed.seconds_for(inputs, outputs) or 0.0) > seconds:
            return count
    return len(workload.requests)


def _arriving_within(workload: Workload, seconds: float) -> Workload:
    """The workload with its arrivals drawn together to `seconds`; as it is where they are that close already."""
    span_s = workload.requests[-1].arrival_s - workload.requests[0].arrival_s
    return scale_rate(workload, span_s / seconds) if span_s > seconds else workload


def _variants(session: Session, first: RunRecord) -> list[EngineConfig]:
    """Configurations worth a run: what the plan and the baseline's run advise, then the standard ones."""
    advised = [advice.changes for advice in advise(first.plan, session.run_plan, record=first)]
    seen = {first.plan.config}
    variants: list[EngineConfig] = []
    for changes in [*advised, *STANDARD_VARIANTS]:
        if len(variants) == MAX_VARIANTS:
            break
        if any(name in NOT_TRIED for name in changes):
            continue
        try:
            config = session.config.replace(**changes)
            plan = session.run_plan(config)
        except LabkitError:
            continue
        if plan.verdict != "does not fit" and plan.config not in seen:
            seen.add(plan.config)
            variants.append(config)
    return variants
