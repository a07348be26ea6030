"""A log beside the plan: which part is off, why, and the smallest change of flags that cures it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from labkit.errors import LabkitError
from labkit.format import count, memory
from labkit.memory.calibration import calibration_of, log_config
from labkit.memory.logs.read import read_log_file
from labkit.memory.logs.record import LogRecord
from labkit.memory.planner import plan
from labkit.memory.questions import Question, smallest_utilization
from labkit.memory.records import MemoryPlan
from labkit.memory.rules import vllm_rules
from labkit.memory.stages import Calibration, Overrides
from labkit.specs.engine_config import HIGHEST_UTILIZATION
from labkit.specs.gpu_spec import GpuSpec
from labkit.specs.model_loading import load_model
from labkit.specs.model_spec import ModelSpec
from labkit.specs.quantized_names import named_model

NEWEST = "0.33.0"
# Two printed decimals of GiB stand for this much.
PRINT_ROUNDING = round(0.005 * 2**30)
WORTH_NAMING = 2**28
PARTS = ("total", "weights", "activation", "non_torch", "cuda_graphs", "available_kv")
TITLES = {
    "total": "card's total", "weights": "weights", "activation": "activation peak", "non_torch": "non-torch memory",
    "cuda_graphs": "CUDA graphs", "available_kv": "KV cache",
}  # fmt: skip


@dataclass(frozen=True)
class PartRow:
    """One part in the log and in the plan, in bytes; None where one of them does not say."""

    part: str
    title: str
    log_bytes: int | None
    plan_bytes: int | None
    uncertainty_bytes: int

    @property
    def difference_bytes(self) -> int | None:
        """Log less plan."""
        if self.log_bytes is None or self.plan_bytes is None:
            return None
        return self.log_bytes - self.plan_bytes

    @property
    def is_off(self) -> bool:
        """The difference is beyond print rounding and the plan's uncertainty, or worth naming although inside it."""
        difference = self.difference_bytes
        expected = min(self.uncertainty_bytes, WORTH_NAMING) + 2 * PRINT_ROUNDING
        return difference is not None and abs(difference) > expected


@dataclass(frozen=True)
class Cure:
    """The smallest change of flags that helps.

    Attributes:
        changes: knob → value; empty where no flag helps.
        text: the change and its predicted effect, one sentence.
    """

    changes: Mapping[str, Any]
    text: str


@dataclass(frozen=True)
class LogExplanation:
    """What a log means.

    Attributes:
        record: what was read.
        answer: the finding in one or two sentences.
        cause: a short name: "fits", "length_does_not_fit", "card_not_free", "no_kv_memory", …, "not_vllm".
        rows: part by part beside the plan; without a known model only the log's column.
        off: the part that is furthest off, or None.
        cures: what helps, the smallest change first.
        calibration: this host's constants, for the next plan; None without a plan.
        plan: of the log's own flags; None where the model or the card is not known.
        notes: what was assumed or doubtful.
    """

    record: LogRecord
    answer: str
    cause: str
    rows: tuple[PartRow, ...]
    off: str | None
    cures: tuple[Cure, ...]
    calibration: Calibration | None
    plan: MemoryPlan | None
    notes: tuple[str, ...]


