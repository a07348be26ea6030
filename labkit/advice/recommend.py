"""`recommend`: from plans and runs to the settings to use, with reasons, gains, noise and the command."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from labkit.advice.advise import Advice, WhatIf, advise
from labkit.advice.command import export_plan
from labkit.advice.cures import cures, needs_other_files
from labkit.advice.limit import BindingLimit, Evidence, binding_limit
from labkit.advice.noise import Noise, noise_of
from labkit.errors import LabkitError
from labkit.format import change, count, duration, memory, number, rate
from labkit.measure.run_record import RunRecord
from labkit.measure.summary import RunSummary, summarize
from labkit.memory.records import MemoryPlan
from labkit.specs.engine_config import EngineConfig
from labkit.text import plain

Outcome = Literal["change", "no difference", "one run", "plan only", "nothing fits"]
Confidence = Literal["high", "medium", "low"]

# Settings that the recommendation keeps as they are asked for: they choose what is served, not how.
_NOT_TUNED = ("load_format", "dtype", "quantization")


@dataclass(frozen=True)
class Reason:
    """One reason: the rule that was applied, the numbers it rests on, how much it can matter, what it risks."""

    rule: str
    sentence: str
    evidence: tuple[Evidence, ...]
    at_most: str
    risk: str


@dataclass(frozen=True)
class Gain:
    """One metric of the recommended settings beside the baseline's.

    Attributes:
        metric: "output tokens per second", "time to first token, p95", ….
        before, after: full values; `unit` is "tok/s", "s" or "tokens".
        words: sign, percent and both values, ready to show.
        verdict: "better", "worse" or "same" (inside the noise).
    """

    metric: str
    before: float | None
    after: float | None
    unit: str
    words: str
    verdict: Literal["better", "worse", "same"]


@dataclass(frozen=True)
class Recommendation:
    """What to set, against what, why, and how sure it is.

    Attributes:
        outcome: "change" (other settings are better than the baseline's by more than the noise), "no difference"
            (nothing tried is), "one run" and "plan only" (nothing to compare), "nothing fits".
        config, baseline: recommended and baseline settings; `run_id`, `baseline_run_id` the runs, None without.
        sentence: the whole answer in one or two sentences.
        limit: what binds with the recommended settings.
        next_changes: what to try next, the largest estimated gain first.
        command: `vllm serve …` for the recommended settings.
    """

    outcome: Outcome
    config: EngineConfig
    baseline: EngineConfig
    plan: MemoryPlan
    run_id: str | None
    baseline_run_id: str | None
    sentence: str
    limit: BindingLimit
    reasons: tuple[Reason, ...]
    gains: tuple[Gain, ...]
    noise: Noise
    confidence: Confidence
    confidence_reason: str
    next_changes: tuple[Advice, ...]
    command: str
    vllm_version: str


def recommend(
    plans: Sequence[MemoryPlan],
    records: Sequence[RunRecord] = (),
    *,
    baseline_run_id: str | None = None,
    vllm_version: str = "0.33.0",
    what_if: WhatIf | None = None,
) -> Recommendation:
    """The settings to use.

    Finished runs of equal settings count as repeats. The best mean of output tokens per second wins; among settings
    inside the noise of the best, the baseline is kept, else the one with the shorter p95 time to first token.

    Args:
        plans: plans of the settings that were considered; the first is the baseline where nothing ran.
        records: runs in the order they were made; the first finished one is the baseline unless
            `baseline_run_id` names another.
        vllm_version: version that the command is for.
        what_if: plans a configuration, for the next changes; see `advise`.

    Raises:
        LabkitError: there is neither a plan nor a run, or `baseline_run_id` names none of `records`.
    """
    finished = [record for record in records if record.status == "finished" and summarize(record).output_tokens_per_s]
    if not finished:
        return _from_plans([*plans, *(record.plan for record in records)], len(records), vllm_version, what_if)
    baseline = _baseline(finished, baseline_run_id)
    groups = _groups(finished)
    noise = noise_of(
        {key: [_throughput(record) for record in group] for key, group in groups.items()},
        simulated=all(record.origin == "simulated" for record in finished),
        compared=(_key(baseline.config), max(groups, key=lambda key: _mean(groups[key]))),
    )
    best = _best(groups, baseline, noise)
    return _from_runs(best, baseline, groups, noise, len(records) - len(finished), vllm_version, what_if)


def _baseline(finished: Sequence[RunRecord], run_id: str | None) -> RunRecord:
    if run_id is None:
        return finished[0]
    for record in finished:
        if record.run_id == run_id:
            return record
    raise LabkitError(f"no finished run has the id {run_id!r}", works=", ".join(r.run_id for r in finished[:5]))


def _key(config: EngineConfig) -> str:
    return json.dumps(config.to_dict(), sort_keys=True)


def _groups(records: Sequence[RunRecord]) -> dict[str, list[RunRecord]]:
    groups: dict[str, list[RunRecord]] = {}
    for record in records:
        groups.setdefault(_key(record.config), []).append(record)
    return groups


def _throughput(record: RunRecord) -> float:
    return summarize(record).output_tokens_per_s or 0.0


def _mean(group: Sequence[RunRecord]) -> float:
    return sum(map(_throughput, group)) / len(group)


def _ttft_p95(group: Sequence[RunRecord]) -> float:
    ttft = summarize(group[0]).ttft_s
    return ttft.p95 if ttft else float("inf")


def _best(groups: dict[str, list[RunRecord]], baseline: RunRecord, noise: Noise) -> RunRecord:
    highest = max(map(_mean, groups.values()))
    near = {key: group for key, group in groups.items() if _mean(group) >= highest * (1 - noise.share)}
    if _key(baseline.config) in near:
        return baseline
    return min(near.values(), key=lambda group: (_ttft_p95(group), -_mean(group)))[0]


def _from_runs(
    best: RunRecord,
    baseline: RunRecord,
    groups: dict[str, list[RunRecord]],
    noise: Noise,
    num_left_out: int,
    version: str,
    what_if: WhatIf | None,
) -> Recommendation:
    changed = baseline.config.differences(best.config)
    outcome: Outcome = "one run" if len(groups) == 1 else "change" if changed else "no difference"
    gains = _gains(summarize(baseline), summarize(best), groups, baseline, best, noise) if changed else ()
    limit = binding_limit(best.plan, best)
    confidence, why = _confidence(groups, noise, gains, outcome, num_left_out)
    return Recommendation(
        outcome=outcome,
        config=best.config,
        baseline=baseline.config,
        plan=best.plan,
        run_id=best.run_id,
        baseline_run_id=baseline.run_id,
        sentence=_sentence(outcome, best, baseline, groups, noise),
        limit=limit,
        reasons=_reasons(best, baseline, limit, gains),
        gains=gains,
        noise=noise,
        confidence=confidence,
        confidence_reason=why,
        next_changes=advise(best.plan, what_if, record=best),
        command=export_plan(best.plan, version).serve,
        vllm_version=version,
    )


def settings_words(changed: dict[str, tuple[object, object]]) -> str:
    """Changed knobs in words: "block_size 16 → 32, kv_cache_dtype auto → fp8"."""
    return ", ".join(f"{name} {_value(before)} → {_value(after)}" for name, (before, after) in changed.items())


def _value(value: object) -> str:
    if value is None:
        return "default"
    if isinstance(value, bool):
        return "on" if value else "off"
    return count(value) if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else plain(value, 80)


def _sentence(
    outcome: Outcome, best: RunRecord, baseline: RunRecord, groups: dict[str, list[RunRecord]], noise: Noise
) -> str:
    own, base = _mean(groups[_key(best.config)]), _mean(groups[_key(baseline.config)])
    if outcome == "one run":
        return f"One configuration ran: {rate(own)}, {best.origin}. There is nothing to compare it with yet."
    if outcome == "no difference":
        highest, all_of_them = max(map(_mean, groups.values())), f"{len(groups)} {best.origin} configurations"
        if highest == base:
            found = f"the baseline's {rate(base)} is the best of {all_of_them}"
        else:
            found = f"of {all_of_them} the best gives {rate(highest)}, the baseline {rate(base)}"
        return f"No difference beyond the noise: {found} ({noise.sentence}). Keep the settings."
    changed = settings_words(baseline.config.differences(best.config))
    return f"Set {changed}: {change(base, own, 'tok/s')} output over the baseline, {best.origin} ({noise.sentence})."


def _gains(
    before: RunSummary,
    after: RunSummary,
    groups: dict[str, list[RunRecord]],
    baseline: RunRecord,
    best: RunRecord,
    noise: Noise,
) -> tuple[Gain, ...]:
    rows: list[tuple[str, float | None, float | None, str, bool]] = [
        (
            "output tokens per second",
            _mean(groups[_key(baseline.config)]),
            _mean(groups[_key(best.config)]),
            "tok/s",
            True,
        )
    ]
    for title, name in (("time to first token", "ttft_s"), ("inter-token latency", "inter_token_s")):
        old, new = getattr(before, name), getattr(after, name)
        for quantile in ("p50", "p95"):
            values = (getattr(old, quantile, None), getattr(new, quantile, None))
            rows.append((f"{title}, {quantile}", *values, "s", False))
    rows.append(("KV cache", baseline.plan.kv_cache_tokens, best.plan.kv_cache_tokens, "tokens", True))
    return tuple(_gain(*row, noise=noise) for row in rows)


def _gain(
    metric: str, before: float | None, after: float | None, unit: str, higher_is_better: bool, *, noise: Noise
) -> Gain:
    verdict: Literal["better", "worse", "same"] = "same"
    # What is planned is exact up to rounding to whole blocks; what is timed must differ by more than the noise.
    threshold = 0.005 if unit == "tokens" else noise.share
    if before and after is not None and abs(after / before - 1) > threshold:
        verdict = "better" if (after > before) == higher_is_better else "worse"
    words = change(before, after, unit)
    if unit == "s" and before and after is not None:
        percent = words.split(" (")[0]
        words = f"{percent} ({duration(before)} → {duration(after)})"
    return Gain(metric, before, after, unit, words, verdict)


def _reasons(best: RunRecord, baseline: RunRecord, limit: BindingLimit, gains: Sequence[Gain]) -> tuple[Reason, ...]:
    before = binding_limit(baseline.plan, baseline)
    reasons = []
    if best.config != baseline.config:
        reasons.append(
            Reason(
                "baseline-limit",
                f"With the baseline, {before.sentence}",
                before.evidence,
                _headroom(baseline),
                f"{before.basis.capitalize()} on this workload; another mix of lengths may be held back by another "
                "limit.",
            )
        )
    reasons.append(
        Reason(
            "limit",
            f"With the recommended settings, {limit.sentence}",
            limit.evidence,
            _headroom(best),
            _risk(best, gains),
        )
    )
    return tuple(reasons)


def _headroom(record: RunRecord) -> str:
    waiting = sum(step.duration_s for step in record.steps if step.num_waiting)
    total = sum(step.duration_s for step in record.steps)
    if not total:
        return "the run has no steps to estimate it from"
    if not waiting:
        return "nothing waited, so more room gains nothing"
    return f"more room can shorten at most the {number(100 * waiting / total)} % of the run in which requests waited"


def _risk(record: RunRecord, gains: Sequence[Gain]) -> str:
    worse = [f"{gain.metric} {gain.words}" for gain in gains if gain.verdict == "worse"]
    if worse:
        return "Worse than the baseline: " + "; ".join(worse)
    if "fp8" in record.config.kv_cache_dtype or "int8" in record.config.kv_cache_dtype:
        return "8-bit KV changes outputs a little; check quality on your own prompts."
    return f"No metric that was {record.origin} became worse by more than the noise."


def _whose(groups: dict[str, list[RunRecord]]) -> str:
    """Says that the speeds are not vLLM's, for which the command is; "" where they are."""
    engines = {record.plan.engine for group in groups.values() for record in group}
    return "; the speeds are those of labkit's engine, not of vLLM" if "labkit" in engines else ""


def _confidence(
    groups: dict[str, list[RunRecord]], noise: Noise, gains: Sequence[Gain], outcome: Outcome, num_left_out: int
) -> tuple[Confidence, str]:
    left_out = (
        f"; {num_left_out} unfinished {'run is' if num_left_out == 1 else 'runs are'} left out" if num_left_out else ""
    )
    if outcome == "one run":
        return "low", f"one configuration, nothing to compare{left_out}{_whose(groups)}"
    requests = min(summarize(group[0]).num_finished for group in groups.values())
    basis = (
        f"{len(groups)} configurations, at least {count(requests)} finished requests each; {noise.sentence}{left_out}"
        f"{_whose(groups)}"
    )
    largest = max((abs(gain.after / gain.before - 1) for gain in gains if gain.before and gain.after), default=0.0)
    if noise.repeats >= 3 and requests >= 100:
        return "high", basis
    if noise.repeats >= 2 or requests >= 100 or (outcome == "change" and largest > 4 * noise.share):
        return "medium", basis
    return "low", basis


def _from_plans(
    plans: Sequence[MemoryPlan], num_unfinished: int, version: str, what_if: WhatIf | None
) -> Recommendation:
    if not plans:
        raise LabkitError("there is nothing to recommend from", needed="a plan or a run", works="labkit.plan(...)")
    baseline = plans[0]
    fitting = [plan for plan in plans if plan.verdict == "fits"] or [p for p in plans if p.verdict == "may not fit"]
    best = max(fitting, key=lambda plan: plan.kv_cache_tokens) if fitting else baseline
    if baseline in fitting and best.kv_cache_tokens == baseline.kv_cache_tokens:
        best = baseline
    limit = binding_limit(best)
    next_changes = advise(best, what_if)
    # The command is for the model that was asked for, not for a copy of it.
    cure = next((item for item in next_changes if item.cures and not needs_other_files(item.changes)), None)
    outcome: Outcome = "plan only" if fitting else "nothing fits"
    reasons = [Reason("limit", limit.sentence, limit.evidence, "capacity only; nothing was timed", "")]
    if fitting:
        sentence = (
            f"{'No run finished; planned' if num_unfinished else 'Planned, not run'}: {best.verdict} with "
            f"{memory(best.breakdown.kv_cache_bytes)} of KV = {count(best.kv_cache_tokens)} tokens. Speed is not known "
            f"until {'one finishes' if num_unfinished else 'it runs'}."
        )
        if next_changes and next_changes[0].cures:
            sentence += f" {next_changes[0].title}: {next_changes[0].gain}."
    elif cure is not None:
        sentence = f"Does not fit: {limit.sentence}. {cure.title}: {cure.gain}."
        best = cure.plan
        limit = binding_limit(best)
        next_changes = advise(best, what_if)
        reasons.append(Reason("cured-limit", f"With the cure, {limit.sentence}", limit.evidence, cure.gain, cure.risk))
    else:
        others = [f"Would work: {cure.text}." for cure in cures(baseline)]
        sentence = " ".join([f"Does not fit: {limit.sentence}. No single change makes it fit.", *others])
    changed = baseline.config.differences(best.config)
    gain = _gain("KV cache", baseline.kv_cache_tokens, best.kv_cache_tokens, "tokens", True, noise=noise_of({}))
    return Recommendation(
        outcome=outcome,
        config=best.config,
        baseline=baseline.config,
        plan=best,
        run_id=None,
        baseline_run_id=None,
        sentence=sentence,
        limit=limit,
        reasons=tuple(reasons),
        gains=(gain,) if changed else (),
        noise=noise_of({}),
        confidence="low",
        confidence_reason="planned only, no run finished" if num_unfinished else "planned only, nothing ran",
        next_changes=next_changes,
        command=export_plan(best, version).serve,
        vllm_version=version,
    )
