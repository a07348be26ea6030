"""`follow_up`: what an advice estimated beside what came out when it was applied and run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from labkit.advice.advise import Advice
from labkit.format import change, count, duration, memory, rate
from labkit.measure.run_record import RunRecord
from labkit.measure.summary import RunSummary, summarize
from labkit.memory.records import MemoryPlan
from labkit.specs.engine_config import EngineConfig
from labkit.text import plain


@dataclass(frozen=True)
class Applied:
    """An advice that was applied: the settings before and after, as asked for, and the plan before."""

    advice: Advice
    before: EngineConfig
    after: EngineConfig
    plan: MemoryPlan


@dataclass(frozen=True)
class FollowUp:
    """Estimated against got.

    Attributes:
        rows: quantity, estimated, got.
        sentence: the rate, or why it is not compared.
    """

    rows: tuple[tuple[str, str, str], ...]
    sentence: str


def follow_up(applied: Applied, records: Sequence[RunRecord]) -> FollowUp | None:
    """What came of `applied`; None while no finished run has its settings."""
    got = _latest(records, applied.after, applied.advice.plan)
    if got is None:
        return None
    advice, title = applied.advice, f"Applied “{plain(applied.advice.title, 80)}”"
    before = _latest(records, applied.before, applied.plan)
    if got.gpu.name != advice.plan.gpu.name:
        return FollowUp((), f"{title}: the run was on {plain(got.gpu.name, 40)}, the estimate is for "
                        f"{plain(advice.plan.gpu.name, 40)}; they are not compared.")  # fmt: skip
    new, old = summarize(got), summarize(before) if before else None
    rows = [_room_row("KV tokens", advice.plan.kv_cache_tokens, got.plan.kv_cache_tokens, count)]
    if got.measured is not None:
        planned = advice.plan.breakdown.kv_cache_bytes
        rows.insert(0, _room_row("KV cache", planned, got.measured.kv_cache_bytes, memory))
    rows += _speed_rows(advice, old, new)
    return FollowUp(tuple(rows), f"{title}: estimated {advice.gain}; got {_got(old, new)}.")


def _latest(records: Sequence[RunRecord], config: EngineConfig, plan: MemoryPlan) -> RunRecord | None:
    """The last finished run of these settings: as asked for, or as resolved."""
    fitting = (one for one in reversed(records) if one.status == "finished" and one.config in (config, plan.config))
    return next(fitting, None)


def _room_row(title: str, planned: float, got: float, show: Callable[[float], str]) -> tuple[str, str, str]:
    return title, show(planned), show(got)


def _speed_rows(advice: Advice, old: RunSummary | None, new: RunSummary) -> list[tuple[str, str, str]]:
    rows, before, after = [], advice.before, advice.after
    if before is not None and after is not None:
        rows.append(("rate, estimated when all requests wait", f"{rate(before.rate, before.unit)} → "
                     f"{rate(after.rate, after.unit)}", _got(old, new)))  # fmt: skip
    for title, name, part in (
        ("p99 first token", "ttft_p99_s", "ttft_s"), ("p99 between tokens", "inter_token_p99_s", "inter_token_s"),
    ):  # fmt: skip
        was, now = (getattr(getattr(summary, part, None), "p99", None) for summary in (old, new))
        if now is None:
            continue
        guess = "–"
        if before is not None and after is not None:
            guess = f"{duration(getattr(before, name))} → {duration(getattr(after, name))}"
        rows.append((title, guess, f"{duration(was)} → {duration(now)}"))
    return rows


def _got(old: RunSummary | None, new: RunSummary) -> str:
    if old is None:
        return f"{rate(new.output_tokens_per_s)}; no run with the settings before to compare"
    return change(old.output_tokens_per_s, new.output_tokens_per_s, "tok/s")
