"""What the steps of a run spend their time on: bandwidth, compute, the host, missing graphs or links; on the roofline.

A queue says which limit keeps requests out; this says what the card does meanwhile. Bytes and products are counted from
model and configuration, seconds come from the run, and how a step divides from the step-time model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from labkit.engine.step_time import StepLoad, StepTimeModel
from labkit.experiments.card_files import constants_for
from labkit.experiments.virtual_run import virtual_engine
from labkit.format import share
from labkit.measure.run_record import RunRecord
from labkit.memory.records import MemoryPlan

BoundName = Literal["bandwidth", "compute", "host", "graphs", "links"]
_WORDS: Mapping[BoundName, str] = {
    "bandwidth": "reading weights and KV from the card's memory",
    "compute": "matrix products and prompt attention",
    "host": "the host: scheduling, launches and what lies between kernels",
    "graphs": "launching kernels one by one, which CUDA graphs would save",
    "links": "moving data between cards, or between card and host",
}
# Which part of a step's time is what; products are split by which of the two roofs they touch.
_PARTS: Mapping[str, BoundName] = {
    "kv": "bandwidth", "sampling": "bandwidth", "elementwise": "bandwidth", "prefill_attention": "compute",
    "communication": "links", "swap": "links", "host": "host", "gaps": "host",
}  # fmt: skip


@dataclass(frozen=True)
class StepPoint:
    """Some steps together on the roofline: what they move, compute and take."""

    label: str
    num_steps: int
    num_bytes: float
    flops: float
    seconds: float

    @property
    def intensity(self) -> float:
        """FLOP for each byte that is read."""
        return self.flops / self.num_bytes

    @property
    def flops_per_s(self) -> float:
        """FLOP per second that was reached."""
        return self.flops / self.seconds


@dataclass(frozen=True)
class StepBound:
    """What binds the steps.

    Attributes:
        name: the part with the most time. shares: part → share of the steps' time, 0 to 1, summing to 1.
        points: steps that only decode and steps with prompts.
        flops_per_s, bytes_per_s: of the card's data sheet, over all cards of the engine.
    """

    name: BoundName
    shares: Mapping[BoundName, float]
    points: tuple[StepPoint, ...]
    flops_per_s: float
    bytes_per_s: float

    @property
    def ridge(self) -> float:
        """FLOP a byte from which on the products set the time."""
        return self.flops_per_s / self.bytes_per_s

    @property
    def sentence(self) -> str:
        """The largest part in words, without a final period."""
        return f"{share(self.shares[self.name], 1)} of the steps' time is {_WORDS[self.name]}"


def step_bound(plan: MemoryPlan, record: RunRecord) -> StepBound | None:
    """What binds the steps of `record`; None for a CPU, an unknown card, what does not fit or took no time."""
    gpu = plan.gpu
    peak = gpu.bf16_flops or gpu.fp16_flops
    seconds = np.array([step.duration_s for step in record.steps])
    if plan.verdict == "does not fit" or gpu.is_cpu or not peak or not gpu.mem_bandwidth_bytes_per_s:
        return None
    if not len(seconds) or seconds.sum() <= 0:
        return None
    model = _model(plan)
    load = _load(plan, record, model)
    parts = _time_parts(model, load, peak)
    if plan.config.enforce_eager:
        _split_eager(parts, model, plan, load)
    totals = {name: float(values.sum()) for name, values in parts.items()}
    whole = sum(totals.values())
    shares = {name: value / whole for name, value in totals.items()}
    cards = plan.config.tensor_parallel_size
    return StepBound(
        max(shares, key=lambda name: shares[name]), shares, _points(model, load, record, seconds, cards),
        cards * peak, cards * gpu.mem_bandwidth_bytes_per_s,
    )  # fmt: skip


def _model(plan: MemoryPlan) -> StepTimeModel:
    constants = constants_for(
        plan.gpu, plan.model.name, engine=plan.engine, engine_version=plan.engine_version,
        is_moe=plan.model.moe is not None,
    )  # fmt: skip
    return virtual_engine(plan, constants).gpu.model


def _load(plan: MemoryPlan, record: RunRecord, model: StepTimeModel) -> StepLoad:
    """The work of each step as far as its row says it: contexts are means, prompts are of the run's mean length."""
    steps = record.steps

    def column(name: str) -> np.ndarray:
        return np.array([getattr(step, name) for step in steps], dtype=float)

    running, decodes, prompts = column("num_running"), column("num_decode_tokens"), column("num_prefill_tokens")
    context = column("num_tokens_stored") / np.maximum(1.0, running)
    lengths = [row.input_tokens for row in record.requests]
    prompt = float(np.mean(lengths)) if lengths else float(plan.config.max_num_batched_tokens or 1)
    kinds = model.cost.kv
    return StepLoad(
        num_tokens=column("num_tokens"), num_seqs=np.maximum(running, 1.0),
        num_sampled=decodes + prompts / max(1.0, prompt),
        kv_tokens=tuple(decodes * (np.minimum(context, kind.window) if kind.window else context) for kind in kinds),
        pairs=tuple(prompts * (min(prompt, 2.0 * kind.window) if kind.window else prompt) / 2 for kind in kinds),
        swapped_bytes=column("num_swapped_blocks") * plan.block_bytes,
    )  # fmt: skip


