"""Which limit binds: from a plan alone (predicted) or from the steps of a run (measured), in words with numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from labkit.advice.step_bound import StepBound, step_bound
from labkit.format import count, memory, number, of, share
from labkit.measure.run_record import RunRecord, StepRow
from labkit.memory.questions import layout_of
from labkit.memory.records import MemoryPlan

LimitName = Literal[
    "weights", "kv_blocks", "max_num_seqs", "max_num_batched_tokens", "bandwidth", "compute", "host", "graphs", "links",
    "traffic", "unknown",
]  # fmt: skip

# A limit that holds requests back for less than this share of the run does not set its speed.
HOLDS_BACK_SHARE = 0.05
# A step within 5 % of the token budget is full: the last piece of a prompt rarely fills it exactly.
FULL_STEP_SHARE = 0.95
# An engine that is in a step for this share of the run is held by computing, not by a lack of requests.
BUSY_SHARE = 0.9
# Where products take so much of the time, more requests at once only wait longer: each token costs its products.
SATURATED_SHARE = 0.7

_TITLES: dict[LimitName, str] = {
    "weights": "the weights bind",
    "kv_blocks": "KV blocks bind",
    "max_num_seqs": "max_num_seqs binds",
    "max_num_batched_tokens": "the token budget (max_num_batched_tokens) binds",
    "bandwidth": "the memory's bandwidth binds, not its size",
    "compute": "computing binds, not the memory",
    "host": "the host binds, not the card",
    "graphs": "launches bind: CUDA graphs are off",
    "links": "the links between cards bind, not their memory",
    "traffic": "the traffic binds, not the memory",
    "unknown": "no limit can be named",
}
_KNOBS: dict[LimitName, str | None] = {
    "weights": "quantization",
    "kv_blocks": "kv_cache_dtype",
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "bandwidth": "quantization",
    "compute": None,
    "host": None,
    "graphs": "enforce_eager",
    "links": "tensor_parallel_size",
    "traffic": None,
    "unknown": None,
}


_ALSO: dict[LimitName, str] = {
    "kv_blocks": "they waited for KV blocks",
    "max_num_seqs": "all places were taken",
    "max_num_batched_tokens": "steps were full",
}


@dataclass(frozen=True)
class Evidence:
    """One number that a statement rests on, ready to show: "blocks used", "412 of 412 (100 %)"."""

    label: str
    value: str


@dataclass(frozen=True)
class BindingLimit:
    """The limit that sets the capacity.

    Attributes:
        name: which one; `title` says it in words.
        sentence: the statement with its numbers, without a final period.
        knob: the setting that moves this limit, by its vLLM name; None where no setting does.
        evidence: the numbers, for a table.
        basis: "predicted" from the plan, or the origin of the run: "measured" or "simulated".
        steps: what the steps' time goes to, where a run and the card's figures say it; see `step_bound`.
    """

    name: LimitName
    sentence: str
    knob: str | None
    evidence: tuple[Evidence, ...]
    basis: str
    steps: StepBound | None = None

    @property
    def title(self) -> str:
        """The limit in a few words: "KV blocks bind"."""
        return _TITLES[self.name]

    def __str__(self) -> str:
        return self.sentence


def binding_limit(plan: MemoryPlan, record: RunRecord | None = None) -> BindingLimit:
    """The limit that binds, measured where `record` has steps, predicted from `plan` otherwise."""
    if record is not None and record.steps and plan.verdict != "does not fit":
        return _measured(plan, record)
    if plan.verdict == "does not fit":
        return _does_not_fit(plan)
    return _predicted(plan)


def tokens_per_request(plan: MemoryPlan, record: RunRecord | None = None) -> float:
    """Tokens that a request holds at its end: mean over those that the run served, `max_model_len` where none."""
    rows = record.requests if record is not None else ()
    lengths = [row.input_tokens + row.output_tokens for row in rows if not row.finish_reason.startswith("refused")]
    return sum(lengths) / len(lengths) if lengths else float(plan.config.max_model_len or 1)


def requests_at_once(plan: MemoryPlan, tokens: float) -> float:
    """Requests of `tokens` tokens that run together: what KV holds, at most `max_num_seqs`.

    At `max_model_len` this is the plan's own concurrency. Below it, the pool's blocks over the blocks of one request,
    which the layout knows for windows and states; a plan without a layout counts whole blocks of its tokens.
    """
    held = plan.max_concurrency
    if tokens < (plan.config.max_model_len or 0):
        held = max(held, _held_below_the_longest(plan, math.ceil(max(tokens, 1))))
    seqs = plan.config.max_num_seqs
    return min(held, float(seqs)) if seqs else held


def _held_below_the_longest(plan: MemoryPlan, tokens: int) -> float:
    if "groups" in plan.details or "ranks" in plan.details:
        blocks = layout_of(plan).blocks_per_request(tokens)
        return plan.num_gpu_blocks / blocks if blocks else math.inf
    block_size = plan.config.block_size
    return plan.kv_cache_tokens / (math.ceil(tokens / block_size) * block_size)


def _limit(
    name: LimitName, details: str, evidence: Sequence[tuple[str, str]], basis: str, steps: StepBound | None = None
) -> BindingLimit:
    shares = [(f"steps' time: {part}", share(value, 1)) for part, value in (steps.shares if steps else {}).items()]
    rows = tuple(Evidence(label, value) for label, value in [*evidence, *shares])
    return BindingLimit(name, f"{_TITLES[name]}: {details}", _KNOBS[name], rows, basis, steps)


def _does_not_fit(plan: MemoryPlan) -> BindingLimit:
    breakdown = plan.breakdown
    available = max(breakdown.kv_cache_bytes, 0)
    needed = breakdown.kv_cache_bytes - plan.margin_bytes
    evidence = [
        ("weights", memory(breakdown.weights_bytes)),
        ("left for KV", memory(available)),
        ("one request needs", memory(needed)),
        ("largest length that fits", f"{count(plan.max_model_len_that_fits)} tokens"),
    ]
    if plan.max_model_len_that_fits <= 0:
        taken = f"{memory(breakdown.weights_bytes)} of {memory(breakdown.total_bytes)}"
        text = f"they take {taken} and leave no room for a request"
        return _limit("weights", text, evidence, "predicted")
    text = (
        f"one request of {count(plan.config.max_model_len)} tokens needs {memory(needed)} of KV and "
        f"{memory(available)} are left; {count(plan.max_model_len_that_fits)} tokens would fit"
    )
    return _limit("kv_blocks", text, evidence, "predicted")


def _predicted(plan: MemoryPlan) -> BindingLimit:
    length, seqs = plan.config.max_model_len, plan.config.max_num_seqs
    if not plan.block_bytes:
        text = f"the model keeps no KV, {count(plan.config.max_num_batched_tokens)} tokens are computed in a step"
        return _limit("max_num_batched_tokens", text, [("KV cache", memory(0))], "predicted")
    evidence = [
        ("KV cache", f"{memory(plan.breakdown.kv_cache_bytes)} = {count(plan.kv_cache_tokens)} tokens"),
        (f"requests of {count(length)} tokens", number(plan.max_concurrency)),
        ("max_num_seqs", count(seqs)),
    ]
    if seqs is not None and plan.max_concurrency >= seqs:
        text = f"KV would hold {number(plan.max_concurrency)} requests of {count(length)} tokens, {count(seqs)} may run"
        return _limit("max_num_seqs", text, evidence, "predicted")
    text = (
        f"the cache holds {number(plan.max_concurrency)} requests of {count(length)} tokens; "
        f"max_num_seqs would allow {count(seqs)}"
    )
    return _limit("kv_blocks", text, evidence, "predicted")


def _held_back_by(step: StepRow, plan: MemoryPlan) -> LimitName | None:
    """What kept the waiting requests out of `step`; None when nothing waited."""
    config = plan.config
    if step.num_preemptions:
        return "kv_blocks"
    if not step.num_waiting:
        return None
    if config.max_num_seqs and step.num_running >= config.max_num_seqs:
        return "max_num_seqs"
    if config.max_num_batched_tokens and step.num_tokens >= FULL_STEP_SHARE * config.max_num_batched_tokens:
        return "max_num_batched_tokens"
    return "kv_blocks"


def _also_held_back(seconds: Mapping[LimitName, float], name: LimitName, total_s: float) -> str:
    """What else kept requests waiting, in words, the longest first; "" where nothing did for long."""
    others = sorted(((held, why) for why, held in seconds.items() if why != name), reverse=True)
    return "".join(
        f"; for {share(held, total_s)} {_ALSO[why]}" for held, why in others if held >= HOLDS_BACK_SHARE * total_s
    )


def _measured(plan: MemoryPlan, record: RunRecord) -> BindingLimit:
    seconds: dict[LimitName, float] = {}
    for step in record.steps:
        held_by = _held_back_by(step, plan)
        if held_by is not None:
            seconds[held_by] = seconds.get(held_by, 0.0) + step.duration_s
    total_s = sum(step.duration_s for step in record.steps)
    fullest = max(record.steps, key=lambda step: step.num_blocks_used)
    preemptions = sum(row.num_preemptions for row in record.requests)
    most_running = max(step.num_running for step in record.steps)
    blocks = f"{count(fullest.num_blocks_used)} of {count(plan.num_gpu_blocks)}"
    blocks_share = share(fullest.num_blocks_used, plan.num_gpu_blocks)
    evidence = [
        ("time with requests waiting", share(sum(seconds.values()), total_s)),
        ("most running at once", f"{count(most_running)} of {count(plan.config.max_num_seqs)} allowed"),
        ("most blocks in use", f"{blocks} ({blocks_share})"),
        ("preemptions", count(preemptions)),
    ]
    name: LimitName = max(seconds, key=lambda key: seconds[key], default="traffic")
    steps = step_bound(plan, record)
    if not total_s or seconds.get(name, 0.0) < HOLDS_BACK_SHARE * total_s:
        span_s = record.steps[-1].start_s + record.steps[-1].duration_s - record.steps[0].start_s
        text = f"at most {of(most_running, 'request')} ran at once and {blocks} blocks were used ({blocks_share})"
        if not most_running:
            largest = max(step.num_tokens for step in record.steps)
            budget = count(plan.config.max_num_batched_tokens)
            text = (
                f"each request ended within its step, and no step carried more than {count(largest)} of {budget} tokens"
            )
        if total_s and total_s >= BUSY_SHARE * span_s:
            evidence.append(("time in steps", share(total_s, span_s)))
            text = f"no request waited for room; {steps.sentence if steps else text}"
            return _limit(steps.name if steps else "compute", text, evidence, record.origin, steps)
        return _limit("traffic", text, evidence, record.origin, steps)
    waited = share(seconds[name], total_s)
    also = _also_held_back(seconds, name, total_s)
    if name == "max_num_batched_tokens":
        full = step_bound(plan, replace(record, steps=tuple(s for s in record.steps if _held_back_by(s, plan) == name)))
        if full and full.shares["compute"] >= SATURATED_SHARE:
            text = (
                f"requests waited for {waited} of the run behind steps full of prompts, and {full.sentence}, so that "
                f"larger steps would only be longer{also}"
            ).replace("the steps' time", "these steps' time")
            return _limit("compute", text, evidence, record.origin, steps)
    if steps and steps.shares["compute"] >= SATURATED_SHARE:
        text = f"{steps.sentence}; requests waited for {waited} of the run, and more at once would not shorten it"
        return _limit("compute", text, evidence, record.origin, steps)
    details: dict[str, str] = {
        "kv_blocks": f"requests waited for {waited} of the run with {blocks} blocks in use ({blocks_share}) and "
        f"{of(preemptions, 'preemption')}",
        "max_num_seqs": f"requests waited for {waited} of the run while all {count(plan.config.max_num_seqs)} places "
        f"were taken and no more than {blocks} blocks were used ({blocks_share})",
        "max_num_batched_tokens": f"requests waited for {waited} of the run while each step carried its "
        f"{count(plan.config.max_num_batched_tokens)} tokens",
    }
    meanwhile = f"{also}; meanwhile {steps.sentence}" if steps else also
    return _limit(name, details[name] + meanwhile, evidence, record.origin, steps)
