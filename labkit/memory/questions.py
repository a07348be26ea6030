"""Inverse questions: what fits, with how little, and what each flag buys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from labkit.errors import LabkitError, OutOfRangeError
from labkit.format import count, memory
from labkit.memory.division import split_weight_block
from labkit.memory.kv_layout import KvGroup, KvLayout, PageKind
from labkit.memory.logs.record import LogRecord
from labkit.memory.planner import plan
from labkit.memory.records import MemoryPlan
from labkit.memory.stages import Calibration, Overrides
from labkit.specs.engine_config import HIGHEST_UTILIZATION, EngineConfig
from labkit.specs.gpu_spec import GpuSpec
from labkit.specs.model_spec import ModelSpec

GIB = 2**30
CARD_COUNTS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Question:
    """A server to ask about: everything that `plan` takes."""

    model: ModelSpec
    gpu: GpuSpec
    config: EngineConfig
    engine: str = "vllm"
    engine_version: str = "0.33.0"
    calibration: Calibration | LogRecord | None = None
    overrides: Overrides | None = None

    def plan(self, **changes: Any) -> MemoryPlan:
        """The plan with some knobs changed."""
        return plan(
            self.model,
            self.gpu,
            self.config.replace(**changes) if changes else self.config,
            engine=self.engine,
            engine_version=self.engine_version,
            calibration=self.calibration,
            overrides=self.overrides,
        )


@dataclass(frozen=True)
class FlagEffect:
    """What one change of a flag does.

    Attributes:
        knob, before, after: the change.
        kv_bytes: KV bytes gained on the binding rank; negative when lost.
        tokens: tokens gained at the same max_model_len: concurrency times max_model_len.
        requests: requests of max_model_len gained.
        verdict: of the changed configuration.
        text: one sentence with the numbers.
    """

    knob: str
    before: Any
    after: Any
    kv_bytes: int
    tokens: int
    requests: float
    verdict: str
    text: str


def layout_of(found: MemoryPlan) -> KvLayout:
    """The KV layout of a plan's binding rank, rebuilt from its details."""
    details: Mapping[str, Any] = found.details
    if "ranks" in details:
        details = details["ranks"][details["binding_rank"]]
    groups = tuple(
        KvGroup(
            PageKind(group["kind"], group["block_tokens"], group["token_bytes"], group["page_bytes"], group["window"]),
            group["num_layers"],
        )
        for group in details["groups"]
    )
    return KvLayout(
        groups,
        found.block_bytes,
        details.get("padding_layers", 0),
        details.get("state_blocks", 1),
        details.get("in_flight_tokens", 0),
    )


def concurrent_requests(found: MemoryPlan, lengths: Sequence[int]) -> int:
    """How many requests with these lengths (prompt plus output, a sample) hold KV at once.

    Blocks over the mean number of blocks of the sample, at most max_num_seqs.

    Raises:
        OutOfRangeError: no lengths, or one below 1.
    """
    if not lengths or min(lengths) < 1:
        raise OutOfRangeError("lengths must be whole numbers of 1 or more, and at least one", knob="lengths")
    seqs = found.config.max_num_seqs or 1
    layout = layout_of(found)
    if not layout.groups:
        return seqs
    mean = sum(layout.blocks_per_request(length) for length in lengths) / len(lengths)
    return min(seqs, int(found.num_gpu_blocks / mean))


def smallest_utilization(question: Question, *, sure: bool = False) -> float | None:
    """The smallest --gpu-memory-utilization with which one request of max_model_len fits, in steps of 0.001.

    `sure` asks for the margin to exceed the uncertainty. None when no utilization is enough.
    """

    def enough(thousandths: int) -> bool:
        found = question.plan(gpu_memory_utilization=thousandths / 1000)
        spare = found.details["ranks"][found.details["binding_rank"]]["uncertainty_bytes"]["kv_cache"] if sure else 0
        return found.margin_bytes >= spare and found.num_gpu_blocks > 0

    low, high = 10, 1000
    if not enough(high):
        return None
    while low < high:
        middle = (low + high) // 2
        if enough(middle):
            high = middle
        else:
            low = middle + 1
    return low / 1000


def cards_needed(question: Question) -> int | None:
    """The smallest power of two of cards that can divide the model and have verdict "fits"; None for none."""
    for cards in CARD_COUNTS:
        try:
            found = question.plan(tensor_parallel_size=cards)
        except OutOfRangeError as error:
            if error.knob != "tensor_parallel_size":
                raise
            continue
        splits = question.engine == "vllm" and split_weight_block(question.model, found.config)
        if found.verdict == "fits" and not splits:
            return cards
    return None


def kv_bytes_for(found: MemoryPlan, num_requests: int, length: int) -> int:
    """--kv-cache-memory-bytes that holds `num_requests` requests of `length` tokens, the null block included."""
    layout = layout_of(found)
    blocks = num_requests * layout.blocks_per_request(length)
    return (blocks + (1 if found.engine == "vllm" else 0)) * layout.block_bytes


def flag_effects(question: Question) -> list[FlagEffect]:
    """What each flag buys, one change at a time, largest gain in tokens first."""
    base = question.plan()
    effects = []
    for knob, value in _changes(base):
        try:
            changed = question.plan(**{knob: value})
        except LabkitError:
            continue
        effects.append(_effect(base, changed, knob, getattr(question.config, knob), value))
    return sorted(effects, key=lambda effect: -effect.tokens)


def _changes(base: MemoryPlan) -> list[tuple[str, Any]]:
    """The changes worth asking about, from where the configuration stands."""
    config = base.config
    seqs, tokens = config.max_num_seqs or 1, config.max_num_batched_tokens or 1
    changes: list[tuple[str, Any]] = []
    if config.kv_cache_dtype == "auto":
        changes.append(("kv_cache_dtype", "fp8"))
    changes += [("max_num_seqs", size) for size in (256, 128) if size < seqs]
    changes += [("max_num_batched_tokens", size) for size in (2048, 1024) if seqs <= size < tokens]
    changes += [
        ("gpu_memory_utilization", share)
        for share in (round(config.gpu_memory_utilization + 0.02, 2), HIGHEST_UTILIZATION)
        if config.gpu_memory_utilization < share <= HIGHEST_UTILIZATION
    ]
    if not config.enforce_eager:
        changes.append(("enforce_eager", True))
    if (config.max_model_len or 0) > 2:
        changes.append(("max_model_len", (config.max_model_len or 2) // 2))
    changes.append(("tensor_parallel_size", config.tensor_parallel_size * 2))
    if config.quantization is None and base.model.weight_format.kind == "16bit":
        changes.append(("quantization", "fp8"))
    return list(dict.fromkeys(changes))


def _effect(base: MemoryPlan, changed: MemoryPlan, knob: str, before: Any, after: Any) -> FlagEffect:
    pools = [plan.details["ranks"][plan.details["binding_rank"]]["available_kv_bytes"] for plan in (changed, base)]
    tokens = [int(plan.max_concurrency * (plan.config.max_model_len or 0)) for plan in (changed, base)]
    gained, more = pools[0] - pools[1], tokens[0] - tokens[1]
    requests = changed.max_concurrency - base.max_concurrency
    shown_before = getattr(base.config, knob) if before is None else before
    sign = "+" if more >= 0 else "−"
    text = (
        f"{knob} {shown_before} → {after}: {'+' if gained >= 0 else '−'}{memory(abs(gained))} of KV, "
        f"{sign}{count(abs(more))} tokens ({changed.verdict})"
    )
    return FlagEffect(knob, shown_before, after, gained, more, requests, changed.verdict, text)