def _time_parts(model: StepTimeModel, load: StepLoad, peak: float) -> dict[BoundName, np.ndarray]:
    zero = np.zeros_like(load.num_tokens)
    parts: dict[BoundName, np.ndarray] = dict.fromkeys(_WORDS, zero)
    for name, seconds in model.parts(load).items():
        if name in _PARTS:
            parts[_PARTS[name]] = parts[_PARTS[name]] + seconds
            continue
        roof = _compute_share(model, load, name, peak)
        parts["compute"] = parts["compute"] + roof * seconds
        parts["bandwidth"] = parts["bandwidth"] + (1 - roof) * seconds
    return parts


def _compute_share(model: StepTimeModel, load: StepLoad, name: str, peak: float) -> np.ndarray:
    """1 where the products of a part touch the compute roof, 0 where they touch the memory's."""
    cost = model.cost
    matrix = {"dense": cost.dense, "experts": cost.experts, "lm_head": cost.head}[name]
    rows = load.num_sampled if name == "lm_head" else load.num_tokens
    if name == "experts":
        rows = rows * cost.experts_per_tok / max(1, cost.num_experts)
    is_wide = cost.weight_kind != "fp8" or not model.gpu.fp8_flops
    flops_s = 2 * matrix.num_elements * rows / (peak if is_wide else model.gpu.fp8_flops or peak)
    return (flops_s > matrix.num_bytes / (model.gpu.mem_bandwidth_bytes_per_s or 1.0)).astype(float)


def _split_eager(parts: dict[BoundName, np.ndarray], model: StepTimeModel, plan: MemoryPlan, load: StepLoad) -> None:
    """Moves from host to graphs what captured graphs would save."""
    captured = _model(replace(plan, config=plan.config.replace(enforce_eager=False)))
    with_graphs = sum(seconds for name, seconds in captured.parts(load).items() if _PARTS.get(name) == "host")
    saved = np.maximum(0.0, parts["host"] - with_graphs)
    parts["graphs"], parts["host"] = saved, parts["host"] - saved


def _points(
    model: StepTimeModel, load: StepLoad, record: RunRecord, seconds: np.ndarray, cards: int
) -> tuple[StepPoint, ...]:
    cost, tokens = model.cost, load.num_tokens
    active: np.ndarray | float = 1.0
    if cost.num_experts:
        active = 1 - (1 - cost.experts_per_tok / cost.num_experts) ** tokens
    visits = tokens * cost.experts_per_tok / max(1, cost.num_experts)
    moved: np.ndarray | float = cost.dense.num_bytes + cost.head.num_bytes + active * cost.experts.num_bytes
    flops = 2 * (cost.dense.num_elements * tokens + cost.head.num_elements * load.num_sampled)
    flops = flops + 2 * cost.experts.num_elements * visits
    for kind, read, pairs in zip(cost.kv, load.kv_tokens, load.pairs, strict=True):
        moved = moved + kind.num_layers * kind.token_bytes * read
        flops = flops + kind.num_layers * (kind.decode_flops * read + kind.prefill_flops * pairs)
    prompts = np.array([step.num_prefill_tokens > 0 for step in record.steps])
    found = []
    for label, chosen in (("steps that only decode", ~prompts), ("steps with prompts", prompts)):
        if seconds[chosen].sum() > 0:
            bytes_, products = (
                cards * float((values + np.zeros_like(tokens))[chosen].sum()) for values in (moved, flops)
            )
            found.append(StepPoint(label, int(chosen.sum()), bytes_, products, float(seconds[chosen].sum())))
    return tuple(found)
