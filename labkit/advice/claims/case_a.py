"""The guides' case (a): an embedding server on an A10 that runs out of memory and is stable after tuning.

The guides name neither model nor dtype nor vLLM's version, nor what else was on the card. Each `Reading` fills these
in; the plan says whether the guides' first flags fail and their second start, the virtual GPU what rate they reach.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from labkit.advice.claims.verdict import Verdict, judged
from labkit.advice.command import export_command, vllm_command
from labkit.engine.step_constants import load_constants
from labkit.errors import LabkitError
from labkit.experiments.virtual_run import VirtualOptions, simulate
from labkit.format import GIB, gib, memory
from labkit.measure.summary import RunSummary, summarize
from labkit.memory import plan
from labkit.memory.records import MemoryPlan
from labkit.specs import load_gpu, load_model, synthetic_workload
from labkit.specs.engine_config import EngineConfig
from labkit.specs.gpu_spec import GpuSpec
from labkit.specs.model_spec import ModelSpec
from labkit.specs.workload import Workload

CARD, SMALL, LARGE, VERSION, OLD_VERSION = "A10", "Qwen/Qwen3-Embedding-0.6B", "Qwen/Qwen3-8B", "0.33.0", "0.6.0"
BEFORE: Mapping[str, Any] = {
    "gpu_memory_utilization": 0.9, "max_model_len": 32768, "block_size": 8, "max_num_batched_tokens": 16384,
}  # fmt: skip
AFTER: Mapping[str, Any] = {
    "gpu_memory_utilization": 0.82, "max_model_len": 4096, "block_size": 16, "max_num_batched_tokens": 8192,
    "kv_cache_dtype": "fp8", "enable_chunked_prefill": True,
}  # fmt: skip
SAID_RATE, SAID_P99_S, SAID_MEMORY = 28.0, 0.138, "18.2 GB"
# 10 KB of prose at four to five bytes a token are 2,000 to 2,560 tokens; the middle.
TEXT_TOKENS = 2300
HELD_GIB = 3.0
Failure = Literal["none", "memory", "flags"]


@dataclass(frozen=True)
class Reading:
    """What the guides leave open, filled in.

    Attributes:
        name: short; `words` say the assumption.
        free_gib: of the card at start, None for all.
        changes: settings on top of the guides' first ones.
        has_pool: vLLM before V1 allocated no KV for embedding models.
    """

    name: str
    words: str
    model: ModelSpec
    free_gib: float | None = None
    changes: Mapping[str, Any] | None = None
    version: str = VERSION
    has_pool: bool = True
    checks_block_size: bool = False

    @property
    def gpu(self) -> GpuSpec:
        """The A10 as this reading finds it."""
        card = load_gpu(CARD)
        return card if self.free_gib is None else replace(card, free_bytes=int(self.free_gib * GIB))


@dataclass(frozen=True)
class Found:
    """What a reading gives.

    Attributes:
        failure: of the guides' first flags: "none", "memory" as they say, or "flags" refused before memory counts.
        reason: of the failure, or what is left where there is none.
        is_stable: the guides' second flags start and every request finishes, without preemption.
        used_bytes: by the second flags.
        rate, rate_low, rate_high: embeddings per second of texts of `TEXT_TOKENS`, with the range of nine in ten.
    """

    reading: Reading
    failure: Failure
    reason: str
    is_stable: bool
    used_bytes: int
    rate: float
    rate_low: float
    rate_high: float

    @property
    def is_memory_story(self) -> bool:
        """Fails for memory and is stable after, as the guides say."""
        return self.failure == "memory" and self.is_stable

    @property
    def allows_rate(self) -> bool:
        """The guides' 28 req/s lie in the range."""
        return self.rate_low <= SAID_RATE <= self.rate_high


def embedding_of(name: str) -> ModelSpec:
    """A model's shapes as an embedding model that pools the last token."""
    return replace(load_model(name), is_embedding=True, pooling="last")


