"""Next changes for a plan, ordered by what planning them says they gain."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from labkit.advice.limit import BindingLimit, Evidence, binding_limit, requests_at_once, tokens_per_request
from labkit.advice.rules import RULES, Proposal
from labkit.advice.speed import Speed, SpeedOf
from labkit.errors import LabkitError
from labkit.format import change, count, duration, memory, number, rate
from labkit.measure.run_record import RunRecord
from labkit.memory.explain import DOUBT
from labkit.memory.records import MemoryPlan
from labkit.specs.engine_config import EngineConfig

# A change that gives less room than this is not worth its risk.
WORTH_SHARE = 0.005
# The same for speed: two simulated runs that differ by less are not told apart by real ones.
WORTH_SPEED_SHARE, WORTH_P99_SHARE = 0.02, 0.05
# Settings whose rates are this far apart are put in the right order nearly always; a smaller gain outranks no p99.
RANKED_SPEED_SHARE = 0.05
# A shorter p99 may cost so much of the rate.
COSTS_SHARE = 0.1
# Less than this is shown as no percent at all.
SHOWN_SHARE = 0.0005
# Rates that differ by less are shown as one.
SAME_SHARE = 0.01
# Limits that no memory setting moves.
NOT_MEMORY = ("traffic", "compute", "bandwidth", "host", "graphs", "links")
_OFFERS: Mapping[str, str] = {
    "max_num_batched_tokens": "raise max_num_batched_tokens",
    "traffic": "offer more traffic",
    "compute": "a faster card, or fewer tokens in a step",
    "bandwidth": "more requests at once, or smaller weights",
    "host": "more requests at once, or a faster host",
    "graphs": "unset enforce_eager",
    "links": "fewer cards for each copy, or faster links",
}

# Cures that come after others that are as sure.
LAST_RESORTS = ("eager",)
# From the worst to the best.
VERDICTS = ("does not fit", "may not fit", "fits")

WhatIf = Callable[[EngineConfig], MemoryPlan]


@dataclass(frozen=True)
class Advice:
    """One change with what it gains, at most.

    Attributes:
        rule, title, changes, reason, risk: as in `Proposal`.
        evidence: the numbers before and after, from the two plans.
        gain: in words, always with "at most" or the cure: "at most +98 % requests at once (24.0 → 47.5)".
        gain_share: growth of requests at once, 0.98 for +98 %; infinite where nothing fitted before.
        gain_tokens: growth of the KV cache in tokens.
        cures: the configuration did not fit, or was not sure to, and now fits, or may.
        plan: the plan after the change.
        before, after: rate and p99 on the traffic; None where they cannot be told.
    """

    rule: str
    title: str
    changes: Mapping[str, Any]
    reason: str
    risk: str
    evidence: tuple[Evidence, ...]
    gain: str
    gain_share: float
    gain_tokens: int
    cures: bool
    plan: MemoryPlan
    before: Speed | None = None
    after: Speed | None = None

    @property
    def rate_share(self) -> float | None:
        """Growth of the rate when all requests wait, 0.18 for +18 %; None where it cannot be told."""
        if self.before is None or self.after is None or not self.before.rate:
            return None
        return self.after.rate / self.before.rate - 1

    @property
    def is_faster(self) -> bool:
        """More rate, or a shorter p99, by more than runs differ by."""
        return (self.rate_share or 0.0) >= WORTH_SPEED_SHARE or self.p99_share <= -WORTH_P99_SHARE

    @property
    def p99_share(self) -> float:
        """Growth of the p99 between tokens, else of the first token's: negative is better; 0 where it is not told."""
        for name in ("inter_token_p99_s", "ttft_p99_s"):
            old, new = (getattr(speed, name, None) for speed in (self.before, self.after))
            if old and new:
                return new / old - 1
        return 0.0