def explain_log(record: LogRecord, model: ModelSpec | None = None, gpu: GpuSpec | None = None) -> LogExplanation:
    """Set a log beside the plan of its own flags.

    Args:
        record: from `labkit.memory.logs.read_log`.
        model: the model; None looks for the log's name in the catalogue.
        gpu: the card; None takes the catalogue's card of the log's total.
    """
    if not record.is_vllm:
        return LogExplanation(
            record, f"nothing in these {count(record.num_lines)} lines is vLLM's memory output", "not_vllm", (), None,
            (Cure({}, "give the server's own output, from its start to the first request or to the error"),), None,
            None, record.notes,
        )  # fmt: skip
    model = model or (named_model(record.model) if record.model else None)
    gpu = gpu or _known_card(record.facts.get("total_bytes"))
    if model is None or gpu is None:
        return _without_plan(record, model, gpu)
    version = record.version or NEWEST
    rules = vllm_rules(version)
    try:
        config = log_config(record, rules.utilization)
        overrides = Overrides(total_bytes=record.facts.get("total_bytes"), free_bytes=record.facts.get("free_bytes"))
        found = plan(model, gpu, config, engine="vllm", engine_version=version, overrides=overrides)
    except LabkitError as error:
        return replace(_without_plan(record, model, gpu), notes=(*record.notes, f"no plan of these flags: {error}"))
    rows = part_rows(record, found)
    calibration = calibration_of(record, found)
    question = Question(model, gpu, found.config, "vllm", version, calibration, overrides)
    cause = _cause(record)
    off = _furthest_off(rows)
    return LogExplanation(
        record, _answer(cause, record, found, off), cause, rows, off.part if off else None,
        tuple(cures(cause, question, record)), calibration, found, (*record.notes, *found.notes),
    )  # fmt: skip


def part_rows(record: LogRecord, found: MemoryPlan) -> tuple[PartRow, ...]:
    """Every part that the log or the plan knows."""
    rank = found.details["ranks"][found.details["binding_rank"]]
    spread = {"total": 0, "available_kv": rank["uncertainty_bytes"]["kv_cache"]}
    spread |= {name: rank["uncertainty_bytes"][name] for name in ("weights", "activation", "cuda_graphs")}
    spread["non_torch"] = rank["uncertainty_bytes"]["workspace"]
    return tuple(
        PartRow(part, TITLES[part], record.facts.get(f"{part}_bytes"), rank[f"{part}_bytes"], spread[part])
        for part in PARTS
    )


def _furthest_off(rows: tuple[PartRow, ...]) -> PartRow | None:
    """The part that is off most; the pool only where no part explains it."""
    off = [row for row in rows if row.is_off]
    parts = [row for row in off if row.part not in ("available_kv", "cuda_graphs")] or off
    return max(parts, key=lambda row: abs(row.difference_bytes or 0), default=None)


def _known_card(total_bytes: int | None) -> GpuSpec | None:
    """The catalogue's card whose total is nearest, when within 1.5 %."""
    from labkit.specs.gpu_catalogue import catalogue_gpu, gpu_names

    if not total_bytes:
        return None
    cards = [catalogue_gpu(name) for name in gpu_names()]
    card = min(cards, key=lambda card: abs(card.total_bytes - total_bytes))
    if abs(card.total_bytes - total_bytes) > 0.015 * total_bytes:
        return GpuSpec(f"card of {memory(total_bytes)}", total_bytes)
    return card


def _without_plan(record: LogRecord, model: ModelSpec | None, gpu: GpuSpec | None) -> LogExplanation:
    rows = tuple(
        PartRow(part, TITLES[part], record.facts[f"{part}_bytes"], None, 0)
        for part in PARTS
        if f"{part}_bytes" in record.facts
    )
    lacks = " and ".join(name for name, value in (("the model", model), ("the card", gpu)) if value is None)
    notes = [*record.notes]
    if lacks:
        notes.append(f"no plan beside the log: it does not say {lacks}; give it (--model, --gpu)")
    cause = _cause(record)
    return LogExplanation(
        record, _answer(cause, record, None, None), cause, rows, None, tuple(_cures_without_plan(cause, record)), None,
        None, tuple(notes),
    )  # fmt: skip


def _cause(record: LogRecord) -> str:
    """The most telling error; a bare out-of-memory only where nothing says more."""
    if record.errors:
        return min(record.errors, key=lambda cause: cause == "out_of_memory")
    return "fits" if {"available_kv_bytes", "num_gpu_blocks"} & record.facts.keys() else "incomplete"


