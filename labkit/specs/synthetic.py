"""Synthetic traffic: lengths fixed, uniform or Zipf; arrivals Poisson, gamma or all at once."""

from __future__ import annotations

import bisect
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from labkit.errors import OutOfRangeError
from labkit.specs.workload import RequestSpec, Workload
from labkit.specs.workload_steps import check_count, check_number
from labkit.text import plain

MAX_TOKENS = 10**8
MAX_ZIPF_SPAN = 2**20


@dataclass(frozen=True)
class Fixed:
    """Every request has `tokens` tokens."""

    tokens: int

    def sampler(self) -> Callable[[random.Random], int]:
        """A function from a random generator to one length."""
        tokens = check_count("lengths", self.tokens, maximum=MAX_TOKENS)
        return lambda generator: tokens

    def __str__(self) -> str:
        return f"fixed:{self.tokens}"


@dataclass(frozen=True)
class Uniform:
    """Any whole number from `low` to `high`, both included, equally often."""

    low: int
    high: int

    def sampler(self) -> Callable[[random.Random], int]:
        """A function from a random generator to one length."""
        low, high = _check_span(self.low, self.high)
        return lambda generator: low + int(generator.random() * (high - low + 1))

    def __str__(self) -> str:
        return f"uniform:{self.low}-{self.high}"


@dataclass(frozen=True)
class Zipf:
    """Lengths from `low` to `high`; the n-th shortest is drawn in proportion to n ** -exponent."""

    exponent: float
    low: int
    high: int

    def sampler(self) -> Callable[[random.Random], int]:
        """A function from a random generator to one length."""
        low, high = _check_span(self.low, self.high)
        exponent = check_number("Zipf exponent", self.exponent, 0.0)
        if high - low >= MAX_ZIPF_SPAN or exponent > 100:
            raise OutOfRangeError(
                f"Zipf lengths {plain(self)} are out of range",
                needed=f"a span below {MAX_ZIPF_SPAN:,} and an exponent of at most 100",
                knob="lengths",
            )
        sums = list(itertools.accumulate(float(rank) ** -exponent for rank in range(1, high - low + 2)))
        return lambda generator: low + min(bisect.bisect_right(sums, generator.random() * sums[-1]), high - low)

    def __str__(self) -> str:
        return f"zipf:{self.exponent:g}:{self.low}-{self.high}"


@dataclass(frozen=True)
class AllAtOnce:
    """Every request arrives at 0 s."""

    def times(self, generator: random.Random, count: int) -> list[float]:
        """`count` arrivals in seconds."""
        return [0.0] * count

    def __str__(self) -> str:
        return "all_at_once"


@dataclass(frozen=True)
class Gamma:
    """`rate` requests a second on average; `cv` is the gaps' standard deviation over their mean (1 is Poisson)."""

    rate: float
    cv: float

    def times(self, generator: random.Random, count: int) -> list[float]:
        """`count` rising arrivals in seconds, the first at 0."""
        rate = check_number("arrival rate", self.rate, 0.0, above=True)
        cv = check_number("arrival cv", self.cv, 0.0)
        if cv == 0:
            return [index / rate for index in range(count)]
        shape = cv**-2
        if not 1e-4 <= shape <= 1e8:
            raise OutOfRangeError(f"arrival cv cannot be {cv:g}", needed="0, or 0.0001 to 100", knob="arrivals")
        gaps = (generator.gammavariate(shape, 1 / (shape * rate)) for _ in range(count - 1))
        return list(itertools.accumulate(gaps, initial=0.0))

    def __str__(self) -> str:
        return f"gamma:{self.rate:g}:{self.cv:g}"


@dataclass(frozen=True)
class Poisson:
    """`rate` requests a second on average, independent of one another."""

    rate: float

    def times(self, generator: random.Random, count: int) -> list[float]:
        """`count` rising arrivals in seconds, the first at 0."""
        rate = check_number("arrival rate", self.rate, 0.0, above=True)
        gaps = (-math.log1p(-generator.random()) / rate for _ in range(count - 1))
        return list(itertools.accumulate(gaps, initial=0.0))

    def __str__(self) -> str:
        return f"poisson:{self.rate:g}"


Lengths = Fixed | Uniform | Zipf
Arrivals = AllAtOnce | Poisson | Gamma
_LENGTH_FORMS = "fixed:512, uniform:16-512 or zipf:1.2:16-4096"
_ARRIVAL_FORMS = "all_at_once, poisson:4 or gamma:4:2 (requests a second, and the gaps' coefficient of variation)"


