"""Why a card's plan cannot serve, in the four parts of an error."""

from __future__ import annotations

from labkit.errors import DoesNotFitError
from labkit.format import count
from labkit.memory.records import MemoryPlan
from labkit.text import plain


def does_not_fit(plan: MemoryPlan) -> DoesNotFitError:
    """Why a card's plan cannot serve, with the largest request that it could."""
    largest = plan.max_model_len_that_fits
    return DoesNotFitError(
        f"{plain(plan.model.name, 60)} does not fit {plain(plan.gpu.name, 60)}: {plan.binding_limit}",
        needed=f"{count(plan.config.max_model_len)} tokens of KV cache for one request",
        available=f"{count(plan.kv_cache_tokens)} tokens",
        works=f"max_model_len = {largest}" if largest > 0 else "more cards, smaller weights or a larger card",
        knob="max_model_len" if largest > 0 else "tensor_parallel_size",
    )
