"""`MeasuredMemory`: what the memory of one run of labkit's engine says about the pools of others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from labkit.memory import Calibration
from labkit.memory.records import MemoryPlan


@dataclass(frozen=True)
class MeasuredMemory:
    """The parts that a run on a card measured.

    Attributes:
        parts: part → bytes, as `Engine.memory_parts` gives them.
        max_num_batched_tokens: of that run.
    """

    parts: Mapping[str, int]
    max_num_batched_tokens: int

    def calibration(self, planned: MemoryPlan) -> Calibration:
        """What the planner is to multiply its parts by under the configuration of `planned`.

        The activation peak goes with the tokens of a step, and the graphs hold one such peak beside what is their own.
        """
        predicted = planned.breakdown.parts()
        tokens = int(planned.config.max_num_batched_tokens or 1)
        activation = self.parts.get("activation", 0)
        grown = activation * tokens / self.max_num_batched_tokens
        graphs = self.parts.get("cuda_graphs", 0)
        expected = {
            "weights": float(self.parts.get("weights", 0)), "activation": grown,
            "cuda_graphs": max(0.0, graphs - activation) + grown if graphs > activation else float(graphs),
        }  # fmt: skip

        def factor(part: str) -> float:
            return expected[part] / predicted[part] if expected[part] and predicted[part] else 1.0

        return Calibration(
            weights_factor=factor("weights"), activation_factor=factor("activation"),
            graphs_factor=factor("cuda_graphs"), non_torch_bytes=self.parts.get("workspace"),
            source="a run of labkit's engine",
        )  # fmt: skip


def memory_of(parts: Mapping[str, int], plan: MemoryPlan) -> MeasuredMemory:
    """The measured parts of a run under `plan`."""
    return MeasuredMemory(dict(parts), int(plan.config.max_num_batched_tokens or 1))
