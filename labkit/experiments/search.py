"""`guided_search`: the best settings in a few launches, with the simulation as prior and measured runs as truth.

Launch 1 is the default, launch 2 the best that the simulation sees; each corrects the simulation (its constants, and a
Gaussian process on log(measured/simulated)), and every further one goes where the gain inside the limit × P(fit) is
expected to be largest. At the end winner and default are launched once more. A launch that fails is a constraint
learnt, not an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Any

import numpy as np

from labkit.errors import DoesNotFitError, OutOfRangeError, WorkerError
from labkit.experiments.residual_gp import SCALE, ResidualGp

Point = Mapping[str, Any]
# Stop where no candidate is expected to gain 1 %, or each is 5 % better with a chance below 5 %.
_WORTH, _BETTER, _DOUBT = 0.01, 0.05, 0.05
# Predictions nearer than this are the same: what differs is a knob that does not bind.
_ALIKE = 0.002
# Errors are not normal: one setting is missed by far more than most are. Chosen on the grids of `search_bench`.
_CAUTION = 3.0
# Launches that are kept for repeats where so many are allowed.
_REPEATS, _REPEATS_FROM = 2, 6
# A standard normal's quantiles at the middles of equal parts.
_QUANTILES = np.array([NormalDist().inv_cdf((part + 0.5) / 256) for part in range(256)])


@dataclass(frozen=True)
class Outcome:
    """What a configuration gives, simulated or measured.

    Attributes:
        value: what is to be large, such as output tokens per second; above zero.
        latency_s: what has a limit, such as the p99 of the time between tokens; None where nothing is limited.
        fit_probability: that it starts at all; of simulated outcomes.
        run_id: of the record behind it, where there is one.
        light_value: the same value at a second, lighter load.
    """

    value: float
    latency_s: float | None = None
    fit_probability: float = 1.0
    run_id: str = ""
    light_value: float | None = None


@dataclass(frozen=True)
class Launch:
    """One launch: the point, what was expected, what came; `measured` is None when it did not start."""

    point: Point
    expected: Outcome
    measured: Outcome | None
    error: str = ""
    is_repeat: bool = False


Simulate = Callable[[Point], Outcome | None]


@dataclass(frozen=True)
class Learnt:
    """A simulation that has learnt from launches.

    Attributes:
        relative_error: standard deviation of log(measured/simulated) over many deployments.
    """

    simulate: Simulate
    relative_error: float


@dataclass(frozen=True)
class SearchResult:
    """The answer of a search.

    Attributes:
        best: the launch with the largest value inside the limit, repeats averaged; None when no launch was.
        baseline: the default's launch, repeats averaged.
        gain: best over default - 1, None where one of the two is missing. gain_range: in which it lies in 19 of 20.
        is_different: that range does not hold 0.
        launches: all, in order. num_candidates: configurations that were simulated. num_refused: dropped by the plan.
        num_alike: not launched because the simulation gives them what it gives a safer one.
        stopped: why no further launch was made. sentence: the answer in words.
    """

    best: Launch | None
    baseline: Launch
    gain: float | None
    gain_range: tuple[float, float] | None
    is_different: bool
    launches: tuple[Launch, ...]
    num_candidates: int
    num_refused: int
    num_alike: int
    stopped: str
    sentence: str = field(default="")


def guided_search(
    points: Sequence[Point],
    simulate: Simulate,
    launch: Callable[[Point], Outcome],
    *,
    default: Point,
    latency_limit_s: float | None = None,
    max_runs: int = 8,
    noise: float = 0.02,
    repeats: bool = True,
    resimulate: Callable[[], Learnt | None] = lambda: None,
    is_cancelled: Callable[[], bool] = lambda: False,
    on_launch: Callable[[Launch], None] = lambda one: None,
) -> SearchResult:
    """Find the best of `points`.

    Args:
        simulate: point → expected outcome, None for what the plan refuses.
        launch: point → measured outcome; a `DoesNotFitError` or `WorkerError` means that it did not start.
        default: the settings to compare with, launched first.
        latency_limit_s: largest `Outcome.latency_s` that counts.
        max_runs: launches at most, repeats included.
        noise: relative standard deviation of a repeated launch.
        repeats: launch winner and default once more, so that their difference is known.
        resimulate: asked after the first two launches: a simulation that has learnt from them, or None.

    Raises:
        OutOfRangeError: no point is left, the default is refused, or fewer than 1 launch is allowed.
    """
    if max_runs < 1:
        raise OutOfRangeError(f"a search cannot make {max_runs} launches", works="1 or more", knob="max_runs")
    known = [default, *(point for point in points if dict(point) != dict(default))]
    expected = [simulate(point) for point in known]
    if expected[0] is None:
        raise OutOfRangeError("the plan refuses the default settings", works="a default that fits")
    fitting = [(point, outcome) for point, outcome in zip(known, expected, strict=True) if outcome is not None]
    state = _State([point for point, _ in fitting], [outcome for _, outcome in fitting], latency_limit_s, noise)
    explored = max_runs - _REPEATS if repeats and max_runs >= _REPEATS_FROM else max_runs
    stopped = f"{explored} launches were made"
    index: int | None = 0
    while index is not None and len(state.launches) < explored:
        if is_cancelled():
            stopped = "cancelled"
            break
        on_launch(state.launch(index, launch))
        if len(state.launches) <= 2 and (learnt := resimulate()) is not None:
            state.expect(learnt)
        index, why = state.next()
        stopped = why or stopped
    while repeats and len(state.launches) < max_runs and not is_cancelled():
        once = state.to_repeat()
        if once is None:
            break
        on_launch(state.launch(once, launch, is_repeat=True))
    return state.result(stopped, len(fitting), len(known) - len(fitting))


def alike(outcomes: Sequence[Outcome]) -> frozenset[int]:
    """Which outcomes are the same as one that is surer to start, or as the first."""
    order = sorted(range(len(outcomes)), key=lambda index: (index > 0, -outcomes[index].fit_probability, index))
    chosen: list[int] = []
    for index in order:
        if not any(_are_alike(outcomes[index], outcomes[other]) for other in chosen):
            chosen.append(index)
    return frozenset(range(len(outcomes))) - frozenset(chosen)


def _are_alike(one: Outcome, other: Outcome) -> bool:
    both = ((one.value, other.value), (one.latency_s, other.latency_s))
    return all(a == b or (a and b and abs(math.log(a / b)) < _ALIKE) for a, b in both)


class _State:
    """Simulated outcomes, launches, and what follows from both."""

    def __init__(
        self, points: Sequence[Point], expected: Sequence[Outcome], limit_s: float | None, noise: float
    ) -> None:
        self.points, self.expected, self.limit_s, self.noise = list(points), list(expected), limit_s, noise
        self.launches: list[Launch] = []
        self._outcomes: dict[int, list[Outcome]] = {}
        self._failed: set[int] = set()
        self._positions = scaled_positions(points)
        self._alike = alike(expected)
        self._error = SCALE

    def launch(self, index: int, run: Callable[[Point], Outcome], *, is_repeat: bool = False) -> Launch:
        point, expected = self.points[index], self.expected[index]
        try:
            one = Launch(point, expected, run(point), is_repeat=is_repeat)
        except (DoesNotFitError, WorkerError) as error:
            one = Launch(point, expected, None, str(error), is_repeat)
            self._failed.add(index)
        if one.measured is not None:
            self._outcomes.setdefault(index, []).append(one.measured)
        self.launches.append(one)
        return one

    def expect(self, learnt: Learnt) -> None:
        """Take a simulation that knows more; what it refuses keeps its old outcome."""
        again = [learnt.simulate(point) for point in self.points]
        self.expected = [new or old for new, old in zip(again, self.expected, strict=True)]
        self._error = min(SCALE, _CAUTION * learnt.relative_error)
        self._alike = alike(self.expected)

    def mean(self, index: int) -> Outcome | None:
        """What a point gave, repeats averaged; None where it never started."""
        outcomes = self._outcomes.get(index)
        if not outcomes or index in self._failed:
            return None
        value = math.exp(float(np.mean([math.log(one.value) for one in outcomes])))
        times = [one.latency_s for one in outcomes if one.latency_s is not None]
        return replace(outcomes[0], value=value, latency_s=float(np.mean(times)) if times else None)

    def best(self) -> tuple[int, Outcome] | None:
        good = [(index, mean) for index in self._outcomes if (mean := self.mean(index)) and self._is_allowed(mean)]
        return max(good, key=lambda entry: entry[1].value, default=None)

    def _is_allowed(self, outcome: Outcome) -> bool:
        return self.limit_s is None or (outcome.latency_s or 0.0) <= self.limit_s

    def to_repeat(self) -> int | None:
        """The default, then the winner, where only one launch says what they give."""
        best = self.best()
        if best is None or best[0] == 0:
            return None
        once = [
            index for index in (0, best[0]) if len(self._outcomes.get(index, ())) == 1 and index not in self._failed
        ]
        return once[0] if once else None

    def next(self) -> tuple[int | None, str]:
        """The candidate to launch, or None and why there is no point in one."""
        left = [index for index in range(len(self.points)) if index not in self._outcomes and index not in self._failed]
        # What the simulation cannot tell apart is launched once; the others come when nothing else is left.
        left = [index for index in left if index not in self._alike] or left
        if not left:
            return None, "every configuration was launched"
        mean, deviation = self._residuals(lambda outcome: outcome.value, self.noise)
        values = mean + np.log([outcome.value for outcome in self.expected])
        # What slows a step lowers the throughput and raises the latency alike: one draw stands for both.
        draws, allowed, fits = values - _QUANTILES[:, None] * deviation, self._allowed(), self._fits()
        best = self.best()
        if len(self.launches) == 1 or best is None:
            # Nothing to beat yet: the largest value to be expected inside the limit.
            hoped = fits * (np.exp(draws) * allowed).mean(axis=0)
            return max(left, key=lambda index: hoped[index]), ""
        goal = math.log(best[1].value)
        gains = fits * (np.maximum(0.0, draws - goal) * allowed).mean(axis=0)
        better = fits * ((draws > goal + math.log1p(_BETTER)) & allowed).mean(axis=0)
        choice = max(left, key=lambda index: gains[index])
        if gains[choice] < _WORTH:
            return None, f"no other configuration is expected to gain {_WORTH:.0%}"
        if max(better[index] for index in left) < _DOUBT:
            return None, f"no other configuration is more than {_BETTER:.0%} better with a chance of {_DOUBT:.0%}"
        return choice, ""

    def _residuals(self, number: Callable[[Outcome], float | None], noise: float) -> tuple[np.ndarray, np.ndarray]:
        """Mean and deviation of log(measured/simulated) of every candidate."""
        process = ResidualGp(self._positions, noise, self._error)
        for index, outcomes in self._outcomes.items():
            for outcome in outcomes:
                measured, expected = number(outcome), number(self.expected[index])
                if measured and expected:
                    process.add(index, math.log(measured / expected))
        return process.posterior()

    def _allowed(self) -> np.ndarray:
        """Whether each draw of each candidate is inside the limit, [draws, candidates]."""
        if self.limit_s is None:
            return np.ones((len(_QUANTILES), len(self.points)), dtype=bool)
        mean, deviation = self._residuals(lambda outcome: outcome.latency_s, 3 * self.noise)
        expected = np.log([max(outcome.latency_s or 0.0, 1e-12) for outcome in self.expected])
        return expected + mean + _QUANTILES[:, None] * deviation <= math.log(self.limit_s)

    def _fits(self) -> np.ndarray:
        """P(it starts): the plan's, halved for each launch that failed although the plan was as sure of it."""
        fits = np.array([outcome.fit_probability for outcome in self.expected])
        failed = np.array([self.expected[index].fit_probability for index in self._failed])
        return fits * 0.5 ** (fits[:, None] <= failed[None, :]).sum(axis=1)

    def result(self, stopped: str, num_candidates: int, num_refused: int) -> SearchResult:
        best, default = self.best(), self.mean(0)
        first = self.launches[0] if self.launches else Launch(self.points[0], self.expected[0], None, "not launched")
        gain = between = None
        if best is not None and default is not None:
            gain = best[1].value / default.value - 1
            between = self._range(math.log1p(gain), best[0])
        winner = None if best is None else Launch(self.points[best[0]], self.expected[best[0]], best[1])
        found = SearchResult(
            winner, replace(first, measured=default), gain, between, between is not None and between[0] > 0,
            tuple(self.launches), num_candidates, num_refused, len(self._alike - self._outcomes.keys()), stopped,
        )  # fmt: skip
        return replace(found, sentence=_sentence(found))

    def _range(self, log_gain: float, index: int) -> tuple[float, float]:
        """In which the gain lies in 19 of 20 cases, by what repeats differ; the usual noise counts as two more."""
        if index == 0:
            return 0.0, 0.0
        pairs = [[math.log(one.value) for one in outcomes] for outcomes in self._outcomes.values() if len(outcomes) > 1]
        variance = (2 * self.noise**2 + sum(float(np.var(pair, ddof=1)) for pair in pairs)) / (2 + len(pairs))
        counts = [len(self._outcomes[0]), len(self._outcomes[index])]
        half = 1.96 * math.sqrt(variance * sum(1 / count for count in counts))
        return math.expm1(log_gain - half), math.expm1(log_gain + half)


