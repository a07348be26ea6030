"""`guided_search`: the best settings in a few launches, with the simulation as prior and measured runs as truth.

Launch 1 is the default, launch 2 the best that the simulation sees; each corrects the simulation (a Gaussian process
on log(measured/simulated)), and every further one goes where expected gain × P(latency in its limit) × P(fit) is
largest. A launch that fails is a constraint learnt, not an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from labkit.errors import DoesNotFitError, OutOfRangeError
from labkit.experiments.residual_gp import ResidualGp, expected_gain, normal_cdf

Point = Mapping[str, Any]
_WORTH, _BETTER, _DOUBT = 0.01, 0.05, 0.05


@dataclass(frozen=True)
class Outcome:
    """What a configuration gives, simulated or measured.

    Attributes:
        value: what is to be large, such as output tokens per second; above zero.
        latency_s: what has a limit, such as the p99 of the time between tokens; None where nothing is limited.
        fit_probability: that it starts at all; of simulated outcomes.
        run_id: of the record behind it, where there is one.
    """

    value: float
    latency_s: float | None = None
    fit_probability: float = 1.0
    run_id: str = ""


@dataclass(frozen=True)
class Launch:
    """One launch: the point, what was expected, what came; `measured` is None when it did not start."""

    point: Point
    expected: Outcome
    measured: Outcome | None
    error: str = ""


@dataclass(frozen=True)
class SearchResult:
    """The answer of a search.

    Attributes:
        best: the launch with the largest value inside the limit; None when no launch was.
        baseline: the default's launch.
        gain: best over default - 1, None where one of the two is missing.
        is_different: the gain is more than repeats differ by.
        launches: all, in order. num_candidates: configurations that were simulated. num_refused: dropped by the plan.
        stopped: why no further launch was made. sentence: the answer in words.
    """

    best: Launch | None
    baseline: Launch
    gain: float | None
    is_different: bool
    launches: tuple[Launch, ...]
    num_candidates: int
    num_refused: int
    stopped: str
    sentence: str = field(default="")


def guided_search(
    points: Sequence[Point],
    simulate: Callable[[Point], Outcome | None],
    launch: Callable[[Point], Outcome],
    *,
    default: Point,
    latency_limit_s: float | None = None,
    max_runs: int = 8,
    noise: float = 0.02,
    is_cancelled: Callable[[], bool] = lambda: False,
    on_launch: Callable[[Launch], None] = lambda one: None,
) -> SearchResult:
    """Find the best of `points`.

    Args:
        simulate: point → expected outcome, None for what the plan refuses; called once a point.
        launch: point → measured outcome; a `DoesNotFitError` means that it did not start.
        default: the settings to compare with, launched first.
        latency_limit_s: largest `Outcome.latency_s` that counts.
        max_runs: launches at most.
        noise: relative standard deviation of a repeated launch.

    Raises:
        OutOfRangeError: no point is left, the default is refused, or fewer than 1 launch is allowed.
    """
    if max_runs < 1:
        raise OutOfRangeError(f"a search cannot make {max_runs} launches", works="1 or more", knob="max_runs")
    known = [default, *(point for point in points if dict(point) != dict(default))]
    expected = [simulate(point) for point in known]
    if expected[0] is None:
        raise OutOfRangeError("the plan refuses the default settings", works="a default that fits")
    kept = [(point, outcome) for point, outcome in zip(known, expected, strict=True) if outcome is not None]
    state = _State([point for point, _ in kept], [outcome for _, outcome in kept], latency_limit_s, noise)
    stopped = f"{max_runs} launches were made"
    index: int | None = 0
    for _ in range(max_runs):
        if is_cancelled():
            stopped = "cancelled"
            break
        if index is None:
            break
        on_launch(state.launch(index, launch))
        index, why = state.next()
        if index is None:
            stopped = why
            break
    return state.result(stopped, len(known) - len(kept), noise)


class _State:
    """Simulated outcomes, launches, and what follows from both."""

    def __init__(
        self, points: Sequence[Point], expected: Sequence[Outcome], limit_s: float | None, noise: float
    ) -> None:
        self.points, self.expected, self.limit_s = list(points), list(expected), limit_s
        positions = scaled_positions(points)
        self.value_gp, self.latency_gp = ResidualGp(positions, noise), ResidualGp(positions, 3 * noise)
        self.launches: dict[int, Launch] = {}
        self._fit_margin = 1.0

    def launch(self, index: int, run: Callable[[Point], Outcome]) -> Launch:
        point, expected = self.points[index], self.expected[index]
        try:
            measured = run(point)
        except DoesNotFitError as error:
            self.launches[index] = Launch(point, expected, None, str(error))
            # The plan was too hopeful once: what it called just as doubtful is now less likely to start.
            self._fit_margin *= 0.5
            return self.launches[index]
        self.value_gp.add(index, math.log(measured.value / expected.value))
        if measured.latency_s and expected.latency_s:
            self.latency_gp.add(index, math.log(measured.latency_s / expected.latency_s))
        self.launches[index] = Launch(point, expected, measured)
        return self.launches[index]

    def is_good(self, one: Launch) -> bool:
        if one.measured is None:
            return False
        return self.limit_s is None or (one.measured.latency_s or 0.0) <= self.limit_s

    def best(self) -> Launch | None:
        good = [one for one in self.launches.values() if self.is_good(one)]
        return max(good, key=lambda one: one.measured.value if one.measured else 0.0, default=None)

    def next(self) -> tuple[int | None, str]:
        """The candidate to launch, or None and why there is no point in one."""
        left = [index for index in range(len(self.points)) if index not in self.launches]
        if not left:
            return None, "every configuration was launched"
        mean, deviation = self.value_gp.posterior()
        values = mean + np.log([outcome.value for outcome in self.expected])
        chance = self._chance()
        best = self.best()
        if len(self.launches) == 1 or best is None or best.measured is None:
            # Nothing to beat yet: the largest expected value that is likely to be allowed.
            return max(left, key=lambda index: math.exp(values[index]) * chance[index]), ""
        goal = math.log(best.measured.value)
        gains = expected_gain(values, deviation, goal) * chance
        better = chance * normal_cdf((values - goal - math.log1p(_BETTER)) / deviation)
        choice = max(left, key=lambda index: gains[index])
        if gains[choice] < _WORTH:
            return None, f"no other configuration is expected to gain {_WORTH:.0%}"
        if max(better[index] for index in left) < _DOUBT:
            return None, f"no other configuration is more than {_BETTER:.0%} better with a chance of {_DOUBT:.0%}"
        return choice, ""

    def _chance(self) -> np.ndarray:
        """P(latency in its limit) × P(fit) of every candidate."""
        fits = np.array([outcome.fit_probability for outcome in self.expected])
        fits = np.where(fits < 1, fits * self._fit_margin, fits)
        if self.limit_s is None:
            return fits
        mean, deviation = self.latency_gp.posterior()
        expected = np.log([max(outcome.latency_s or 0.0, 1e-12) for outcome in self.expected])
        return fits * normal_cdf((math.log(self.limit_s) - expected - mean) / deviation)

    def result(self, stopped: str, num_refused: int, noise: float) -> SearchResult:
        launches = tuple(self.launches.values())
        baseline, best = self.launches.get(0), self.best()
        if baseline is None:
            baseline = Launch(self.points[0], self.expected[0], None, "not launched")
        gain = None
        if best is not None and best.measured and baseline.measured:
            gain = best.measured.value / baseline.measured.value - 1
        # Two launches differ by chance by this much in one of twenty cases.
        differs = gain is not None and gain > 1.96 * math.sqrt(2) * noise
        found = SearchResult(
            best, baseline, gain, differs, launches, len(self.points), num_refused, stopped,
        )  # fmt: skip
        return SearchResult(**{**found.__dict__, "sentence": _sentence(found)})


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
    if not found.is_different or found.gain is None:
        return f"No difference from the default beyond what repeats differ by, after {made}; {found.stopped}."
    changes = {name: value for name, value in found.best.point.items() if found.baseline.point.get(name) != value}
    words = ", ".join(f"{name} {value}" for name, value in changes.items())
    return f"{words}: {found.gain:+.0%} over the default, found in {made}; {found.stopped}."
