"""What may be done to a traffic: slices, rates, lengths. Each step leaves a sentence in `Workload.steps`."""

from __future__ import annotations

import math
from dataclasses import replace

from labkit.errors import OutOfRangeError
from labkit.specs.workload import RequestSpec, Workload
from labkit.text import plain


def slice_time(workload: Workload, start_s: float = 0.0, duration_s: float | None = None) -> Workload:
    """Requests that arrive from `start_s` on, for `duration_s`; their arrivals count from `start_s`."""
    start = check_number("start_s", start_s, 0.0)
    end = math.inf if duration_s is None else start + check_number("duration_s", duration_s, 0.0, above=True)
    kept = [request for request in workload.requests if start <= request.arrival_s < end]
    length = "all" if duration_s is None else f"{duration_s:g} s"
    return workload.with_requests(
        (replace(request, arrival_s=request.arrival_s - start) for request in kept),
        f"slice: {length} from {start:g} s on, {len(kept):,} requests",
    )


def first_requests(workload: Workload, limit: int) -> Workload:
    """The first `limit` requests."""
    count = check_count("limit", limit)
    kept = workload.requests[:count]
    return workload.with_requests(kept, f"the first {len(kept):,} requests")


def scale_rate(workload: Workload, rate_scale: float) -> Workload:
    """`rate_scale` times as many requests a second: arrivals divided by it, lengths kept."""
    scale = check_number("rate_scale", rate_scale, 0.0, above=True)
    return workload.with_requests(
        (replace(request, arrival_s=request.arrival_s / scale) for request in workload.requests),
        f"request rate × {scale:g}: arrivals divided by {scale:g}",
    )


def clip_lengths(
    workload: Workload, max_input_tokens: int | None = None, max_output_tokens: int | None = None
) -> Workload:
    """No prompt longer than `max_input_tokens`, no output longer than `max_output_tokens`."""
    if max_input_tokens is not None:
        longest = check_count("max_input_tokens", max_input_tokens)
        cut = sum(request.input_tokens > longest for request in workload.requests)
        workload = workload.with_requests(
            (_shortened(request, longest, workload.prefix_block_tokens) for request in workload.requests),
            f"prompts clipped to {longest:,} tokens: {cut:,} of {len(workload.requests):,} shortened",
        )
    if max_output_tokens is not None:
        longest = check_count("max_output_tokens", max_output_tokens)
        cut = sum(request.output_tokens > longest for request in workload.requests)
        workload = workload.with_requests(
            (replace(request, output_tokens=min(request.output_tokens, longest)) for request in workload.requests),
            f"outputs clipped to {longest:,} tokens: {cut:,} of {len(workload.requests):,} shortened",
        )
    return workload


def _shortened(request: RequestSpec, longest: int, block_tokens: int) -> RequestSpec:
    if request.input_tokens <= longest:
        return request
    left = -(-longest // block_tokens) if block_tokens else 0
    blocks = []
    for first, last in request.prefix_blocks:
        if left <= 0:
            break
        blocks.append((first, min(last, first + left - 1)))
        left -= last - first + 1
    return replace(request, input_tokens=longest, prefix_blocks=tuple(blocks))


def check_number(name: str, value: float, minimum: float, *, above: bool = False) -> float:
    """`value` as a finite float of at least `minimum` (or above it).

    Raises:
        OutOfRangeError: it is not; `name` is the setting.
    """
    correct = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e15
    if not correct or value < minimum or (above and value == minimum):
        raise OutOfRangeError(
            f"{name} cannot be {plain(repr(value), 80)}",
            needed=f"a number {'above' if above else 'of at least'} {minimum:g}",
            knob=name,
        )
    return float(value)


def check_count(name: str, value: int, minimum: int = 1, maximum: int = 10**9) -> int:
    """`value` as a whole number within the range.

    Raises:
        OutOfRangeError: it is not; `name` is the setting.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
        raise OutOfRangeError(
            f"{name} cannot be {plain(repr(value), 80)}",
            needed=f"a whole number, {minimum:,} to {maximum:,}",
            knob=name,
        )
    return value