def _answer(cause: str, record: LogRecord, found: MemoryPlan | None, off: PartRow | None) -> str:
    facts = record.facts
    needed = facts.get("needed_bytes") or (found.details["needed_bytes"] if found else None)
    have = facts.get("available_kv_bytes")
    texts = {
        "length_does_not_fit": f"one request of {count(facts.get('max_model_len'))} tokens needs {memory(needed)} of "
        f"KV and there are {memory(have)}",
        "card_not_free": f"{memory(facts.get('free_bytes'))} of {memory(facts.get('total_bytes'))} were free and "
        f"{memory(facts.get('requested_bytes'))} were asked for: another process holds the rest",
        "no_kv_memory": "weights, activations and what else is on the card leave nothing for the KV cache",
        "sampler_out_of_memory": f"the sampler's warm-up with {count(facts.get('max_num_seqs'))} requests found "
        "no room beside the KV cache",
        "out_of_memory": f"an allocation of {memory(facts.get('failed_bytes'))} failed outside the budget",
        "too_few_state_blocks": f"{count(facts.get('max_num_seqs'))} requests need a state block each and there are "
        f"{count(facts.get('state_blocks_available'))}",
        "memory_moved": "another process released memory while this one was measuring: start one at a time",
        "unknown_flag": f"vLLM {record.version or ''} does not know {', '.join(record.unknown_arguments) or 'a flag'}",
        "dtype_unsupported": "this card has no bfloat16",
        "fits": f"the server started with {memory(have)} of KV",
        "incomplete": "the log ends before the KV cache is sized",
    }
    text = texts.get(cause, cause)
    if off is not None and off.difference_bytes is not None:
        more = "more" if off.difference_bytes > 0 else "less"
        text += f"; {off.title}: {memory(abs(off.difference_bytes))} {more} than planned{_why(off)}"
    return text


def _why(row: PartRow) -> str:
    more = (row.difference_bytes or 0) > 0
    reasons = {
        ("non_torch", True): ": another process on the card, or buffers of a communication library",
        ("weights", True): ": another weight format, or parts outside the decoder",
        ("weights", False): ": the weights are quantised, or fewer layers were loaded",
        ("activation", True): ": more batched tokens, more requests or a vision encoder's profile",
        ("activation", False): ": fewer requests or batched tokens than these flags say",
        ("available_kv", False): ": graphs inside the budget, or memory that was not free",
    }
    return reasons.get((row.part, more), "")


def cures(cause: str, question: Question, record: LogRecord) -> list[Cure]:
    """Single changes of flags after which the calibrated plan fits, the mildest first."""
    if cause in ("fits", "incomplete"):
        return []
    fixed = _cures_without_plan(cause, record)
    if cause in ("unknown_flag", "memory_moved", "dtype_unsupported", "card_not_free", "too_few_state_blocks"):
        return fixed
    tried = []
    said = {knob for cure in fixed for knob in cure.changes}
    for knob, value in _candidates(cause, question):
        if knob in said:
            continue
        try:
            changed = question.plan(**{knob: value})
        except LabkitError:
            continue
        if changed.margin_bytes >= 0 and changed.num_gpu_blocks > 0:
            tokens = int(changed.max_concurrency * (changed.config.max_model_len or 0))
            tried.append(
                Cure({knob: value}, f"set {knob} to {value}: {count(tokens)} tokens of KV ({changed.verdict})")
            )
    return [*fixed, *tried] if fixed else tried or [Cure({}, "no single flag helps: use more cards or smaller weights")]


def _candidates(cause: str, question: Question) -> list[tuple[str, Any]]:
    config, base = question.config, question.plan()
    seqs, tokens = config.max_num_seqs or 1, config.max_num_batched_tokens or 1
    found: list[tuple[str, Any]] = []
    if cause in ("sampler_out_of_memory", "out_of_memory"):
        found += [("max_num_seqs", size) for size in (256, 128, 64) if size < seqs]
        found.append(("gpu_memory_utilization", round(max(0.05, config.gpu_memory_utilization - 0.05), 2)))
        found.append(("enforce_eager", True))
        return found
    if base.max_model_len_that_fits:
        rounded = base.max_model_len_that_fits // 16 * 16 or base.max_model_len_that_fits
        found.append(("max_model_len", rounded))
    share = smallest_utilization(question)
    if share is not None and config.gpu_memory_utilization < share <= HIGHEST_UTILIZATION:
        found.append(("gpu_memory_utilization", share))
    found += [("max_num_seqs", size) for size in (256, 128) if size < seqs]
    found += [("max_num_batched_tokens", size) for size in (2048, 1024) if seqs <= size < tokens]
    if config.kv_cache_dtype == "auto":
        found.append(("kv_cache_dtype", "fp8"))
    return [*found, ("tensor_parallel_size", config.tensor_parallel_size * 2)]


