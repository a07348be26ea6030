"""Numbers of a run beside those of `RunSummary`: goodput, and the use and waste of the KV cache over time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from labkit.errors import OutOfRangeError
from labkit.measure.run_record import RequestRow, RunRecord


@dataclass(frozen=True)
class KvUse:
    """Use of the KV pool, weighted by how long each step took; shares 0 to 1.

    Attributes:
        mean_share: blocks in use over blocks of the pool.
        peak_share: its largest value.
        mean_tail_waste_share: reserved but empty places over reserved places.
        mean_cached_share: blocks that only the prefix cache holds over blocks of the pool.
    """

    mean_share: float
    peak_share: float
    mean_tail_waste_share: float
    mean_cached_share: float


def kv_use(record: RunRecord) -> KvUse | None:
    """The pool's use over the run; None where no step was recorded or the plan has no blocks."""
    blocks = record.plan.num_gpu_blocks
    if not record.steps or not blocks:
        return None
    weights = np.array([max(step.duration_s, 1e-9) for step in record.steps])
    used = np.array([step.num_blocks_used for step in record.steps], dtype=float)
    stored = np.array([step.num_tokens_stored for step in record.steps], dtype=float)
    cached = np.array([step.num_blocks_cached for step in record.steps], dtype=float)
    places = used * record.plan.config.block_size
    reserved = float(places @ weights)
    return KvUse(
        mean_share=float(used @ weights / weights.sum() / blocks),
        peak_share=float(used.max() / blocks),
        mean_tail_waste_share=max(0.0, 1 - float(stored @ weights) / reserved) if reserved else 0.0,
        mean_cached_share=float(cached @ weights / weights.sum() / blocks),
    )


def goodput(record: RunRecord, *, ttft_s: float, inter_token_s: float | None = None) -> float | None:
    """Requests per second that finished and met the goal; None for a run without a duration.

    A request meets it when its first token came within `ttft_s` of its arrival and its mean time between output
    tokens is at most `inter_token_s` (DistServe's definition, arXiv 2401.09670).

    Raises:
        OutOfRangeError: a goal that is not above zero.
    """
    for name, goal in (("ttft_s", ttft_s), ("inter_token_s", inter_token_s)):
        if goal is not None and not goal > 0:
            raise OutOfRangeError(f"{name} cannot be {goal}", works="more than 0", knob=name)
    if record.duration_s <= 0:
        return None
    return sum(_meets(row, ttft_s, inter_token_s) for row in record.requests) / record.duration_s


def _meets(row: RequestRow, ttft_s: float, inter_token_s: float | None) -> bool:
    if row.first_token_s is None or row.finish_s is None or row.finish_reason not in ("length", "stop"):
        return False
    if row.first_token_s - row.arrival_s > ttft_s:
        return False
    if inter_token_s is None or row.output_tokens < 2:
        return True
    return (row.finish_s - row.first_token_s) / (row.output_tokens - 1) <= inter_token_s
