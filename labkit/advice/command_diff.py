"""`diff_commands`: two commands side by side, and what each difference does by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from labkit.advice.serve_command import ServeCommand
from labkit.advice.speed import Speed, speed_of
from labkit.errors import LabkitError, UnknownNameError
from labkit.format import count, number, rate, share
from labkit.memory import plan as make_plan
from labkit.memory.records import MemoryPlan
from labkit.specs import load_model
from labkit.specs.engine_config import EngineConfig
from labkit.specs.gpu_spec import GpuSpec
from labkit.specs.workload import Workload
from labkit.text import plain


@dataclass(frozen=True)
class Difference:
    """One difference, applied to the first command by itself.

    Attributes:
        what: the flag, "model" or "vLLM".
        before, after: its values in the two commands.
        effect: what it does to the KV cache, and to the rate where there is traffic; or why it cannot be planned.
        meaning: what the flag is for.
    """

    what: str
    before: str
    after: str
    effect: str
    meaning: str


@dataclass(frozen=True)
class CommandDiff:
    """Two commands on one card.

    Attributes:
        plans: of the first and of the second.
        differences: one a flag; their effects need not add up.
        sentence: all of them together.
    """

    plans: tuple[MemoryPlan, MemoryPlan]
    differences: tuple[Difference, ...]
    sentence: str

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "sentence": self.sentence,
            "kv_cache_tokens": [plan.kv_cache_tokens for plan in self.plans],
            "max_concurrency": [plan.max_concurrency for plan in self.plans],
            "verdict": [plan.verdict for plan in self.plans],
            "differences": [vars(entry) for entry in self.differences],
        }


def plan_command(command: ServeCommand, gpu: GpuSpec) -> MemoryPlan:
    """The memory plan of a command by its own vLLM version's rules.

    Raises:
        UnknownNameError: the command names no model, or one that is not known.
    """
    if not command.model:
        raise UnknownNameError("the command names no model", works="vllm serve Qwen/Qwen3-8B …", knob="model")
    return make_plan(
        load_model(command.model), gpu, command.config, engine="vllm", engine_version=command.version
    )  # fmt: skip


def diff_commands(
    first: ServeCommand, second: ServeCommand, gpu: GpuSpec, traffic: Workload | None = None
) -> CommandDiff:
    """What the differences between two commands do on `gpu`, each by itself and all together.

    Args:
        traffic: simulated with each, for the rate; None for memory alone.

    Raises:
        UnknownNameError: a command names no model, or one that is not known.
    """
    speeds: dict[int, Speed | None] = {}

    def speed(plan: MemoryPlan) -> Speed | None:
        if traffic is None or plan.verdict == "does not fit":
            return None
        if id(plan) not in speeds:
            speeds[id(plan)] = speed_of(plan, traffic)
        return speeds[id(plan)]

    before, after = plan_command(first, gpu), plan_command(second, gpu)
    found = []
    for what, old, new, meaning, changed in _steps(first, second):
        try:
            effect = _effect(before, plan_command(changed, gpu), speed)
        except LabkitError as error:
            effect = f"not by itself: {error.message}"
        found.append(Difference(what, old, new, effect, meaning))
    if not found:
        return CommandDiff((before, after), (), "Both commands mean the same to the memory and the scheduler.")
    together = f"All together on {plain(gpu.name, 60)}: {_effect(before, after, speed)}."
    return CommandDiff((before, after), tuple(found), together)


def _steps(first: ServeCommand, second: ServeCommand) -> Iterator[tuple[str, str, str, str, ServeCommand]]:
    """Each difference with the first command that has only this one changed."""
    if load_model(first.model) != load_model(second.model):
        changed = replace(first, model=second.model)
        yield "model", first.model, second.model, "Other weights and another KV layout.", changed
    if first.version != second.version:
        text = "Each version has its own defaults and its own arithmetic of the budget."
        yield "vLLM", first.version, second.version, text, replace(first, version=second.version)
    knobs = {knob.name: knob for knob in EngineConfig.knobs()}
    for name, (old, new) in first.config.differences(second.config).items():
        knob = knobs[name]
        changed = replace(first, config=first.config.replace(**{name: new}))
        yield knob.flag or name, _word(old), _word(new), knob.help.split(". ")[0].rstrip(".") + ".", changed


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "default" if value is None else str(value)


def _effect(before: MemoryPlan, after: MemoryPlan, speed: Callable[[MemoryPlan], Speed | None]) -> str:
    """The change from one plan to the other in words."""
    parts = [] if before.verdict == after.verdict else [f"{before.verdict} → {after.verdict}"]
    old, new = before.kv_cache_tokens, after.kv_cache_tokens
    if old == new:
        parts.append(f"the same {count(old)} KV tokens")
    else:
        percent = f" ({'+' if new > old else '−'}{share(abs(new - old), old)})" if old else ""
        parts.append(f"KV tokens {count(old)} → {count(new)}{percent}")
    lengths = tuple(dict.fromkeys(plan.config.max_model_len for plan in (before, after)))
    if before.max_concurrency != after.max_concurrency:
        of = f"requests of {' and '.join(count(length) for length in lengths)} tokens"
        parts.append(f"{of} at once {number(before.max_concurrency)} → {number(after.max_concurrency)}")
    slow, fast = speed(before), speed(after)
    if slow is not None and fast is not None:
        parts.append(f"at most {number(slow.rate)} → {rate(fast.rate, fast.unit)} ({fast.basis})")
    return "; ".join(parts)