def _cures_without_plan(cause: str, record: LogRecord) -> list[Cure]:
    """Cures that follow from the log's own numbers."""
    facts = record.facts
    if cause == "length_does_not_fit" and facts.get("estimated_length"):
        length = facts["estimated_length"]
        return [Cure({"max_model_len": length}, f"set max_model_len to {length}, vLLM's own estimate")]
    if cause == "length_does_not_fit" and facts.get("kv_cache_tokens"):
        length = facts["kv_cache_tokens"] // 16 * 16
        return [Cure({"max_model_len": length}, f"set max_model_len to {length}, what the cache holds")]
    if cause == "card_not_free" and facts.get("total_bytes") and facts.get("free_bytes"):
        share = int(facts["free_bytes"] / facts["total_bytes"] * 100) / 100
        text = (
            f"set gpu_memory_utilization to {share:g}, or end the other process: {memory(facts['free_bytes'])} are free"
        )
        return [Cure({"gpu_memory_utilization": share}, text)]
    if cause == "too_few_state_blocks" and facts.get("state_blocks_available"):
        blocks = facts["state_blocks_available"]
        return [Cure({"max_num_seqs": blocks}, f"set max_num_seqs to {blocks}: each request holds a state block")]
    if cause == "unknown_flag" and "--swap-space" in record.unknown_arguments:
        return [Cure({}, "leave --swap-space out: vLLM has none since 0.18; --kv-offloading-size is the nearest thing")]
    if cause == "dtype_unsupported":
        return [Cure({"dtype": "float16"}, "set dtype to float16")]
    return []


def explain_log_file(
    path: str | os.PathLike[str], *, model: str | None = None, gpu: str | None = None
) -> LogExplanation:
    """`labkit explain-log`: the explanation of a log file; names of model and card override what the log says.

    Raises:
        FileFormatError: the file cannot be read as a log.
        UnknownNameError: no such model or card.
    """
    from labkit.specs import load_gpu

    record = read_log_file(path)
    return explain_log(record, load_model(model) if model else None, load_gpu(gpu) if gpu else None)


def explanation_json(found: LogExplanation) -> dict[str, Any]:
    """The explanation as `labkit explain-log --json` prints it; sizes in GiB."""

    def gib(size: int | None) -> float | None:
        return None if size is None else size / 2**30

    record = found.record
    return {
        "vllm": record.version,
        "model": record.model,
        "flags": dict(record.flags),
        "cause": found.cause,
        "answer": found.answer,
        "off": found.off,
        "parts": {
            row.part: {
                "log_gib": gib(row.log_bytes),
                "plan_gib": gib(row.plan_bytes),
                "uncertainty_gib": gib(row.uncertainty_bytes),
                "off": row.is_off,
            }
            for row in found.rows
        },
        "ranks": {rank: _facts_json(facts) for rank, facts in record.ranks.items()},
        "facts": _facts_json(record.facts),
        "cures": [{"changes": dict(cure.changes), "text": cure.text} for cure in found.cures],
        "lines": record.num_lines,
        "notes": list(found.notes),
    }


def _facts_json(facts: Mapping[str, Any]) -> dict[str, Any]:
    return {
        f"{name.removesuffix('_bytes')}_gib" if name.endswith("_bytes") else name: (
            value / 2**30 if name.endswith("_bytes") else value
        )
        for name, value in facts.items()
    }
