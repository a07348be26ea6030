"""`EngineBackend`: labkit's own engine inside the worker process."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import time
from collections.abc import Callable, Sequence
from typing import Any

from labkit.errors import CancelledError, DoesNotFitError, FileFormatError, UnsupportedError
from labkit.experiments.backend import Emit, IsCancelled, is_lost_context
from labkit.experiments.rank_backend import threads_of_environment
from labkit.experiments.rank_group import RankGroup
from labkit.experiments.run import PromptOf, RunOptions, RunOutcome, WorkloadRun
from labkit.experiments.serialise import from_plain, rows_to_plain, to_plain
from labkit.measure.allocator import torch_snapshot
from labkit.measure.card_users import current_card_uuid, other_card_uuids, other_programs
from labkit.measure.nvml_sampler import NvmlSampler
from labkit.measure.run_watch import NVML_INTERVAL_S, RunWatch
from labkit.measure.step_counters import CountedSteps, count_decode_steps
from labkit.memory.records import MemoryPlan
from labkit.specs.model_spec import ModelSpec
from labkit.specs.workload import Workload
from labkit.text import plain
from labkit.versions import versions

READING_TOLD_S = 0.125


class EngineBackend:
    """Keeps the decoder's weights; the engine on top of them is made anew for each plan, or changed on a card."""

    def __init__(self) -> None:
        import torch

        self._num_threads = threads_of_environment()
        torch.set_num_threads(self._num_threads)
        self._decoder: Any = None
        self._engine: Any = None
        self._group: RankGroup | None = None

    def load(self, arguments: dict[str, Any], emit: Emit, is_cancelled: IsCancelled) -> dict[str, Any]:
        """Weights of `arguments["model"]` from `arguments["source"]` in `dtype`, read or random by `load_format`.

        `arguments["quantization"]` is vLLM's word or None, `arguments["device"]` "cpu" or "cuda". With
        `arguments["tensor_parallel_size"]` above 1 this process holds rank 0's part, and others of its own the rest.
        """
        device = arguments.get("device", "cpu")

        self._drop_engine()
        self._decoder = None
        gc.unfreeze()
        gc.collect()
        _prepare(device)
        start = time.monotonic()
        emit(_progress("load", 0, start))
        spec = from_plain(ModelSpec, arguments["model"])
        source = arguments["source"] or None
        size = arguments.get("tensor_parallel_size", 1)
        # Ranks that wait for one that has left would be ended, so they read to the end.
        told = _Reading(emit, is_cancelled if size == 1 else lambda: False, start)
        self._decoder = self._loader(size, device)(
            spec, source, arguments["dtype"], arguments["load_format"], seed=arguments.get("seed", 0),
            quantization=arguments.get("quantization"), on_read=told,
        )  # fmt: skip
        # A full collection walks all that torch has for a quarter of a second, in which the card would wait.
        gc.freeze()
        emit(_progress("load", 1, start))
        return {"load_s": time.monotonic() - start}

    def configure(self, arguments: dict[str, Any], emit: Emit, is_cancelled: IsCancelled) -> dict[str, Any]:
        """An engine for `arguments["plan"]`; the old one's pool is given back first, as far as it changes."""
        if self._decoder is None:
            raise UnsupportedError("no model is loaded", works="load first")
        start = time.monotonic()
        emit(_progress("configure", 0, start))
        plan = from_plain(MemoryPlan, arguments["plan"])
        try:
            self._set_up(plan, arguments.get("seed", 0))
        except DoesNotFitError as error:
            raise _naming_others(error, plan) from error
        reason = getattr(self._engine.executor, "why_eager", "")
        if reason and not plan.config.enforce_eager:
            text = f"no CUDA graphs for this model: {reason}"
            emit({"type": "log", "level": "info", "message": text})
        emit(_progress("configure", 1, start))
        return {"configure_s": time.monotonic() - start}

    def _set_up(self, plan: MemoryPlan, seed: int) -> None:
        from labkit.engine import Engine

        kept, self._engine = self._engine, None
        if kept is not None and self._decoder.device.type == "cuda" and not kept.has_unfinished:
            kept.seed = seed
            kept.reconfigure(plan)
            self._engine = kept
            return
        if kept is not None:
            kept.close()
        del kept
        gc.collect()
        executor = None if self._group is None else self._group.executor(plan)
        self._engine = Engine(self._decoder, plan, seed=seed, executor=executor)

    def run(self, arguments: dict[str, Any], emit: Emit, is_cancelled: IsCancelled) -> dict[str, Any]:
        """Serve `arguments["workload"]` under `arguments["options"]`."""
        from labkit.specs import prompt_token_ids

        if self._engine is None:
            raise UnsupportedError("no engine is configured", works="configure first")
        workload = from_plain(Workload, arguments["workload"])
        options = from_plain(RunOptions, arguments["options"])
        plan = self._engine.plan

        def prompt_of(index: int) -> list[int]:
            return prompt_token_ids(workload, index, vocab_size=plan.model.vocab_size)

        with RunWatch(plan.gpu.uuid, plan.block_bytes, others=self._other_cards()) as watch:
            outcome = WorkloadRun(
                self._engine, workload, prompt_of, options, emit, is_cancelled, watch=watch.look
            ).serve()  # fmt: skip
        is_finished = outcome.status == "finished"
        parts = self._memory_parts(emit) if is_finished else {}
        counted = self._counted(outcome, options, prompt_of, emit, is_cancelled) if is_finished else CountedSteps()
        return {
            "status": outcome.status,
            "duration_s": outcome.duration_s,
            "requests": rows_to_plain(outcome.requests),
            "steps": rows_to_plain(outcome.steps),
            "fullest_step": to_plain(outcome.fullest_step),
            "block_map": to_plain(outcome.block_map),
            "memory_parts": parts,
            "energy_j": watch.energy_j,
            "counters": to_plain(counted.attention),
            "step_counters": to_plain(counted.step),
            "counter_notes": to_plain(counted.notes),
            "memory_timeline": to_plain(watch.samples),
            "nvml": to_plain(watch.nvml),
            "versions": versions(self._num_threads),
        }

    def _other_cards(self) -> list[NvmlSampler]:
        """Of the other ranks, one card each."""
        if self._group is None or self._group.device == "cpu":
            return []
        return [NvmlSampler(uuid, NVML_INTERVAL_S) for uuid in other_card_uuids(self._group.size - 1)]

    def _counted(
        self, outcome: RunOutcome, options: RunOptions, prompt_of: PromptOf, emit: Emit, is_cancelled: IsCancelled
    ) -> CountedSteps:
        """Counters of steps like those of the fullest moment, as many as were asked for; torch's snapshot of them."""
        if not options.counted_steps and not options.snapshot_file:
            return CountedSteps()
        start, counted = time.monotonic(), CountedSteps()
        emit(_progress("count steps", 0, start))
        try:
            with torch_snapshot(options.snapshot_file) if options.snapshot_file else contextlib.nullcontext():
                if options.counted_steps:
                    contexts = [_context(prompt_of(index), length) for index, length in outcome.fullest_requests]
                    counted = count_decode_steps(self._engine, contexts, options.counted_steps, is_cancelled)
        # The timed run is over; whatever fails here, its results stand. Only a lost context ends the worker.
        except Exception as error:
            if is_lost_context(error):
                raise
            counted = dataclasses.replace(counted, notes=(*counted.notes, _why(error)))
        emit(_progress("count steps", 1, start))
        return counted

    def _memory_parts(self, emit: Emit) -> dict[str, int]:
        # Metering the activation peak computes one full step, which nobody waits for after Cancel.
        start = time.monotonic()
        emit(_progress("measure memory", 0, start))
        parts = self._engine.memory_parts()
        emit(_progress("measure memory", 1, start))
        return parts

    def close(self) -> None:
        """Give pool and weights back."""
        self._drop_engine()
        self._decoder = None
        self._drop_group()
        gc.unfreeze()

    def _loader(self, size: int, device: str) -> Callable[..., Any]:
        """What loads a decoder, alone or with the other ranks, which stay for the next model."""
        from labkit.models import load_model_weights

        if self._group is not None and (self._group.size, self._group.device) != (size, device):
            self._drop_group()
        if size == 1:
            return functools.partial(load_model_weights, device=device)
        self._group = self._group or RankGroup(size, device, num_threads=self._num_threads)
        return self._group.load

    def _drop_group(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group = None

    def _drop_engine(self) -> None:
        if self._engine is not None:
            self._engine.close()
        self._engine = None
        gc.collect()


class _Reading:
    """Tells how much of the weights is read, a few times a second; ends the reading after Cancel."""

    def __init__(self, emit: Emit, is_cancelled: IsCancelled, start: float) -> None:
        self._emit, self._is_cancelled, self._start = emit, is_cancelled, start
        self._told_at = 0.0

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        if self._is_cancelled():
            raise CancelledError("cancelled while the weights were read")
        now = time.monotonic()
        if now - self._told_at < READING_TOLD_S:
            return
        self._told_at, elapsed_s = now, now - self._start
        self._emit(
            {
                "type": "progress",
                "phase": "load",
                "done": done_bytes,
                "total": total_bytes,
                "unit": "bytes",
                "elapsed_s": elapsed_s,
                "remaining_s": elapsed_s * (total_bytes - done_bytes) / done_bytes if done_bytes else None,
            }
        )


def _prepare(device: str) -> None:
    """Give a card back what the last model had, or say that there is none."""
    import torch

    if device != "cuda":
        return
    if not torch.cuda.is_available():
        raise UnsupportedError("torch does not find the card in the worker", works="gpu='cpu', or labkit doctor")
    torch.cuda.empty_cache()


def _why(error: Exception) -> str:
    """One line of `counter_notes`."""
    if isinstance(error, (UnsupportedError, FileFormatError)):
        return f"no memory snapshot: {plain(error, 300)}"
    return f"not counted: {type(error).__name__}: {plain(error, 300)}"


def _context(prompt: Sequence[int], length: int) -> list[int]:
    """`length` tokens that begin as the request did; which ones it had got by then does not matter."""
    return (list(prompt) * (1 + length // max(1, len(prompt))))[:length]


def _naming_others(error: DoesNotFitError, plan: MemoryPlan) -> DoesNotFitError:
    """The refusal with the programs that hold the card's memory, where NVML names them."""
    others = "" if plan.gpu.is_cpu else other_programs(plan.gpu.uuid or current_card_uuid())
    parts = {name: getattr(error, name) for name in ("needed", "available", "works", "knob")}
    return DoesNotFitError(f"{error.message}: {others}" if others else error.message, **parts)


def _progress(phase: str, done: int, start: float) -> dict[str, Any]:
    elapsed_s = time.monotonic() - start
    remaining_s = 0.0 if done else None
    return {
        "type": "progress",
        "phase": phase,
        "done": done,
        "total": 1,
        "unit": "",
        "elapsed_s": elapsed_s,
        "remaining_s": remaining_s,
    }
