"""What one step up or down of a knob would buy, in KV memory, tokens and requests; and what each knob means now."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from labkit import format as fmt
from labkit.errors import LabkitError
from labkit.memory.records import MemoryPlan
from labkit.specs.engine_config import EngineConfig, Knob

PlanOf = Callable[[EngineConfig], MemoryPlan]
_FRACTION_STEPS = {"gpu_memory_utilization": 0.01, "cpu_memory_gib": None, "swap_space": 1.0}


@dataclass(frozen=True)
class StepGain:
    """The plan after one step of a knob, as differences to the plan before it.

    Attributes:
        direction: "down" or "up". value: what the knob becomes.
        kv_bytes, kv_tokens, requests: growth, negative for a loss; 0 where the step is refused.
        verdict: of the plan after the step. refused: why there is no such plan, in words.
    """

    direction: str
    value: Any
    kv_bytes: int = 0
    kv_tokens: int = 0
    requests: float = 0.0
    verdict: str = ""
    refused: str = ""

    @property
    def words(self) -> str:
        """The gain in one line: "▲ 32: +12.0 MiB KV, +2,048 tokens"."""
        mark = "▲" if self.direction == "up" else "▼"
        head = f"{mark} {shown(self.value)}: "
        if self.refused:
            return head + self.refused
        if self.verdict == "does not fit":
            return head + "does not fit"
        if not self.kv_bytes and not self.kv_tokens and abs(self.requests) < 0.1:
            return head + "same KV"
        parts = [f"{_signed(self.kv_bytes, fmt.memory)} KV"] if self.kv_bytes else []
        parts += [f"{_signed(self.kv_tokens, fmt.count)} tokens"] if self.kv_tokens else []
        parts += [f"{_signed(self.requests, fmt.number)} requests"] if abs(self.requests) >= 0.1 else []
        return head + ", ".join(parts)


def _signed(value: float, show: Callable[[float], str]) -> str:
    return f"{'+' if value > 0 else '−'}{show(abs(value))}"


def shown(value: Any) -> str:
    """A knob's value as the panel and the run table write it."""
    if value is None:
        return "auto"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int):
        return fmt.count(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def neighbours(knob: Knob, value: Any) -> dict[str, Any]:
    """The values one step below and above, by "down" and "up": powers of two for whole numbers, the next choice for
    names; a direction that leaves the knob's range is missing."""
    found: dict[str, Any] = {}
    if knob.kind is bool:
        found["down" if value else "up"] = not value
    elif knob.choices:
        at = knob.choices.index(value)
        found |= {"down": knob.choices[at - 1]} if at else {}
        found |= {"up": knob.choices[at + 1]} if at + 1 < len(knob.choices) else {}
    elif value is not None and knob.kind in (int, float):
        found = _numbers(knob, value)
    return {name: entry for name, entry in found.items() if _allowed(knob, entry)}


def _numbers(knob: Knob, value: Any) -> dict[str, Any]:
    if knob.kind is int:
        power = 1 << (int(value).bit_length() - 1)
        return {"down": power if power < value else power // 2, "up": power * 2}
    step = _FRACTION_STEPS.get(knob.name)
    if step is None:
        return {"down": value / 2, "up": value * 2}
    return {"down": round(value - step, 4), "up": round(value + step, 4)}


def _allowed(knob: Knob, value: Any) -> bool:
    try:
        knob.check(value)
    except LabkitError:
        return False
    return True


def get_next_steps_info(knob: Knob, plan: MemoryPlan, config: EngineConfig, plan_of: PlanOf) -> tuple[StepGain, ...]:
    """The step down and the step up of `knob` from the resolved value in `plan`, planned with `plan_of`.

    Args:
        config: what the user set, None where left to the rules; `plan` is its plan.
    """
    steps = []
    for direction, value in neighbours(knob, getattr(plan.config, knob.name)).items():
        if value == getattr(config, knob.name):
            continue
        try:
            after = plan_of(config.replace(**{knob.name: value}))
        except LabkitError as error:
            steps.append(StepGain(direction, value, refused=error.message))
            continue
        steps.append(
            StepGain(
                direction,
                value,
                after.breakdown.kv_cache_bytes - plan.breakdown.kv_cache_bytes,
                after.kv_cache_tokens - plan.kv_cache_tokens,
                after.max_concurrency - plan.max_concurrency,
                after.verdict,
            )
        )
    return tuple(steps)


_FORMULA_OF_KNOB = {
    "max_num_batched_tokens": "activation",
    "max_num_seqs": "block_tables",
    "block_size": "kv_cache",
    "kv_cache_dtype": "kv_cache",
    "max_model_len": "kv_cache",
    "enforce_eager": "cuda_graphs",
    "dtype": "weights",
    "quantization": "weights",
}


def help_lines(knob: Knob, plan: MemoryPlan | None) -> tuple[str, ...]:
    """Meaning, vLLM's flag and default, the allowed range, and the formula with the plan's own numbers."""
    default = shown(getattr(EngineConfig(), knob.name))
    lines = [knob.help]
    flag = f"vLLM: {knob.flag}, default {default}" if knob.flag else f"vLLM has no such flag; default here {default}"
    lines.append(f"{flag}.")
    if knob.choices:
        lines.append(f"One of {', '.join(knob.choices)}.")
    elif knob.minimum is not None:
        most = f" to {shown(knob.maximum)}" if knob.maximum is not None else " or more"
        typed = " As in vLLM, 8k is 8,000 and 8K is 8,192." if knob.kind is int and knob.unit == "tokens" else ""
        lines.append(f"Allowed: {shown(knob.minimum)}{most} {knob.unit}.".replace(" .", ".") + typed)
    part = _FORMULA_OF_KNOB.get(knob.name, "")
    if plan is not None and part in plan.formulas:
        lines.append(f"Now: {plan.formulas[part]}.")
    return tuple(lines)
