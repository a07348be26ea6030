"""`Verdict`: a tuning guide's claim, what came out when it was put to the test, and how to test it again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from textwrap import fill, indent
from typing import Any, Literal

from labkit.experiments.virtual_run import VirtualOptions, simulate
from labkit.measure.run_record import RunRecord
from labkit.measure.summary import RunSummary, summarize
from labkit.memory import plan
from labkit.memory.records import MemoryPlan
from labkit.specs import load_gpu, load_model, synthetic_workload
from labkit.specs.engine_config import EngineConfig
from labkit.specs.workload import Workload

# As wide as a narrow terminal shows.
_WIDTH = 78
Word = Literal["holds", "wrong", "depends", "not tested"]
Method = Literal[
    "plan", "simulation", "counters, simulated", "rules of vLLM", "timing on this CPU", "measured on a card"
]


@dataclass(frozen=True)
class Verdict:
    """What a claim is worth.

    Attributes:
        claim: id, C01 to C30. statement: the claim. verdict: one word.
        numbers: what was computed, name with unit → value, in order.
        conditions: when it turns, or why it was not tested.
        how_to_rerun: a command. method: how the numbers were got.
    """

    claim: str
    statement: str
    verdict: Word
    numbers: Mapping[str, float | str]
    conditions: str
    method: Method
    how_to_rerun: str

    def text(self) -> str:
        """A few lines for a terminal or a notebook, none wider than both show."""
        lines = [f"{self.claim} {self.verdict.upper()} ({self.method}): {self.statement}"]
        lines += [
            f"{name}: {value if isinstance(value, str) else f'{value:g}'}" for name, value in self.numbers.items()
        ]
        lines += [self.conditions, f"again: {self.how_to_rerun}"]
        first, *others = (fill(line, _WIDTH - 4, break_on_hyphens=False) for line in lines)
        return "\n".join([first, *(indent(text, "    ") for text in others)])

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**self.__dict__, "numbers": dict(self.numbers)}


def judged(
    claim: str,
    statement: str,
    verdict: Word,
    numbers: Mapping[str, float | str],
    conditions: str,
    method: Method = "plan",
) -> Verdict:
    """A verdict with numbers of four digits and the command that makes it again."""
    shown = {name: value if isinstance(value, str) else float(f"{value:.4g}") for name, value in numbers.items()}
    return Verdict(claim, statement, verdict, shown, conditions, method, f"labkit claims {claim}")


@lru_cache(maxsize=256)
def _plan(model: str, gpu: str, knobs: tuple[tuple[str, Any], ...]) -> MemoryPlan:
    return plan(load_model(model), load_gpu(gpu), EngineConfig(**dict(knobs)), engine="vllm")


def planned(model: str, gpu: str, **knobs: Any) -> MemoryPlan:
    """vLLM's memory plan."""
    return _plan(model, gpu, tuple(sorted(knobs.items())))


def burst(num_requests: int, input_tokens: int, output_tokens: int) -> Workload:
    """Requests of equal lengths, all at once."""
    return synthetic_workload(num_requests, input_lengths=input_tokens, output_lengths=output_tokens, seed=7)


def served(model: str, gpu: str, traffic: Workload, *, at_once: bool = True, **knobs: Any) -> RunRecord:
    """The traffic on a virtual card under vLLM's rules."""
    options = VirtualOptions(arrival_scale=0.0 if at_once else 1.0, has_server=not at_once)
    return simulate(load_model(model), load_gpu(gpu), traffic, EngineConfig(**knobs), options=options)


def summed(model: str, gpu: str, traffic: Workload, **settings: Any) -> RunSummary:
    """The summary of `served`."""
    return summarize(served(model, gpu, traffic, **settings))
