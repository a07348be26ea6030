"""What a run was and gave: records, their numbers, measured memory, the simulated L2. Names load on first use."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from labkit.lazy import lazy_attribute

if TYPE_CHECKING:
    from labkit.measure.allocator import AllocatorTimeline
    from labkit.measure.attention_shape import AttentionShape, BatchShape
    from labkit.measure.l2_simulator import simulate_attention
    from labkit.measure.l2_step import simulate_run, simulate_step
    from labkit.measure.memory_snapshot import measured_breakdown
    from labkit.measure.metrics import KvUse, goodput, kv_use
    from labkit.measure.nvml_sampler import NvmlSampler
    from labkit.measure.recorder import RunRecorder
    from labkit.measure.run_record import Counters, MemorySample, RequestRow, RunRecord, StepRow
    from labkit.measure.summary import RunSummary, summarize

_PLACES = MappingProxyType(
    {
        "AllocatorTimeline": "allocator",
        "AttentionShape": "attention_shape",
        "BatchShape": "attention_shape",
        "Counters": "run_record",
        "KvUse": "metrics",
        "MemorySample": "run_record",
        "NvmlSampler": "nvml_sampler",
        "RequestRow": "run_record",
        "RunRecord": "run_record",
        "RunRecorder": "recorder",
        "RunSummary": "summary",
        "StepRow": "run_record",
        "goodput": "metrics",
        "kv_use": "metrics",
        "measured_breakdown": "memory_snapshot",
        "simulate_attention": "l2_simulator",
        "simulate_run": "l2_step",
        "simulate_step": "l2_step",
        "summarize": "summary",
    }
)
__all__ = [
    "AllocatorTimeline",
    "AttentionShape",
    "BatchShape",
    "Counters",
    "KvUse",
    "MemorySample",
    "NvmlSampler",
    "RequestRow",
    "RunRecord",
    "RunRecorder",
    "RunSummary",
    "StepRow",
    "goodput",
    "kv_use",
    "measured_breakdown",
    "simulate_attention",
    "simulate_run",
    "simulate_step",
    "summarize",
]


def __getattr__(name: str) -> Any:
    return lazy_attribute(__name__, _PLACES, name)
