"""`Runner`: what carries out one run, somewhere; `LocalRunner` does it in a worker process of this machine."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from labkit.experiments.run import RunOptions
from labkit.experiments.serialise import from_plain, rows_from_plain, to_plain
from labkit.experiments.worker import OnEvent, Worker
from labkit.measure.nvml_sampler import NvmlSummary
from labkit.measure.run_record import Counters, MemorySample, RequestRow, StepRow
from labkit.memory.records import MemoryPlan
from labkit.specs.workload import Workload

COMPILING_FACTOR = 5.0


@dataclass(frozen=True)
class RunJob:
    """One run to carry out: the plan names model and configuration; `source` is where the weights are."""

    plan: MemoryPlan
    workload: Workload
    source: str = ""
    options: RunOptions = field(default_factory=RunOptions)


@dataclass(frozen=True)
class RunAnswer:
    """How it ended; rows that came as events before are not in it."""

    status: str
    duration_s: float
    requests: tuple[RequestRow, ...]
    steps: tuple[StepRow, ...]
    fullest_step: StepRow | None = None
    block_map: tuple[int, ...] = ()
    memory_parts: dict[str, int] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    energy_j: float | None = None
    counters: Counters | None = None
    step_counters: Counters | None = None
    counter_notes: tuple[str, ...] = ()
    memory_timeline: tuple[MemorySample, ...] = ()
    nvml: NvmlSummary | None = None


class OnRows(Protocol):
    """Takes the rows of a run while it goes on."""

    def __call__(self, requests: Sequence[RequestRow], steps: Sequence[StepRow]) -> None:
        """Only what is new since the last call."""
        ...


class Runner(Protocol):
    """Carries out runs: a local process, or elsewhere an actor on each card."""

    @property
    def pid(self) -> int | None:
        """Process id of what computes, None where it is elsewhere or not running."""
        ...

    def run(self, job: RunJob, on_event: OnEvent, on_rows: OnRows, cancel: threading.Event) -> RunAnswer:
        """Carry out `job`; events and rows are given out in the calling thread.

        Raises:
            CancelledError, WorkerError, LabkitError: as `Worker.call`; the runner can be used again.
        """
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


class LocalRunner:
    """A worker process that keeps the weights of the last model; each run gets a fresh engine on top of them.

    Args:
        stall_timeout_s: on a card, time without any step after which it counts as hung; `configure` compiles kernels
            and may take `COMPILING_FACTOR` times as long. Reading weights and steps on a CPU have no limit.
    """

    def __init__(self, worker: Worker, stall_timeout_s: float = 120.0) -> None:
        self.worker = worker
        self.stall_timeout_s = stall_timeout_s
        self._loaded: tuple | None = None
        self._generation = 0

    @property
    def pid(self) -> int | None:
        """Process id of the worker, None where none runs."""
        return self.worker.pid

    def run(self, job: RunJob, on_event: OnEvent, on_rows: OnRows, cancel: threading.Event) -> RunAnswer:
        """Load where that is needed, configure, run."""
        self._load(job, on_event, cancel)
        self._configure(job, on_event, cancel)

        def split(event: dict[str, Any]) -> None:
            if event["type"] == "rows":
                on_rows(
                    rows_from_plain("request", event.get("requests"), "the worker's rows"),
                    rows_from_plain("step", event.get("steps"), "the worker's rows"),
                )
            else:
                on_event(event)

        arguments = {"workload": to_plain(job.workload), "options": to_plain(job.options)}
        on_event({"type": "status", "phase": "run", "message": "running"})
        limit_s = None if job.plan.gpu.is_cpu else self.stall_timeout_s
        return _answer(self.worker.call("run", arguments, split, cancel, self._generation, limit_s))

    def close(self) -> None:
        """End the process."""
        self.worker.close()
        self._loaded = None

    def _load(self, job: RunJob, on_event: OnEvent, cancel: threading.Event) -> None:
        config = job.plan.config
        device = "cpu" if job.plan.gpu.is_cpu else "cuda"
        wanted = (
            job.plan.model, job.source, config.dtype, config.load_format, config.quantization, device,
            config.tensor_parallel_size,
        )  # fmt: skip
        generation = self.worker.start(on_event)
        if generation == self._generation and self._loaded == wanted:
            return
        self._loaded = None
        # A new process first imports torch.
        is_new = generation != self._generation
        message = "starting the worker" if is_new else "loading the model"
        on_event({"type": "status", "phase": "start" if is_new else "load", "message": message})
        names = ("model", "source", "dtype", "load_format", "quantization", "device", "tensor_parallel_size")
        arguments = dict(zip(names, wanted, strict=True))
        arguments["model"] = to_plain(job.plan.model)
        self.worker.call("load", arguments, on_event, cancel)
        self._loaded, self._generation = wanted, self.worker.generation

    def _configure(self, job: RunJob, on_event: OnEvent, cancel: threading.Event) -> None:
        # Also for the plan that is there already: an engine that has served keeps its prefix cache.
        on_event({"type": "status", "phase": "configure", "message": "allocating the KV cache"})
        arguments = {"plan": to_plain(job.plan), "seed": job.options.seed}
        limit_s = None if job.plan.gpu.is_cpu else COMPILING_FACTOR * self.stall_timeout_s
        self.worker.call("configure", arguments, on_event, cancel, self._generation, limit_s)


def _answer(answer: dict[str, Any]) -> RunAnswer:
    fullest = answer.get("fullest_step")
    return RunAnswer(
        status=str(answer.get("status")),
        duration_s=from_plain(float, answer.get("duration_s"), "duration_s"),
        requests=rows_from_plain("request", answer.get("requests"), "the worker's rows"),
        steps=rows_from_plain("step", answer.get("steps"), "the worker's rows"),
        fullest_step=None if fullest is None else from_plain(StepRow, fullest),
        block_map=from_plain(tuple[int, ...], answer.get("block_map", []), "block_map"),
        memory_parts=from_plain(dict[str, int], answer.get("memory_parts", {}), "memory_parts"),
        versions=from_plain(dict[str, str], answer.get("versions", {}), "versions"),
        energy_j=from_plain(float | None, answer.get("energy_j"), "energy_j"),
        counters=from_plain(Counters | None, answer.get("counters"), "counters"),
        step_counters=from_plain(Counters | None, answer.get("step_counters"), "step_counters"),
        counter_notes=from_plain(tuple[str, ...], answer.get("counter_notes", []), "counter_notes"),
        memory_timeline=from_plain(tuple[MemorySample, ...], answer.get("memory_timeline", []), "memory_timeline"),
        nvml=from_plain(NvmlSummary | None, answer.get("nvml"), "nvml"),
    )
