"""KV layout, memory budget and `plan()`, by vLLM's rules per version and labkit's own; without torch."""

from labkit.memory.kv_layout import KvLayout, build_layout
from labkit.memory.planner import plan
from labkit.memory.records import MemoryBreakdown, MemoryPlan
from labkit.memory.rules import vllm_rules
from labkit.memory.stages import Calibration, Overrides
from labkit.memory.tensors import count_parameters

__all__ = [
    "Calibration",
    "KvLayout",
    "MemoryBreakdown",
    "MemoryPlan",
    "Overrides",
    "build_layout",
    "count_parameters",
    "plan",
    "vllm_rules",
]
