"""`MeasuredMemory`: what the memory of one run of labkit's engine says about the pools of others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from labkit.memory import Calibration
from labkit.memory.records import MemoryPlan


@dataclass(frozen=True)
class MeasuredMemory:
    """The parts that a run on a card measured, beside those that were planned for it.

    Attributes:
        factors: part → measured bytes over planned ones, of the parts that the planner counts by formula.
        workspace_bytes: what libraries held beside them; None where it was not measured.
    """

    factors: Mapping[str, float]
    workspace_bytes: int | None = None

    def calibration(self) -> Calibration:
        """What the planner is to multiply its parts by, for whatever configuration."""
        return Calibration(
            weights_factor=self.factors.get("weights", 1.0), activation_factor=self.factors.get("activation", 1.0),
            graphs_factor=self.factors.get("cuda_graphs", 1.0), non_torch_bytes=self.workspace_bytes,
            source="a run of labkit's engine",
        )  # fmt: skip


def memory_of(parts: Mapping[str, int], plan: MemoryPlan) -> MeasuredMemory:
    """From part → bytes, as `Engine.memory_parts` gives them, of a run under `plan`."""
    planned = plan.breakdown.parts()
    factors = {
        part: parts[part] / planned[part]
        for part in ("weights", "activation", "cuda_graphs")
        if parts.get(part) and planned.get(part)
    }
    return MeasuredMemory(factors, parts.get("workspace"))
