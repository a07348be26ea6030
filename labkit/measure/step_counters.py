"""Counters of an engine's decode steps on a card, after the timed ones: whole steps, and their attention alone.

The requests of the run's fullest moment are computed again, then some decode steps are timed, some counted, and the
attention of the last one is launched by itself over the engine's own cache.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from labkit.engine.engine import Engine
from labkit.engine.sampling_params import EngineRequest, SamplingParams
from labkit.errors import DoesNotFitError, LabkitError, UnsupportedError
from labkit.format import of
from labkit.measure.attention_shape import AttentionShape, BatchShape
from labkit.measure.card_users import current_card_uuid
from labkit.measure.counters import TIME, counters, to_counters
from labkit.measure.l2_step import KV_KINDS, layer_shape
from labkit.measure.replay import replay_of
from labkit.measure.run_record import Counters
from labkit.text import plain

MAX_PREFILL_STEPS = 10_000
# Steps that a request may decode while prompts behind it are still computed, beyond one for each step of prompts.
SPARE_STEPS = 8
# A counted step takes one for each pass of each set of metrics, and a timed one.
STEPS_FOR_ONE = 8


@dataclass(frozen=True)
class CountedSteps:
    """What was counted; None where nothing could be, and `notes` say why, with the cure."""

    step: Counters | None = None
    attention: Counters | None = None
    notes: tuple[str, ...] = ()


def count_decode_steps(
    engine: Engine, contexts: Sequence[Sequence[int]], num_steps: int,
    is_cancelled: Callable[[], bool] = lambda: False,
) -> CountedSteps:  # fmt: skip
    """Counters of `num_steps` decode steps of `engine`, which is idle before and after.

    Args:
        contexts: token ids of each request that decodes.
    """
    if not hasattr(engine.executor, "attention_reads"):
        return CountedSteps(notes=("the run was not on a card, which has counters, or on several; simulated instead",))
    try:
        _fill(engine, contexts, num_steps, is_cancelled)
        return _count(engine, num_steps)
    except LabkitError as error:
        return CountedSteps(notes=(plain(error, 400),))
    finally:
        _empty(engine)


def _fill(engine: Engine, contexts: Sequence[Sequence[int]], num_steps: int, is_cancelled: Callable[[], bool]) -> None:
    """Compute the contexts up to the first step that only decodes.

    Raises:
        UnsupportedError: none fits, or it took too long.
    """
    config = engine.plan.config
    budget, longest = int(config.max_num_batched_tokens or 1), int(config.max_model_len or 1)
    extra = STEPS_FOR_ONE * num_steps + SPARE_STEPS + sum(map(len, contexts)) // budget
    for index, tokens in enumerate(contexts):
        prompt = tuple(tokens)[: max(1, min(len(tokens), longest) - extra)]
        output = min(extra + SPARE_STEPS, longest - len(prompt))
        try:
            engine.add_request(EngineRequest(index, prompt, SamplingParams(max_tokens=output, ignore_eos=True)))
        except DoesNotFitError:
            continue
    for _ in range(MAX_PREFILL_STEPS):
        if is_cancelled() or not engine.has_unfinished:
            break
        result = engine.step()
        if result.num_decode_tokens and not result.num_prefill_tokens:
            return
    raise UnsupportedError("no step of the run's requests that only decodes could be made", works="longer outputs")


def _count(engine: Engine, num_steps: int) -> CountedSteps:
    import torch

    executor: Any = engine.executor
    executor.times = []
    for _ in range(num_steps):
        engine.step()
    torch.cuda.synchronize()
    step_s = statistics.median(begin.elapsed_time(end) for begin, end in executor.times) / 1e3
    executor.times = None
    # A step cannot be repeated; the next one is as good as the same for another pass.
    result = counters(card=engine.plan.gpu.name).count(engine.step, repeats=num_steps)
    scope = f"a decode step of {len(engine.scheduler.running)} requests, all kernels"
    step = None if result.counters is None else _timed(result.counters, step_s, scope)
    attention, more = _count_attention(engine)
    return CountedSteps(step, attention, tuple(dict.fromkeys((*result.notes, *more))))


def _count_attention(engine: Engine) -> tuple[Counters | None, tuple[str, ...]]:
    """The attention of all layers over what the running sequences have in the cache."""
    from labkit_kernels.cold_timing import cold_l2, graph_time_s

    running, flush, card_uuid = engine.scheduler.running, cold_l2(), current_card_uuid()
    reads = engine.executor.attention_reads(running)  # type: ignore[attr-defined]
    kinds: dict[AttentionShape, list[Callable[[], object]]] = {}
    batch, model, config = running_batch(engine), engine.plan.model, engine.plan.config
    for layer, read in zip(model.layers, reads, strict=True):
        if layer.kind in KV_KINDS:
            kinds.setdefault(layer_shape(model, config, layer, batch), []).append(read)
    parts, methods, time_s = [], set(), 0.0
    notes: list[str] = []
    for shape, calls in kinds.items():
        scope = counters(card=engine.plan.gpu.name, replay=replay_of(shape, card_uuid=card_uuid))
        call = _all(calls)
        result = scope.count(call, before=flush)
        notes += result.notes
        if result.counters is None:
            return None, tuple(notes)
        alike = 1 if "CUPTI" in result.counters.method else len(calls)
        methods.add(result.counters.method)
        parts.append({name: value if ".pct" in name else alike * value for name, value in result.values.items()})
        time_s += graph_time_s(call, flush)
    found = to_counters(_sum(parts), " and ".join(sorted(methods)), engine.plan.gpu.name)
    return _timed(found, time_s, f"attention of a decode step of {of(len(running), 'request')}"), tuple(notes)


def running_batch(engine: Engine) -> BatchShape:
    """The decode step that comes next: tokens of each running sequence, and those of the blocks that all share."""
    running = engine.scheduler.running
    tables = [sequence.block_table for sequence in running]
    shared = len(list(takewhile(lambda blocks: len(set(blocks)) == 1, zip(*tables, strict=False))))
    lens = tuple(sequence.num_computed_tokens for sequence in running)
    shared_tokens = min(shared * engine.plan.config.block_size, *lens) if len(running) > 1 else 0
    return BatchShape(lens, (1,) * len(lens), shared_tokens)


def _all(calls: Sequence[Callable[[], object]]) -> Callable[[], None]:
    def call() -> None:
        for each in calls:
            each()

    return call


def _sum(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Sums of what was counted, and means over time of shares; only metrics that all parts have."""
    names = set.intersection(*(set(part) for part in parts))
    total_s = sum(part[TIME] for part in parts)
    return {
        name: sum(part[name] * (part[TIME] / total_s if ".pct" in name else 1.0) for part in parts) for name in names
    }


def _timed(found: Counters, time_s: float, scope: str) -> Counters:
    """`found` with the time of undisturbed launches: counting slows them down."""
    return dataclasses.replace(
        found, kernel_time_s=time_s, dram_bytes_per_s=found.dram_bytes / time_s, scope=scope
    )  # fmt: skip


def _empty(engine: Engine) -> None:
    """Cancel what runs, so that the engine is as it was."""
    for sequence in (*engine.scheduler.running, *engine.scheduler.waiting):
        engine.abort(sequence.request.request_id)
    while engine.has_unfinished:
        engine.step()
