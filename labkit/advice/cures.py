"""`cures`: the smallest changes with which a plan that does not fit, or is not sure to, would."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from labkit.advice.advise import advise, replan
from labkit.advice.rules import sure_length
from labkit.errors import LabkitError
from labkit.format import count
from labkit.memory.explain import MADE_BEFOREHAND
from labkit.memory.log_explanation import Cure
from labkit.memory.records import MemoryPlan
from labkit.specs.engine_config import EngineConfig, Knob

MOST_CARDS = 16


def cures(plan: MemoryPlan) -> tuple[Cure, ...]:
    """What would make `plan` fit, one change first; where none does, cards and a length together.

    Empty where `plan` fits, where no setting makes it sure, and where not even `MOST_CARDS` cards hold the weights.
    """
    if plan.verdict == "fits":
        return ()
    single = tuple(_cure(item.changes, item.plan) for item in advise(plan) if item.cures)
    return single or (tuple(_on_more_cards(plan))[:1] if plan.verdict == "does not fit" else ())


def _on_more_cards(plan: MemoryPlan) -> Iterator[Cure]:
    what_if = replan(plan)
    num_cards = 2 * plan.config.tensor_parallel_size
    while num_cards <= MOST_CARDS:
        changes: dict[str, Any] = {"tensor_parallel_size": num_cards}
        try:
            found = what_if(plan.config.replace(**changes))
            for shorter in (lambda plan: plan.max_model_len_that_fits, sure_length):
                if found.verdict != "fits" and shorter(found) > 0:
                    changes["max_model_len"] = shorter(found)
                    found = what_if(plan.config.replace(**changes))
            if found.verdict != "does not fit":
                yield _cure(changes, found)
        # A head count that the cards do not divide is only not a cure.
        except LabkitError:
            pass
        num_cards *= 2


def _cure(changes: Mapping[str, Any], plan: MemoryPlan) -> Cure:
    knobs = {knob.name: knob for knob in EngineConfig.knobs()}
    flags = " ".join(_flag_text(knobs[name], value) for name, value in changes.items())
    tokens, longest = count(plan.kv_cache_tokens), count(plan.config.max_model_len)
    return Cure(changes, f"{flags}: {plan.verdict} then, {tokens} tokens of KV for requests of at most {longest}")


def _flag_text(knob: Knob, value: Any) -> str:
    """A change as it is typed: "--enforce-eager", "--max-model-len 4096", "no --num-gpu-blocks-override"."""
    flag = knob.flag or f"--{knob.name.replace('_', '-')}"
    if value is None:
        return f"no {flag}"
    if isinstance(value, bool):
        return flag if value else f"--no-{flag.removeprefix('--')}"
    return (
        f"a copy of the model made for {flag} {value}" if needs_other_files({knob.name: value}) else f"{flag} {value}"
    )


def needs_other_files(changes: Mapping[str, Any]) -> bool:
    """Whether `changes` ask for weights in a format that is made beforehand, so for a copy of a 16-bit model."""
    return changes.get("quantization") in MADE_BEFOREHAND