def readings() -> tuple[Reading, ...]:
    """Every reading that is put to the test."""
    small, total = embedding_of(SMALL), load_gpu(CARD).total_bytes / GIB
    shared = total - HELD_GIB
    return (
        Reading("alone on the card", "Qwen3-Embedding-0.6B, which the guides use elsewhere, 16 bit, no other process",
                small),
        Reading("float32", "the same in float32", small, changes={"dtype": "float32"}),
        Reading("shared card", f"another process holds {gib(HELD_GIB)} of the card", small, free_gib=shared),
        Reading("no chunked prefill", "vLLM without chunked prefill for embedding models", small,
                changes={"enable_chunked_prefill": False}),
        Reading("block 8", "vLLM's attention backends for CUDA take multiples of 16", small,
                checks_block_size=True),
        Reading("vLLM 0.6", "vLLM before V1, which has no KV pool for embedding models", small,
                version=OLD_VERSION, has_pool=False),
        Reading("0.5B model", "Qwen2-0.5B's shapes, the guides' other small model", embedding_of("Qwen/Qwen2-0.5B")),
        Reading("7B model", "Qwen2-7B's shapes (gte-Qwen2-7B has them)", embedding_of("Qwen/Qwen2-7B")),
        Reading("8B model", "Qwen3-8B's shapes (Qwen3-Embedding-8B has them)", embedding_of(LARGE)),
    )  # fmt: skip


def texts(num_texts: int = 120, arrivals: str = "all_at_once", tokens: int = TEXT_TOKENS) -> Workload:
    """Texts of 10 KB to embed."""
    return synthetic_workload(num_texts, input_lengths=tokens, output_lengths=1, arrivals=arrivals, seed=7)


def planned_as(reading: Reading, knobs: Mapping[str, Any]) -> MemoryPlan:
    """vLLM's plan of `knobs` under a reading."""
    config = EngineConfig(**knobs)
    return plan(reading.model, reading.gpu, config, engine="vllm", engine_version=reading.version)


def served_as(reading: Reading, knobs: Mapping[str, Any], traffic: Workload, *, at_once: bool = True) -> RunSummary:
    """The summary of `traffic` on the virtual A10 under a reading."""
    options = VirtualOptions(arrival_scale=0.0 if at_once else 1.0, has_server=not at_once)
    record = simulate(reading.model, reading.gpu, traffic, EngineConfig(**knobs), options=options,
                      engine_version=reading.version)  # fmt: skip
    return summarize(record)


def try_reading(reading: Reading) -> Found:
    """Both of the guides' settings under one reading."""
    failure, reason = _failure(reading)
    knobs = {**AFTER, **{name: value for name, value in (reading.changes or {}).items() if name == "dtype"}}
    after, summary = planned_as(reading, knobs), served_as(reading, knobs, texts())
    constants, rate = load_constants(reading.version), summary.requests_per_s or 0.0
    is_stable = after.verdict == "fits" and summary.num_finished == summary.num_requests > 0
    used = after.breakdown.used_bytes - (0 if reading.has_pool else after.breakdown.kv_cache_bytes)
    return Found(reading, failure, reason, is_stable and not summary.num_preemptions, used, rate,
                 rate / constants.interval_high, rate / constants.interval_low)  # fmt: skip


def _failure(reading: Reading) -> tuple[Failure, str]:
    knobs = {**BEFORE, **(reading.changes or {})}
    if reading.checks_block_size:
        refused = export_command(reading.model.name, EngineConfig(**knobs), reading.version).not_exported
        return "flags", "; ".join(f"{item.knob} {item.value}: {item.reason}" for item in refused)
    try:
        before = planned_as(reading, knobs)
    except LabkitError as error:
        return "flags", error.message
    parts, room = before.breakdown, before.margin_bytes
    if not reading.has_pool:
        peak = parts.weights_bytes + parts.activation_bytes + parts.workspace_bytes + parts.cuda_graphs_bytes
        return "none", f"no pool; weights, activations and workspace take {memory(peak)}"
    if before.verdict != "does not fit":
        return "none", f"{memory(parts.kv_cache_bytes)} of KV, {memory(room)} more than one longest text needs"
    if room >= 0:
        wanted = parts.total_bytes * before.config.gpu_memory_utilization
        free = reading.gpu.free_bytes or parts.total_bytes
        return "memory", f"{memory(free)} are free and the utilization asks for {memory(wanted)}"
    return "memory", f"one text of {before.config.max_model_len:,} tokens needs {memory(-room)} of KV more than is left"