def advise(
    plan: MemoryPlan,
    what_if: WhatIf | None = None,
    *,
    record: RunRecord | None = None,
    speed_of: SpeedOf | None = None,
) -> tuple[Advice, ...]:
    """Changes of one rule each that give more room or speed, the largest estimated gain first.

    Args:
        plan: the plan to improve.
        what_if: plans a configuration; by default with the model, card and engine of `plan`.
        record: a run of `plan`, real or simulated: its request lengths, its limit and its waste make the estimates its
            own.
        speed_of: says rate and p99 of a plan on the traffic; without it only room is told.

    The gain is an upper bound: room for more requests helps only while requests wait for room, and the rate is the
    one that is reached when all of them wait.
    """
    what_if = what_if or replan(plan)
    limit = binding_limit(plan, record)
    tokens = tokens_per_request(plan, record)
    before = speed_of(plan) if speed_of else None
    found = []
    for rule in RULES:
        for proposal in rule(plan, record, limit):
            advice = _estimate(plan, proposal, what_if, tokens, limit, has_run=_has_run(record))
            if advice is None:
                continue
            if speed_of is not None and before is not None:
                advice = _with_speed(advice, before, speed_of(advice.plan))
            if _is_worth_it(plan, advice):
                found.append(advice)
    return tuple(sorted(found, key=_order))


def _has_run(record: RunRecord | None) -> bool:
    """What ran on a card fits it, whatever the plan is not sure of."""
    return record is not None and record.origin == "measured" and record.status == "finished"


def _order(item: Advice) -> tuple[Any, ...]:
    rate_share, p99 = item.rate_share or 0.0, item.p99_share
    rate_gain = -round(rate_share, 2) if abs(rate_share) >= RANKED_SPEED_SHARE else 0.0
    small_gain = -round(rate_share, 2) if abs(rate_share) >= WORTH_SPEED_SHARE else 0.0
    gain = (rate_gain, p99 if rate_gain or p99 <= -WORTH_P99_SHARE else 0.0, small_gain)
    # Of cures, those that are sure come first and those that need another card last.
    needs_cards = item.cures and "tensor_parallel_size" in item.changes
    is_sure = item.plan.verdict == "fits" or not item.cures
    is_last_resort = item.cures and item.rule in LAST_RESORTS
    rank = (not item.cures, needs_cards, not is_sure, is_last_resort, *gain)
    return (*rank, -item.gain_share, -item.gain_tokens, item.rule)


def _is_worth_it(plan: MemoryPlan, advice: Advice) -> bool:
    if advice.rate_share is not None and not advice.cures:
        if advice.rate_share < -(COSTS_SHARE if advice.p99_share <= -WORTH_P99_SHARE else WORTH_SPEED_SHARE):
            return False
        if advice.is_faster:
            return True
    tokens_share = advice.gain_tokens / plan.kv_cache_tokens if plan.kv_cache_tokens > 0 else float(advice.gain_tokens)
    return advice.cures or max(advice.gain_share, tokens_share) >= WORTH_SHARE


def leads_with(limit: BindingLimit, best: Advice | None) -> bool:
    """Whether the answer line names `best` as the next change; where no memory setting moves the limit it does not."""
    if best is None or best.cures or best.is_faster:
        return best is not None
    # More room for KV does nothing for full steps.
    full_steps = limit.name == "max_num_batched_tokens" and limit.name not in best.changes
    return limit.name not in NOT_MEMORY and not full_steps


def headline(plan: MemoryPlan, limit: BindingLimit, best: Advice | None) -> str:
    """The answer line: fits or not, the limit that binds, the best next change with its gain."""
    capacity = (
        f"{memory(plan.breakdown.kv_cache_bytes)} of KV = {count(plan.kv_cache_tokens)} tokens"
        if plan.verdict != "does not fit"
        else f"short by {memory(-plan.margin_bytes)}"
    )
    doubts = [note.removeprefix(DOUBT) for note in plan.notes if note.startswith(DOUBT)]
    if doubts and plan.verdict == "may not fit":
        capacity += f"; {doubts[0]}"
    if not leads_with(limit, best) and limit.name in _OFFERS and plan.verdict == "fits":
        following = f"Next: {_OFFERS[limit.name]}; more room gains nothing yet"
    elif best:
        following = f"Next: {best.title[0].lower()}{best.title[1:]}, {best.gain}"
    else:
        following = f"No single change {'gives more' if plan.verdict == 'fits' else 'makes it fit'}"
    return f"{plan.verdict.capitalize()}: {capacity}. {_beginning(limit.sentence)}. {following}."


def _beginning(sentence: str) -> str:
    """With a capital, unless the sentence begins with the name of a knob."""
    return sentence if "_" in sentence.split(" ", 1)[0] else sentence[:1].upper() + sentence[1:]


