"""Next changes for a plan, ordered by what planning them says they gain."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from labkit.advice.limit import BindingLimit, Evidence, binding_limit, requests_at_once, tokens_per_request
from labkit.advice.rules import RULES, Proposal
from labkit.errors import LabkitError
from labkit.format import change, count, memory, number
from labkit.measure.run_record import RunRecord
from labkit.memory.records import MemoryPlan
from labkit.specs.engine_config import EngineConfig

# A change that gives less room than this is not worth its risk.
WORTH_SHARE = 0.005
# Limits that no memory setting moves.
NOT_MEMORY = ("traffic", "compute")

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
        cures: the configuration did not fit and now does.
        plan: the plan after the change.
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


def advise(plan: MemoryPlan, what_if: WhatIf | None = None, *, record: RunRecord | None = None) -> tuple[Advice, ...]:
    """Changes of one rule each that give more room, the largest estimated gain first.

    Args:
        plan: the plan to improve.
        what_if: plans a configuration; by default with the model, card and engine of `plan`.
        record: a run of `plan`: its request lengths, its limit and its waste make the estimates its own.

    The gain is an upper bound on throughput: room for more requests helps only while requests wait for room.
    """
    what_if = what_if or _replan(plan)
    limit = binding_limit(plan, record)
    tokens = tokens_per_request(plan, record)
    found = []
    for rule in RULES:
        for proposal in rule(plan, record, limit):
            advice = _estimate(plan, proposal, what_if, tokens, limit)
            if advice is not None and _is_worth_it(plan, advice):
                found.append(advice)
    return tuple(sorted(found, key=lambda item: (not item.cures, -item.gain_share, -item.gain_tokens, item.rule)))


def _is_worth_it(plan: MemoryPlan, advice: Advice) -> bool:
    tokens_share = advice.gain_tokens / plan.kv_cache_tokens if plan.kv_cache_tokens > 0 else float(advice.gain_tokens)
    return advice.cures or max(advice.gain_share, tokens_share) >= WORTH_SHARE


def headline(plan: MemoryPlan, limit: BindingLimit, best: Advice | None) -> str:
    """The answer line: fits or not, the limit that binds, the best next change with its gain."""
    capacity = (
        f"{memory(plan.breakdown.kv_cache_bytes)} of KV = {count(plan.kv_cache_tokens)} tokens"
        if plan.verdict != "does not fit"
        else f"short by {memory(-plan.margin_bytes)}"
    )
    if limit.name in NOT_MEMORY:
        offer = "offer more traffic" if limit.name == "traffic" else "a faster card, or fewer tokens in a step"
        following = f"Next: {offer}; more room gains nothing yet"
    elif best:
        following = f"Next: {best.title[0].lower()}{best.title[1:]}, {best.gain}"
    else:
        following = "No single change gives more"
    return f"{plan.verdict.capitalize()}: {capacity}. {limit.sentence[0].upper()}{limit.sentence[1:]}. {following}."


def _replan(plan: MemoryPlan) -> WhatIf:
    from labkit.memory import plan as plan_memory

    def what_if(config: EngineConfig) -> MemoryPlan:
        return plan_memory(plan.model, plan.gpu, config, engine=plan.engine, engine_version=plan.engine_version)

    return what_if


def _estimate(
    plan: MemoryPlan, proposal: Proposal, what_if: WhatIf, tokens: float, limit: BindingLimit
) -> Advice | None:
    try:
        after = what_if(plan.config.replace(**proposal.changes))
    except LabkitError:  # a change that this model or card does not allow is no advice
        return None
    before_requests, after_requests = requests_at_once(plan, tokens), requests_at_once(after, tokens)
    cures = plan.verdict == "does not fit" and after.verdict != "does not fit"
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
    return Advice(
        rule=proposal.rule,
        title=proposal.title,
        changes=dict(proposal.changes),
        reason=proposal.reason,
        risk=proposal.risk,
        evidence=evidence,
        gain=_gain_words(cures, gain_share, gain_tokens, after, (before_requests, after_requests), limit),
        gain_share=gain_share,
        gain_tokens=gain_tokens,
        cures=cures,
        plan=after,
    )


def _span(before: float, after: float) -> str:
    return f"{number(before)} → {number(after)}"


def _gain_words(
    cures: bool, gain_share: float, gain_tokens: int, after: MemoryPlan, spans: tuple[float, float], limit: BindingLimit
) -> str:
    if cures:
        verdict = "fits then" if after.verdict == "fits" else "may fit then"
        return f"{verdict}, with room for {count(after.kv_cache_tokens)} tokens"
    if gain_share > 0:
        later = ", once requests wait for room" if limit.name in NOT_MEMORY else ""
        return f"at most {change(*spans)} requests at once{later}"
    if gain_tokens > 0:
        helps = "" if limit.name == "kv_blocks" else ", which help only once KV blocks bind"
        return f"at most +{count(gain_tokens)} KV tokens{helps}"
    return "no gain"