def cures(reading: Reading) -> tuple[str, ...]:
    """Which of the changed flags makes the first ones start when it is changed alone."""
    found = []
    for name, value in AFTER.items():
        knobs = {**BEFORE, **(reading.changes or {}), name: value}
        try:
            if planned_as(reading, knobs).verdict == "fits":
                found.append(name)
        except LabkitError:
            continue
    return tuple(found)


def shared_range_gib(step_gib: float = 0.1) -> tuple[float, float] | None:
    """Least and most GiB held by others with which the first flags fail and the second start; None for never."""
    base, held = readings()[0], []
    total = base.gpu.total_bytes / GIB
    for number in range(1, round(6 / step_gib)):
        reading = replace(base, free_gib=total - number * step_gib)
        verdicts = [planned_as(reading, knobs).verdict for knobs in (BEFORE, AFTER)]
        if verdicts == ["does not fit", "fits"]:
            held.append(number * step_gib)
    return (held[0], held[-1]) if held else None


def tokens_for_the_claim(reading: Reading, step: int = 128) -> int:
    """Longest text, in steps of 128 tokens, with which 28 req/s keep a p99 of 138 ms; 0 for none."""
    low, high = 0, TEXT_TOKENS // step
    while low < high:
        middle = (low + high + 1) // 2
        traffic = texts(200, f"poisson:{SAID_RATE:g}", middle * step)
        times = served_as(reading, AFTER, traffic, at_once=False).ttft_s
        low, high = (middle, high) if times and times.p99 <= SAID_P99_S else (low, middle - 1)
    return low * step


@dataclass(frozen=True)
class Answer:
    """Settings beside each other on the same texts: command, rate, p99 at a load, memory in use."""

    name: str
    knobs: Mapping[str, Any]
    command: str
    rate: float
    p99_s: float | None
    used_bytes: int


def answer_of(name: str, reading: Reading, knobs: Mapping[str, Any], load: Workload) -> Answer:
    """One setting on the texts at once, and under `load`."""
    loaded = served_as(reading, knobs, load, at_once=False).ttft_s
    return Answer(
        name, knobs, vllm_command(reading.model.name, EngineConfig(**knobs), reading.version),
        served_as(reading, knobs, texts()).requests_per_s or 0.0, loaded.p99 if loaded else None,
        planned_as(reading, knobs).breakdown.used_bytes,
    )  # fmt: skip


def better_answer(reading: Reading, rate: float = 20.0) -> tuple[Answer, Answer]:
    """The guides' second settings and the lab's own for the same texts, under `rate` texts a second.

    The lab's: of some token budgets and utilizations that fit, the one with the shortest p99 among those within 1 %
    of the best rate; then the least memory.
    """
    load = texts(200, f"poisson:{rate:g}")
    theirs, found = answer_of("guides", reading, AFTER, load), []
    for tokens in (2048, 4096, 8192):
        for share in (0.2, 0.3, 0.5, 0.8):
            knobs = {"gpu_memory_utilization": share, "max_model_len": 4096, "max_num_batched_tokens": tokens,
                     "max_num_seqs": 32}  # fmt: skip
            if planned_as(reading, knobs).verdict == "fits":
                found.append(answer_of("labkit", reading, knobs, load))
                break
    fastest = max((answer.rate for answer in found), default=0.0)
    good = [answer for answer in found if answer.rate >= 0.99 * fastest]
    return theirs, min(good, key=lambda answer: (round(answer.p99_s or 9e9, 3), answer.used_bytes), default=theirs)


