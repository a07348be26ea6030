"""`LabSession`: a model, a card and a traffic; plans, runs and their records. Draws nothing."""

from __future__ import annotations

import dataclasses
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from labkit.engine.supported_knobs import check_knobs
from labkit.errors import CancelledError, DoesNotFitError, LabkitError, StoreError, WorkerError
from labkit.experiments.card import check_cards, runs_on
from labkit.experiments.rescue import kept_elsewhere
from labkit.experiments.run import RunOptions
from labkit.experiments.run_edits import RunEdits
from labkit.experiments.runner import LocalRunner, RunAnswer, RunJob, Runner
from labkit.experiments.store import RunStore, RunWriter
from labkit.experiments.worker import OnEvent, Worker
from labkit.format import GIB, memory
from labkit.measure.l2_step import with_simulated_counters
from labkit.measure.memory_snapshot import measured_breakdown
from labkit.measure.run_record import RequestRow, RunRecord, RunStatus, StepRow
from labkit.memory import plan as make_plan
from labkit.memory.records import MemoryPlan
from labkit.models.supported import check_supported
from labkit.specs import cpu_gpu, load_gpu, load_model, load_workload, name_of
from labkit.specs.engine_config import EngineConfig
from labkit.specs.gpu_spec import GpuSpec
from labkit.specs.model_spec import ModelSpec
from labkit.specs.workload import Workload
from labkit.text import plain

STORE_EVERY_S = 1.0
L2_CARD = "H100"


def _weights_source(spec: ModelSpec, given: str | Path | ModelSpec) -> str:
    """Where the weights of `spec` are: a path or hub id; a catalogue name in any spelling means its hub id."""
    if spec.source == "catalogue":
        return spec.name
    return spec.source if isinstance(given, ModelSpec) else str(given)


def _ignore(event: dict[str, Any]) -> None:
    """Where nobody listens to events."""