def synthetic_workload(
    num_requests: int,
    input_lengths: Lengths | int | str = 512,
    output_lengths: Lengths | int | str = 128,
    arrivals: Arrivals | str = "all_at_once",
    seed: int = 0,
    *,
    shared_prefix_tokens: int = 0,
) -> Workload:
    """A traffic of `num_requests` requests; the same arguments give the same requests on every machine.

    Args:
        num_requests: 1 to 1,000,000.
        input_lengths, output_lengths: a number of tokens, a distribution, or its text: fixed:512, uniform:16-512,
            zipf:1.2:16-4096.
        arrivals: a process or its text: all_at_once, poisson:4, gamma:4:2.
        seed: of lengths, arrivals and token ids.
        shared_prefix_tokens: tokens at the start of every prompt that are the same for all, as a system prompt is;
            prompts not longer than this share all they have.

    Raises:
        OutOfRangeError: a number out of range, or a text that names no distribution.
    """
    count = check_count("num_requests", num_requests, maximum=1_000_000)
    seed = check_count("seed", seed, minimum=0, maximum=2**63)
    shared = check_count("shared_prefix_tokens", shared_prefix_tokens, minimum=0, maximum=MAX_TOKENS)
    inputs, outputs, process = _lengths(input_lengths), _lengths(output_lengths), _arrivals(arrivals)
    # One generator each: changing the output lengths leaves the prompts and arrivals as they were.
    times = process.times(random.Random(f"{seed} arrivals"), count)
    draw_input, draw_output = inputs.sampler(), outputs.sampler()
    input_source, output_source = random.Random(f"{seed} inputs"), random.Random(f"{seed} outputs")
    prefix = ((0, 0),) if shared else ()
    requests = tuple(
        RequestSpec(arrival, draw_input(input_source), draw_output(output_source), prefix) for arrival in times
    )
    return Workload(
        name="synthetic",
        requests=requests,
        prefix_block_tokens=shared,
        steps=(f"{count:,} requests: prompts {inputs}, outputs {outputs}, arrivals {process}, seed {seed}",),
        seed=seed,
    )


def with_arrivals(workload: Workload, arrivals: Arrivals | str, seed: int = 0) -> Workload:
    """`workload` with new arrivals: for traces that hold lengths only or whose times come in batches."""
    process = _arrivals(arrivals)
    times = process.times(random.Random(f"{seed} arrivals"), len(workload.requests))
    paired = zip(workload.requests, times, strict=True)
    return workload.with_requests(
        (RequestSpec(time, old.input_tokens, old.output_tokens, old.prefix_blocks) for old, time in paired),
        f"arrivals replaced by {process}, seed {seed}",
    )


def _check_span(low: int, high: int) -> tuple[int, int]:
    low = check_count("lengths", low, maximum=MAX_TOKENS)
    return low, check_count("lengths", high, minimum=low, maximum=MAX_TOKENS)


def _lengths(given: Lengths | int | str) -> Lengths:
    if isinstance(given, (Fixed, Uniform, Zipf)):
        return given
    if isinstance(given, int) and not isinstance(given, bool):
        return Fixed(given)
    try:
        kind, *rest = str(given)[:80].split(":")
        if kind == "fixed" or not rest:
            return Fixed(int(rest[0] if rest else kind))
        low, _, high = rest[-1].partition("-")
        if kind == "uniform" and len(rest) == 1:
            return Uniform(int(low), int(high))
        if kind == "zipf" and len(rest) == 2:
            return Zipf(float(rest[0]), int(low), int(high))
    except ValueError:
        pass
    raise OutOfRangeError(f"lengths cannot be {plain(repr(given), 80)}", works=_LENGTH_FORMS, knob="lengths")


def _arrivals(given: Arrivals | str) -> Arrivals:
    if isinstance(given, (AllAtOnce, Poisson, Gamma)):
        return given
    kind, *rest = str(given)[:80].split(":")
    try:
        if kind in ("all_at_once", "all at once") and not rest:
            return AllAtOnce()
        if kind == "poisson" and len(rest) == 1:
            return Poisson(float(rest[0]))
        if kind == "gamma" and len(rest) == 2:
            return Gamma(float(rest[0]), float(rest[1]))
    except ValueError:
        pass
    raise OutOfRangeError(f"arrivals cannot be {plain(repr(given), 80)}", works=_ARRIVAL_FORMS, knob="arrivals")