def judge_case() -> Verdict:
    """What the case is worth."""
    found = [try_reading(reading) for reading in readings()]
    by_name = {entry.reading.name: entry for entry in found}
    shared = by_name["shared card"].reading
    span = shared_range_gib()
    theirs, ours = better_answer(shared)
    stories = [entry for entry in found if entry.is_memory_story]
    return judged(
        "CASE-A",
        "Embedding 10 KB texts on an A10 runs out of memory at utilization 0.9, max-model-len 32768, block 8, 16,384 "
        "batched tokens, and is stable at 0.82, 4096, 16, 8192 with chunked prefill and fp8 KV: 18.2 GB, P99 138 ms, "
        "28 req/s.",
        "depends" if stories else "wrong",
        {
            **{f"first flags, {entry.reading.name}": f"{_WORDS[entry.failure]}: {entry.reason}" for entry in found},
            **{f"changed alone cures it, {entry.reading.name}": ", ".join(cures(entry.reading)) or "none"
               for entry in stories},
            **{f"req/s with the second flags, {entry.reading.name}": _range(entry) for entry in found[:1] + stories},
            "GiB of others that only the first flags do not bear": "{:.1f} to {:.1f}".format(*span) if span else "-",
            "longest text with P99 138 ms at 28 req/s, tokens": tokens_for_the_claim(shared),
            "0.82 of the card, GiB": AFTER["gpu_memory_utilization"] * load_gpu(CARD).total_bytes / GIB,
            **_answers(theirs, ours),
        },
        _conclusion(found, span, ours),
        "simulation",
    )  # fmt: skip


_WORDS: Mapping[Failure, str] = {"none": "start", "memory": "fail for memory", "flags": "are refused"}


def _range(entry: Found) -> str:
    return f"{entry.rate:.3g} ({entry.rate_low:.3g} to {entry.rate_high:.3g})"


def _answers(theirs: Answer, ours: Answer) -> dict[str, float | str]:
    numbers: dict[str, float | str] = {}
    for answer in (theirs, ours):
        numbers |= {
            f"{answer.name}: req/s, all at once": answer.rate,
            f"{answer.name}: p99 at 20 req/s, ms": 1e3 * (answer.p99_s or 0.0),
            f"{answer.name}: memory in use, {gib(HELD_GIB)} of others included, GiB": answer.used_bytes / GIB,
        }
    return numbers | {"labkit's command": " ".join(ours.command.replace("\\\n", " ").split())}


def _names(entries: Sequence[Found]) -> str:
    return ", ".join(f"“{entry.reading.name}”" for entry in entries)


def _conclusion(found: Sequence[Found], span: tuple[float, float] | None, ours: Answer) -> str:
    stories = [entry for entry in found if entry.is_memory_story]
    whole = [entry for entry in stories if entry.allows_rate]
    part = [entry for entry in stories if not entry.allows_rate]
    refused = [entry for entry in found if entry.failure == "flags"]
    curing = {name for entry in stories for name in cures(entry.reading)}
    idle = [name for name in AFTER if name not in curing]
    held = f", {gib(round(span[0], 1))} to {gib(round(span[1], 1))}," if span else ""
    sentences = [
        f"The guides name no model; their flags alone do not run out of memory: they start under "
        f"{_names([entry for entry in found if entry.failure == 'none'])}.",
        f"Failure, recovery and rate together need one thing that the guides do not say: another process on the card"
        f"{held} {_names(whole)}. vLLM then does not find 0.9 of the card free, and finds 0.82." if whole else
        "No reading gives both the failure and the rate.",
        f"{_names(part)} fails and recovers as told, but is far from {SAID_RATE:g} req/s." if part else "",
        f"Under {_names(refused)} the first flags are refused before memory counts." if refused else "",
        f"No part is played by {', '.join(idle)}. The {SAID_MEMORY} are the utilization's share of the card; the same "
        f"rate needs {memory(ours.used_bytes - HELD_GIB * GIB)}.",
    ]  # fmt: skip
    return " ".join(sentence for sentence in sentences if sentence)