def replan(plan: MemoryPlan) -> WhatIf:
    """Plans other settings for the model, card and engine of `plan`."""
    from labkit.memory import plan as plan_memory

    def what_if(config: EngineConfig) -> MemoryPlan:
        return plan_memory(plan.model, plan.gpu, config, engine=plan.engine, engine_version=plan.engine_version)

    return what_if


def _estimate(
    plan: MemoryPlan, proposal: Proposal, what_if: WhatIf, tokens: float, limit: BindingLimit, *, has_run: bool = False
) -> Advice | None:
    try:
        after = what_if(plan.config.replace(**proposal.changes))
    except LabkitError:  # a change that this model or card does not allow is no advice
        return None
    before_requests, after_requests = requests_at_once(plan, tokens), requests_at_once(after, tokens)
    cures = not has_run and VERDICTS.index(after.verdict) > VERDICTS.index(plan.verdict)
    if plan.verdict == "does not fit" and not cures:
        gain_share = 0.0
    elif before_requests > 0:
        gain_share = after_requests / before_requests - 1
    else:
        gain_share = float("inf") if after_requests > 0 else 0.0
    gain_tokens = after.kv_cache_tokens - plan.kv_cache_tokens
    evidence = (
        Evidence("KV cache", f"{memory(plan.breakdown.kv_cache_bytes)} → {memory(after.breakdown.kv_cache_bytes)}"),
        Evidence("KV tokens", f"{count(plan.kv_cache_tokens)} → {count(after.kv_cache_tokens)}"),
        Evidence(f"requests of {count(tokens)} tokens at once", _span(before_requests, after_requests)),
    )
    # What the change brings with it that the plan before does not have: "A10 has no fp8 units", say.
    said = [note for note in after.notes if note not in plan.notes and not note.startswith(DOUBT)]
    return Advice(
        rule=proposal.rule,
        title=proposal.title,
        changes=dict(proposal.changes),
        reason=proposal.reason,
        risk=" ".join([proposal.risk, *(f"{note}." for note in said)]),
        evidence=evidence,
        gain=_gain_words(cures, gain_share, gain_tokens, after, (before_requests, after_requests), limit),
        gain_share=gain_share,
        gain_tokens=gain_tokens,
        cures=cures,
        plan=after,
    )


def _with_speed(advice: Advice, before: Speed, after: Speed | None) -> Advice:
    if after is None or not before.rate:
        return advice
    words = []
    rows = [Evidence(f"rate when all requests wait, {after.basis}", f"{rate(before.rate, before.unit)} → "
                     f"{rate(after.rate, before.unit)}")]  # fmt: skip
    for title, name in (("first token", "ttft_p99_s"), ("between tokens", "inter_token_p99_s")):
        old, new = getattr(before, name), getattr(after, name)
        if not old or not new:
            continue
        rows.append(Evidence(f"p99 {title} at this load, {after.basis}", f"{duration(old)} → {duration(new)}"))
        if abs(new / old - 1) >= WORTH_P99_SHARE:
            words.append(f"p99 {title} {duration(old)} → {duration(new)}")
    difference = change(before.rate, after.rate, before.unit)
    if after.rate / before.rate - 1 >= SAME_SHARE:
        words.insert(0, f"at most {difference}")
    elif after.rate / before.rate - 1 <= -SAME_SHARE:
        words.append(f"which costs {difference}")
    else:
        words.insert(0, "at most the same rate" if words else f"{advice.gain}, on this traffic no more {before.unit}")
    gain = advice.gain if advice.cures else ", ".join(words)
    return replace(advice, gain=gain, evidence=(*advice.evidence, *rows), before=before, after=after)


def _span(before: float, after: float) -> str:
    return f"{number(before)} → {number(after)}"


def _gain_words(
    cures: bool, gain_share: float, gain_tokens: int, after: MemoryPlan, spans: tuple[float, float], limit: BindingLimit
) -> str:
    if cures:
        verdict = "surely fits then" if after.verdict == "fits" else "may fit then"
        return f"{verdict}, with room for {count(after.kv_cache_tokens)} tokens"
    if gain_share >= SHOWN_SHARE:
        later = ", once requests wait for room" if limit.name in NOT_MEMORY else ""
        return f"at most {change(*spans)} requests at once{later}"
    if gain_tokens > 0:
        helps = "" if limit.name == "kv_blocks" else ", which help only once KV blocks bind"
        return f"at most +{count(gain_tokens)} KV tokens{helps}"
    return "no gain"
