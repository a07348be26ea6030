"""The numbers that a run is judged by: latency percentiles, throughput and KV use, from one `RunRecord`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from labkit.measure.run_record import RequestRow, RunRecord


@dataclass(frozen=True)
class Percentiles:
    """A distribution of times in seconds: p50, p95, p99 (linear interpolation), mean, and how many values."""

    p50: float
    p95: float
    p99: float
    mean: float
    num_values: int


@dataclass(frozen=True)
class RunSummary:
    """One run in a few numbers; None where the run gave no value.

    Attributes:
        ttft_s: arrival to first token. inter_token_s: between output tokens of a request. e2e_s: arrival to last token.
        output_tokens_per_s, requests_per_s: finished or not, what came out over `duration_s`.
        num_preemptions: over all requests.
        cached_share: prompt tokens found in the prefix cache over all prompt tokens of started requests.
        peak_kv_share: fullest moment of the pool, 0 to 1. tail_waste_share: then, tokens' worth of reserved but
            empty places over reserved places.
        energy_per_token_j: of the card over the run, for each output token.
    """

    num_requests: int
    num_finished: int
    num_output_tokens: int
    duration_s: float
    ttft_s: Percentiles | None
    inter_token_s: Percentiles | None
    e2e_s: Percentiles | None
    output_tokens_per_s: float | None
    requests_per_s: float | None
    num_preemptions: int
    cached_share: float | None
    peak_kv_share: float | None
    tail_waste_share: float | None
    energy_per_token_j: float | None = None


def percentiles(values_s: Sequence[float]) -> Percentiles | None:
    """The percentiles of `values_s`, None when there are none."""
    if not len(values_s):
        return None
    p50, p95, p99 = (float(value) for value in np.percentile(values_s, (50, 95, 99)))
    return Percentiles(p50, p95, p99, float(np.mean(values_s)), len(values_s))


def summarize(record: RunRecord) -> RunSummary:
    """The summary of `record`; works for runs that were cancelled, failed or never started."""
    requests = record.requests
    finished = [row for row in requests if row.finish_s is not None and row.finish_reason in ("length", "stop")]
    output_tokens = sum(row.output_tokens for row in requests)
    duration_s = record.duration_s or max((step.start_s + step.duration_s for step in record.steps), default=0.0)
    started_tokens = sum(row.input_tokens for row in requests if row.first_token_s is not None)
    peak = max(record.steps, key=lambda step: step.num_blocks_used, default=None)
    reserved = peak.num_blocks_used * record.plan.config.block_size if peak else 0
    blocks = record.plan.num_gpu_blocks
    return RunSummary(
        num_requests=len(requests),
        num_finished=len(finished),
        num_output_tokens=output_tokens,
        duration_s=duration_s,
        ttft_s=percentiles(time_to_first_token_s(requests)),
        inter_token_s=percentiles(inter_token_s(requests)),
        e2e_s=percentiles([row.finish_s - row.arrival_s for row in finished if row.finish_s is not None]),
        output_tokens_per_s=output_tokens / duration_s if duration_s > 0 else None,
        requests_per_s=len(finished) / duration_s if duration_s > 0 else None,
        num_preemptions=sum(row.num_preemptions for row in requests),
        cached_share=sum(row.num_cached_tokens for row in requests) / started_tokens if started_tokens else None,
        peak_kv_share=peak.num_blocks_used / blocks if peak and blocks else None,
        tail_waste_share=max(0.0, 1 - peak.num_tokens_stored / reserved) if peak and reserved else None,
        energy_per_token_j=record.energy_j / output_tokens if record.energy_j is not None and output_tokens else None,
    )


def time_to_first_token_s(requests: Sequence[RequestRow]) -> list[float]:
    """Arrival to first token of each request that has one."""
    return [row.first_token_s - row.arrival_s for row in requests if row.first_token_s is not None]


def inter_token_s(requests: Sequence[RequestRow]) -> list[float]:
    """Times between output tokens, of all requests together.

    Where a request carries no times of its tokens, its mean stands in, once for each gap.
    """
    gaps: list[float] = []
    for row in requests:
        if len(row.token_times_s) > 1:
            gaps.extend(np.diff(row.token_times_s).tolist())
        elif row.first_token_s is not None and row.finish_s is not None and row.output_tokens > 1:
            num_gaps = row.output_tokens - 1
            gaps.extend([(row.finish_s - row.first_token_s) / num_gaps] * num_gaps)
    return gaps
