"""`study_load`: which limit binds on a traffic and what each change would buy there, by simulation."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from labkit.advice.advise import Advice, WhatIf, advise
from labkit.advice.limit import BindingLimit, binding_limit
from labkit.advice.speed import Scale, Speed, scale_of, speed_of
from labkit.format import duration, rate
from labkit.measure.run_record import RunRecord
from labkit.measure.summary import summarize
from labkit.memory.records import MemoryPlan
from labkit.specs.presets import Preset
from labkit.specs.workload import Workload


@dataclass(frozen=True)
class LoadStudy:
    """What a traffic makes of a configuration.

    Attributes:
        limit: that binds, from the run where there is one, else from the simulated traffic.
        advice: changes with rate and p99, the largest estimated gain first.
        speed: of the configuration itself; its `record` is the simulated traffic.
    """

    limit: BindingLimit
    advice: tuple[Advice, ...]
    speed: Speed


class SpeedBook:
    """Speeds of one model, card and traffic by configuration, so that a knob turned back costs nothing."""

    def __init__(self, traffic: Workload) -> None:
        self._traffic = traffic
        self._known: dict[tuple[str, Scale | None], Speed | None] = {}
        self._scales: dict[str, Scale | None] = {}

    def scale(self, run: RunRecord | None) -> Scale | None:
        """How far `run` was from its simulation; None without one."""
        if run is None:
            return None
        if run.run_id not in self._scales:
            self._scales[run.run_id] = scale_of(run)
        return self._scales[run.run_id]

    def speed(self, plan: MemoryPlan, scale: Scale | None = None) -> Speed | None:
        """The speed of `plan`, simulated once."""
        key = (json.dumps(plan.config.to_dict(), sort_keys=True), scale)
        if key not in self._known:
            self._known[key] = speed_of(plan, self._traffic, scale)
        return self._known[key]


@dataclass(frozen=True)
class GoalCheck:
    """Whether a task's limits hold for a configuration: `sentence` with the numbers; without limits they always do."""

    is_met: bool
    sentence: str


def check_goal(task: Preset, speed: Speed) -> GoalCheck:
    """The limits of `task` beside what `speed` gives at the traffic's own arrivals."""
    words, is_met, given = [f"at most {rate(speed.rate, speed.unit)}"], True, summarize(speed.record)
    for name, limit in task.limits.items():
        times = {"ttft_p99_s": given.ttft_s, "inter_token_p99_s": given.inter_token_s, "e2e_p99_s": given.e2e_s}[name]
        simulated = getattr(speed, name, None) or (times.p99 if times else None)
        if simulated is None:
            continue
        is_met = is_met and simulated <= limit
        words.append(f"p99 {duration(simulated)} of the {duration(limit)} that the task allows")
    ending = "" if not task.limits else ": within its goal" if is_met else ": outside its goal"
    return GoalCheck(is_met, f"{', '.join(words)}{ending} ({speed.basis})")


def study_load(
    plan: MemoryPlan,
    traffic: Workload,
    what_if: WhatIf | None = None,
    *,
    record: RunRecord | None = None,
    book: SpeedBook | None = None,
    is_stale: Callable[[], bool] = lambda: False,
) -> LoadStudy | None:
    """Limit and advice for `plan` on `traffic`; None where its card cannot be simulated, or nobody waits any more.

    Args:
        what_if: plans a configuration; see `advise`.
        record: a run of `plan`; its limit is the measured one, and it scales what is simulated.
        book: what was simulated before.
        is_stale: asked before each simulation; once True the study ends.
    """
    book = book or SpeedBook(traffic)
    scale = book.scale(record)

    def speed(of: MemoryPlan) -> Speed | None:
        return None if is_stale() else book.speed(of, scale)

    own = speed(plan)
    if own is None:
        return None
    basis = record or own.record
    found = advise(plan, what_if, record=basis, speed_of=speed)
    return None if is_stale() else LoadStudy(binding_limit(plan, basis), found, own)
