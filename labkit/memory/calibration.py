"""A host's own constants from one of its logs: what the log says over what the formulas say for the same flags."""

from __future__ import annotations

from typing import Any

from labkit.memory.logs.record import LogRecord
from labkit.memory.records import MemoryPlan
from labkit.memory.stages import Calibration
from labkit.specs.engine_config import EngineConfig
from labkit.text import plain

# A log's part further off than this is no constant of the host but another model or flag.
PLAUSIBLE = (0.2, 5.0)


def log_config(record: LogRecord, default_utilization: float) -> EngineConfig:
    """The configuration that a log states; what it does not say is as its version has it."""
    settings = {"gpu_memory_utilization": default_utilization, **record.flags}
    requested, total = record.facts.get("requested_bytes"), record.facts.get("total_bytes")
    if "gpu_memory_utilization" not in record.flags and requested and total:
        settings["gpu_memory_utilization"] = min(1.0, round(requested / total, 3))
    return EngineConfig(**settings)


def calibration_of(record: LogRecord, found: MemoryPlan) -> Calibration:
    """The calibration that makes `found`, the plan of the log's own flags, agree with the log.

    Parts that the log does not print, or that are off by more than a factor of five, leave their formula in force.
    """
    facts, parts = record.facts, found.breakdown
    total = facts.get("total_bytes")
    free = facts.get("free_bytes")
    outside = total - free if total and free and total > free else facts.get("outside_bytes")
    version = f"vLLM {record.version}" if record.version else "vLLM"
    return Calibration(
        weights_factor=_factor(facts.get("weights_bytes"), parts.weights_bytes),
        activation_factor=_factor(facts.get("activation_bytes"), parts.activation_bytes),
        graphs_factor=_factor(facts.get("cuda_graphs_bytes"), parts.cuda_graphs_bytes),
        non_torch_bytes=facts.get("non_torch_bytes"),
        total_bytes=total,
        outside_bytes=outside,
        source=f"a log of {version}{_of_model(record)}",
    )


def _of_model(record: LogRecord) -> str:
    return f" with {plain(record.model, 80)}" if record.model else ""


def _factor(observed: Any, predicted: int) -> float:
    if not observed or predicted <= 0:
        return 1.0
    factor = observed / predicted
    return factor if PLAUSIBLE[0] <= factor <= PLAUSIBLE[1] else 1.0