def scaled_positions(points: Sequence[Point]) -> np.ndarray:
    """[points, knobs]: numbers by their logarithm, names by their order, each knob scaled to 0 … 1."""
    names = sorted({name for point in points for name in point})
    columns = []
    for name in names:
        values = [point.get(name) for point in points]
        numbers = [float(value) for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]
        if len(numbers) == len(values) and min(numbers) > 0:
            column = np.log2(numbers)
        else:
            order = sorted({str(value) for value in values})
            column = np.array([float(order.index(str(value))) for value in values])
        span = float(column.max() - column.min())
        columns.append((column - column.min()) / span if span else np.zeros(len(points)))
    return np.stack(columns, axis=1) if columns else np.zeros((len(points), 1))


def _sentence(found: SearchResult) -> str:
    made = f"{len(found.launches)} launches of {found.num_candidates} configurations"
    if found.best is None:
        return f"No configuration met the limit in {made}; {found.stopped}."
    if not found.is_different or found.gain is None or found.gain_range is None:
        return f"No difference from the default beyond what repeats differ by, after {made}; {found.stopped}."
    changes = {name: value for name, value in found.best.point.items() if found.baseline.point.get(name) != value}
    words = ", ".join(f"{name} {value}" for name, value in changes.items())
    low, high = found.gain_range
    return f"{words}: {found.gain:+.0%} ({low:+.0%} to {high:+.0%}) over the default, found in {made}; {found.stopped}."
