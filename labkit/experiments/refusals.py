"""Why a card's plan cannot serve, in the four parts of an error."""

from __future__ import annotations

from labkit.errors import DoesNotFitError
from labkit.format import count
from labkit.memory.questions import Question, smallest_utilization
from labkit.memory.records import MemoryPlan
from labkit.specs.engine_config import HIGHEST_UTILIZATION
from labkit.text import plain


def does_not_fit(plan: MemoryPlan) -> DoesNotFitError:
    """Why a card's plan cannot serve, with the largest request that it could, or the utilization that would do."""
    largest = plan.max_model_len_that_fits
    utilization = None if largest else _enough_utilization(plan)
    if utilization is not None:
        works, knob = f"gpu_memory_utilization = {utilization:g}", "gpu_memory_utilization"
    elif largest > 0:
        works, knob = f"max_model_len = {largest}", "max_model_len"
    else:
        works, knob = "more cards, smaller weights or a larger card", "tensor_parallel_size"
    return DoesNotFitError(
        f"{plain(plan.model.name, 60)} does not fit {plain(plan.gpu.name, 60)}: {plan.binding_limit}",
        needed=f"{count(plan.config.max_model_len)} tokens of KV cache for one request",
        available=f"{count(plan.kv_cache_tokens)} tokens",
        works=works,
        knob=knob,
    )


def _enough_utilization(plan: MemoryPlan) -> float | None:
    if plan.gpu.is_cpu:
        return None
    found = smallest_utilization(Question(plan.model, plan.gpu, plan.config, plan.engine, plan.engine_version))
    return found if found is not None and found <= HIGHEST_UTILIZATION else None
