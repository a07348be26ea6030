"""What a card has, and how many KV blocks are left of the budget once everything else is measured."""

from __future__ import annotations

import dataclasses
import gc
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from labkit.engine.cuda_cache import CacheFormat
from labkit.errors import DoesNotFitError
from labkit.format import memory
from labkit.memory.card_parts import card_parts
from labkit.memory.labkit_rules import pool_bytes
from labkit.memory.records import MemoryPlan


@dataclass(frozen=True)
class CardMemory:
    """One look at a card, in bytes; `other_bytes` is neither free nor torch's: contexts, libraries, other processes."""

    total_bytes: int
    free_bytes: int
    reserved_bytes: int
    allocated_bytes: int

    @property
    def other_bytes(self) -> int:
        """Total less free less what torch reserved."""
        return max(0, self.total_bytes - self.free_bytes - self.reserved_bytes)


def look_at(device: torch.device) -> CardMemory:
    """What the driver and torch say now."""
    free, total = torch.cuda.mem_get_info(device)
    return CardMemory(total, free, torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device))


def give_back(device: torch.device) -> None:
    """Return what torch holds and nobody uses to the driver."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class StepCosts:
    """Measured once for each shape of step.

    Attributes:
        activation_bytes: torch's peak over what was allocated before, in the largest step.
        graphs_bytes: of all captured graphs, from the largest.
        tables_bytes: block tables, inputs, the decode kernel's scratch, the fused kernels' rotary tables.
        captures_largest: the largest step has a graph too, as launching it takes longer than computing it.
    """

    activation_bytes: int = 0
    graphs_bytes: int = 0
    tables_bytes: int = 0
    captures_largest: bool = False


def in_room(plan: MemoryPlan, device: torch.device, call: Callable[[], None]) -> None:
    """`call`, which tries the plan's largest steps and captures them, on a card where something may lie already.

    Raises:
        DoesNotFitError: they take more than is free.
    """
    if device.type != "cuda":
        call()
        return
    try:
        call()
        return
    except torch.OutOfMemoryError:
        pass
    # Here torch's error is gone, and with it all that was tried.
    gc.collect()
    give_back(device)
    room = look_at(device).free_bytes
    raise DoesNotFitError(
        "steps of this plan do not fit beside what this process and others hold of the card",
        needed=f"more than {memory(room)}",
        available=memory(room),
        works=_fewer_tokens(plan, room),
        knob="max_num_batched_tokens",
    )


def _fewer_tokens(plan: MemoryPlan, room: int) -> str:
    """Half the tokens of a step, a quarter, … until its predicted parts lie within `room`."""
    tokens = int(plan.config.max_num_batched_tokens or 1) // 2
    while tokens >= max(1, int(plan.config.max_num_seqs or 1)):
        parts = card_parts(plan.model, plan.gpu, plan.config.replace(max_num_batched_tokens=tokens))
        if parts.tables_bytes + parts.activation_bytes + parts.graphs_charged_bytes <= room:
            return f"max_num_batched_tokens = {tokens}"
        tokens //= 2
    return "a card with more room"


def pool_of(
    plan: MemoryPlan,
    form: CacheFormat,
    card: CardMemory,
    costs: StepCosts,
    *,
    weights: int,
    workspace: int,
    others: int = 0,
) -> tuple[int, int]:
    """KV blocks that fit, and the bytes to hold them in.

    Those are utilization of the card's total, less weights, tables, peak, graphs and workspace.

    As in vLLM the share is of the card's total and what other processes hold is not charged, nor `others`, what other
    engines and tensors of this process have; but that much must be free. How the rest becomes a pool:
    `labkit.memory.labkit_rules.pool_bytes`.

    Raises:
        DoesNotFitError: the card does not have the budget free, or no block fits.
    """
    config = plan.config
    budget = math.ceil(card.total_bytes * config.gpu_memory_utilization)
    within_reach = card.free_bytes + card.reserved_bytes - others + workspace
    used = weights + costs.tables_bytes + workspace + costs.activation_bytes + costs.graphs_bytes
    available = budget - used if config.kv_cache_memory_bytes is None else config.kv_cache_memory_bytes
    if config.num_gpu_blocks_override is not None:
        available = config.num_gpu_blocks_override * form.block_bytes
    needed = min(budget, used + available)
    if needed > within_reach:
        works = math.floor(100 * within_reach / card.total_bytes) / 100
        raise DoesNotFitError(
            "the card does not have the budget free; another process may hold its memory"
            + (f", and this one holds {memory(others)} for something else" if others > needed // 100 else ""),
            needed=memory(needed),
            available=memory(within_reach),
            works=f"gpu_memory_utilization = {works:.2f}",
            knob="gpu_memory_utilization",
        )
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override, form.pool_bytes(config.num_gpu_blocks_override)
    available = pool_bytes(available)
    blocks = form.blocks_in(available)
    if blocks < 1:
        raise DoesNotFitError(
            "no KV block is left beside weights, activations and graphs",
            needed=memory(used + form.block_bytes),
            available=memory(budget),
            knob="gpu_memory_utilization",
        )
    return blocks, available


def with_blocks(plan: MemoryPlan, form: CacheFormat, num_blocks: int, num_swap_blocks: int) -> MemoryPlan:
    """`plan` with the blocks and their bytes that were allocated instead of those that were predicted."""
    tokens = num_blocks * form.block_size
    longest = math.ceil(int(plan.config.max_model_len or 1) / form.block_size)
    return dataclasses.replace(
        plan,
        num_gpu_blocks=num_blocks,
        block_bytes=form.block_bytes,
        num_swap_blocks=num_swap_blocks,
        kv_cache_tokens=tokens,
        max_concurrency=num_blocks / longest,
    )