class LabSession:
    """Plans and runs one model on one traffic, and remembers what came out.

    Runs are on the chosen card where it is this machine's and torch computes on it. With another card chosen, plans
    are that card's; a run is the CPU engine's under the budget `cpu_memory_gib`, and its record says so.

    Args:
        model: catalogue name, hub id, folder, config.json or .gguf file, or a `ModelSpec`.
        gpu: catalogue name, "auto" (the card of this machine, or the CPU), "cpu", a card's .json file, or a `GpuSpec`.
        workload: name of a trace or a file, or a `Workload`; needed for runs.
        config: the knobs from which `plan` and `run` start.
        store: where runs are kept; None for the user's own store.
        num_threads: compute threads of the worker.
        memory_limit_bytes: address space of the worker, None for no limit.
        runner: carries out the runs; by default a worker process of this machine.

    Attributes:
        counted_steps: decode steps to count with the card's counters after each run that names no options.

    Raises:
        LabkitError: something of these cannot be read; says what.
    """

    def __init__(
        self,
        model: str | Path | ModelSpec,
        gpu: str | GpuSpec = "auto",
        workload: str | Path | Workload | None = None,
        *,
        config: EngineConfig | None = None,
        store: RunStore | str | Path | None = None,
        num_threads: int = 1,
        memory_limit_bytes: int | None = None,
        runner: Runner | None = None,
    ) -> None:
        self.model = model if isinstance(model, ModelSpec) else load_model(model)
        self.source = _weights_source(self.model, model)
        self.gpu = gpu if isinstance(gpu, GpuSpec) else load_gpu(gpu)
        self.workload = workload if isinstance(workload, Workload) or workload is None else load_workload(workload)
        self.config = config or _default_config(self.gpu)
        self.store = store if isinstance(store, RunStore) else RunStore(store)
        self.counted_steps = 0
        self._records: list[RunRecord] = []
        self.edits = RunEdits(self.store, self._records)
        self._runner = runner or LocalRunner(Worker(num_threads=num_threads, memory_limit_bytes=memory_limit_bytes))
        self._cancel = threading.Event()
        self._running = threading.Lock()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(model={plain(self.model.name, 60)!r}, gpu={plain(self.gpu.name, 60)!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_running(self) -> bool:
        """Whether a run goes on, in whatever thread."""
        return self._running.locked()

    @property
    def runs_on_card(self) -> bool:
        """Whether `run` computes on the chosen card; otherwise it is this machine's CPU that computes."""
        return runs_on(self.gpu)

    @property
    def worker_pid(self) -> int | None:
        """Process id of the worker, None where none runs."""
        return self._runner.pid

    def plan(self, config: EngineConfig | None = None, **changes: Any) -> MemoryPlan:
        """The memory plan on the chosen card, of `config` (the session's when None) with `changes`.

        Raises:
            UnknownNameError, OutOfRangeError: a knob that does not exist or a value outside its range.
        """
        return make_plan(self.model, self.gpu, self._config(config, changes))

    def run_plan(self, config: EngineConfig | None = None, **changes: Any) -> MemoryPlan:
        """The plan under which `run` would run: the card's, or that of this machine's CPU engine."""
        config = self._config(config, changes)
        here = self.gpu.is_cpu or self.runs_on_card
        gpu = self.gpu if here else cpu_gpu(config.cpu_memory_gib)
        return make_plan(self.model, gpu, config)

    def run(
        self,
        config: EngineConfig | None = None,
        on_event: OnEvent | None = None,
        *,
        workload: Workload | None = None,
        options: RunOptions | None = None,
        name: str | None = None,
        keep: bool = True,
        **changes: Any,
    ) -> RunRecord:
        """Run the workload under `config` and return the record, which is in the store as well.

        Args:
            config: the session's when None; `changes` are knobs to set on top.
            on_event: called in this thread with dicts of type "status", "progress", "step", "log", "done", "error".
            workload: instead of the session's.
            options: arrival scale, temperature, seed.
            name: what to call the run; by default what its knobs change.
            keep: False leaves it out of the store and of `records()`, for a trial that only measures speed.

        Returns:
            The record, with status "finished", or "cancelled" after `cancel()`; then with what was done until then.

        Raises:
            DoesNotFitError: the plan does not fit, or the worker ran out of memory; says what would work.
            WorkerError: the worker died or hung, with the cause; the run is stored as failed.
            StoreError: the run could not be stored; it is in `records()` and, where that has room, in a store in the
                folder for temporary files; `save` tries again.
        """
        tell = on_event or _ignore
        with self._only_one():
            try:
                config = self._config(config, changes)
                job = self._job(config, workload, options, tell)
                record = _blank_record(job, config, name or name_of(config, self.config))
                log = _RunLog(self.store if keep else None, record, tell)
                return self._carry_out(job, log, self._records if keep else [], tell)
            except LabkitError as error:
                tell(error_event(error))
                raise

    @contextmanager
    def _only_one(self) -> Iterator[None]:
        """One run at a time; a Cancel of an earlier one is forgotten.

        Raises:
            WorkerError: a run goes on.
        """
        if not self._running.acquire(blocking=False):
            raise WorkerError("this session is running already", works="waiting for it, or Cancel")
        try:
            self._cancel.clear()
            yield
        finally:
            self._running.release()

    def cancel(self) -> None:
        """End the run that goes on, in at most a second; what was finished is kept. Callable from any thread."""
        self._cancel.set()

    @property
    def is_cancelled(self) -> bool:
        """Whether Cancel was asked for since the last run began."""
        return self._cancel.is_set()

    def records(self) -> tuple[RunRecord, ...]:
        """The runs of this session, oldest first, failed and cancelled ones included."""
        return tuple(self._records)

    def save(self, record: RunRecord) -> None:
        """Store a run of `records()` that the store refused before.

        Raises:
            StoreError: it refuses again, or has the run already.
        """
        self.store.save(record)

    def close(self) -> None:
        """Cancel, end the worker and give back the store; a second call does nothing."""
        self.cancel()
        self._runner.close()
        self.store.close()

    def _config(self, config: EngineConfig | None, changes: dict[str, Any]) -> EngineConfig:
        base = config or self.config
        return base.replace(**changes) if changes else base

    def _job(
        self, config: EngineConfig, workload: Workload | None, options: RunOptions | None, tell: OnEvent
    ) -> RunJob:
        workload = workload or self.workload
        if workload is None:
            raise LabkitError("there is no traffic to run", works="a workload, such as workload='azure-2023-conv'")
        check_supported(self.model)
        plan = self.run_plan(config)
        if plan.gpu.is_cpu and not self.gpu.is_cpu:
            text = f"the run is on this machine's CPU; nothing of it is measured on {plain(self.gpu.name, 60)}"
            tell({"type": "log", "level": "info", "message": text})
        check_knobs(plan)
        check_cards(self.gpu, config)
        if plan.verdict == "does not fit":
            raise _does_not_fit(plan)
        return RunJob(plan, workload, self.source, options or RunOptions(counted_steps=self.counted_steps))

    def _carry_out(self, job: RunJob, log: _RunLog, ended: list[RunRecord], tell: OnEvent) -> RunRecord:
        try:
            answer = self._runner.run(job, tell, log.add, self._cancel)
        except CancelledError:
            record = log.finish("cancelled")
        except LabkitError as error:
            ended.append(log.finish("failed", error=str(error)))
            raise
        except BaseException:
            # Ctrl-C, or a callback that failed: for the record the same as Cancel.
            ended.append(log.finish("cancelled"))
            raise
        else:
            record = log.finish(answer.status, answer=answer, l2_card=self._l2_card())
        ended.append(record)
        log.raise_what_the_store_said()
        tell({"type": "done", "run_id": record.run_id, "status": record.status, "name": record.name})
        return record

    def _l2_card(self) -> GpuSpec:
        return load_gpu(L2_CARD) if self.gpu.is_cpu else self.gpu


def _blank_record(job: RunJob, config: EngineConfig, name: str) -> RunRecord:
    now = datetime.now(UTC)
    workload, options = job.workload, job.options
    return RunRecord(
        run_id=f"{now:%Y%m%dT%H%M%S}-{secrets.token_hex(4)}",
        name=name,
        created=now.isoformat(timespec="seconds").replace("+00:00", "Z"),
        status="running",
        config=config,
        model=job.plan.model,
        gpu=job.plan.gpu,
        workload={
            "name": workload.name,
            "source": workload.source,
            "licence": workload.licence,
            "steps": tuple(workload.steps),
            "seed": workload.seed,
            "num_requests": len(workload.requests),
            **dataclasses.asdict(options),
        },
        plan=job.plan,
        seed=options.seed,
    )


def _default_config(gpu: GpuSpec) -> EngineConfig:
    return EngineConfig(cpu_memory_gib=gpu.total_bytes / GIB) if gpu.is_cpu else EngineConfig()


class _RunLog:
    """The record of a run while it grows, in memory and, once a second, in the store."""

    def __init__(self, store: RunStore | None, record: RunRecord, tell: OnEvent) -> None:
        self._record = record
        self._tell = tell
        self._requests: list[RequestRow] = []
        self._steps: list[StepRow] = []
        self._stored = (0, 0)
        self._stored_at = time.monotonic()
        self._refusal: StoreError | None = None
        self._writer: RunWriter | None = store.begin(record) if store else None

    def add(self, requests: Sequence[RequestRow], steps: Sequence[StepRow]) -> None:
        self._requests.extend(requests)
        self._steps.extend(steps)
        if self._writer is None or time.monotonic() - self._stored_at < STORE_EVERY_S:
            return
        self._stored_at = time.monotonic()
        first_request, first_step = self._stored
        self._stored = (len(self._requests), len(self._steps))
        try:
            self._writer.append(self._requests[first_request:], self._steps[first_step:])
        except StoreError as error:
            # The rows wait in the writer: a full disk or a held lock must not end a run.
            self._tell({"type": "log", "level": "warning", "message": str(error)})

    def finish(
        self, status: str, *, answer: RunAnswer | None = None, error: str = "", l2_card: GpuSpec | None = None
    ) -> RunRecord:
        if answer is not None:
            self._requests.extend(answer.requests)
            self._steps.extend(answer.steps)
        last_step = self._steps[-1] if self._steps else None
        until_s = last_step.start_s + last_step.duration_s if last_step else 0.0
        record = dataclasses.replace(
            self._record,
            status=_final(status),
            requests=tuple(sorted(self._requests, key=lambda row: (row.arrival_s, row.request_id))),
            steps=tuple(self._steps),
            duration_s=answer.duration_s if answer else until_s,
            error=plain(error, 2000),
        )
        if answer is not None:
            record = _with_measurements(record, answer, l2_card)
        try:
            if self._writer is not None:
                self._writer.finish(record)
        except StoreError as refusal:
            self._refusal = kept_elsewhere(refusal, record)
            self._tell({"type": "log", "level": "error", "message": str(self._refusal)})
        return record

    def raise_what_the_store_said(self) -> None:
        """Raises the store's refusal of the finished run, if there was one."""
        if self._refusal is not None:
            raise self._refusal


def _with_measurements(record: RunRecord, answer: RunAnswer, l2_card: GpuSpec | None) -> RunRecord:
    parts, fullest = answer.memory_parts, answer.fullest_step
    record = dataclasses.replace(
        record,
        measured=measured_breakdown(parts, record.plan, fullest) if parts else None,
        block_map=answer.block_map,
        counters=answer.counters,
        step_counters=answer.step_counters,
        counter_notes=answer.counter_notes,
        memory_timeline=answer.memory_timeline,
        nvml=answer.nvml,
        energy_j=answer.energy_j,
        versions=answer.versions,
    )
    return record if record.counters or l2_card is None else with_simulated_counters(record, l2_card)


def _final(status: str) -> RunStatus:
    return "cancelled" if status == "cancelled" else "failed" if status == "failed" else "finished"


def _does_not_fit(plan: MemoryPlan) -> DoesNotFitError:
    """The refusal of a run, with the memory (of a CPU) and the length that would work."""
    enough = _enough_memory_gib(plan) if plan.gpu.is_cpu else None
    works = [] if enough is None else [f"cpu_memory_gib = {enough:g}"]
    needed, available = f"{plan.config.max_model_len:,} tokens of KV cache", f"{plan.kv_cache_tokens:,} tokens"
    if plan.num_gpu_blocks == 0:
        parts = plan.breakdown
        budget = int(parts.total_bytes * plan.config.gpu_memory_utilization)
        needed = f"{memory(parts.weights_bytes + parts.activation_bytes)} before any KV cache"
        available = f"{memory(budget)} within utilization"
    elif plan.max_model_len_that_fits > 0:
        works.append(f"max_model_len = {plan.max_model_len_that_fits}")
    return DoesNotFitError(
        f"{plain(plan.model.name, 60)} does not fit: {plan.binding_limit}",
        needed=needed,
        available=available,
        works=", or ".join(works) or None,
        knob="cpu_memory_gib" if plan.gpu.is_cpu else "gpu_memory_utilization",
    )


def _enough_memory_gib(plan: MemoryPlan) -> float | None:
    """The smallest `cpu_memory_gib` that fits, in steps of 0.01; None where not even 4 TiB do."""

    def fits(hundredths: int) -> bool:
        config = plan.config.replace(cpu_memory_gib=hundredths / 100)
        return make_plan(plan.model, plan.gpu, config).verdict != "does not fit"

    high = max(1, round(100 * plan.config.cpu_memory_gib))
    low = high
    while not fits(high):
        low, high = high, high * 2
        if high > 100 * 4096:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high / 100


def error_event(error: LabkitError) -> dict[str, Any]:
    """`error` as the event that a panel or a command line shows in its four parts."""
    parts = {name: getattr(error, name) for name in ("needed", "available", "works", "knob")}
    return {"type": "error", "kind": type(error).__name__, "message": error.message, **parts}
