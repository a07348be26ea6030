"""From blocks to what an engine prints: tokens, concurrency, the longest request, and the fit check."""

from __future__ import annotations

import math
from dataclasses import dataclass

from labkit.memory.records import Verdict
from labkit.memory.rules import VersionRules
from labkit.memory.stages import RankPlan
from labkit.specs.engine_config import EngineConfig


@dataclass(frozen=True)
class Capacity:
    """What the pool holds.

    Attributes:
        num_blocks: the smallest number over the ranks, vLLM's null block included.
        tokens: "GPU KV cache size" as that version prints it.
        concurrency: "Maximum concurrency" as that version prints it.
        needed_bytes: of one request of max_model_len on the binding rank.
        available_bytes: what the fit check compares it with.
        largest_length: the longest request that passes the fit check.
    """

    num_blocks: int
    tokens: int
    concurrency: float
    needed_bytes: int
    available_bytes: int
    largest_length: int

    @property
    def margin_bytes(self) -> int:
        """Bytes beyond the need of one longest request."""
        return self.available_bytes - self.needed_bytes


def binding_rank(ranks: list[RankPlan]) -> int:
    """Index of the rank that holds the fewest blocks."""
    with_cache = [index for index, rank in enumerate(ranks) if rank.layout.block_bytes]
    return min(with_cache, key=lambda index: ranks[index].num_blocks, default=0)


def capacity_of(rank: RankPlan, num_blocks: int, config: EngineConfig, rules: VersionRules, upper: int) -> Capacity:
    """The capacity of `num_blocks` blocks laid out as on the binding rank; `upper` bounds the longest request."""
    length, layout = config.max_model_len or 1, rank.layout
    if not layout.block_bytes:
        return Capacity(0, 0, 0.0, 0, max(0, rank.available_kv_bytes), upper)
    per_request = layout.blocks_per_request(length)
    if rules.concurrency == "tokens":
        concurrency = num_blocks * layout.min_block_tokens / length
    else:
        concurrency = num_blocks / per_request
    available = rank.available_kv_bytes
    if config.num_gpu_blocks_override is not None:
        available = num_blocks * layout.block_bytes
    if rules.check_less_null_block:
        available -= layout.block_bytes
    return Capacity(
        num_blocks=num_blocks,
        tokens=_printed_tokens(layout.min_block_tokens, len(layout.groups), num_blocks, concurrency, length, rules),
        concurrency=concurrency,
        needed_bytes=per_request * layout.block_bytes,
        available_bytes=available,
        largest_length=layout.largest_length(max(0, available // layout.block_bytes), upper),
    )


def _printed_tokens(
    block_tokens: int, num_groups: int, num_blocks: int, concurrency: float, length: int, rules: VersionRules
) -> int:
    if rules.printed_tokens == "concurrency":
        return int(concurrency * length)
    if rules.printed_tokens == "groups":
        return num_blocks // num_groups * block_tokens
    return num_blocks * block_tokens


def stated_room_bytes(rank: RankPlan, config: EngineConfig, num_blocks: int) -> int | None:
    """Bytes of the card that a pool of stated size and the other parts leave, negative where they take more than there
    is; None where utilization sizes the pool, which then cannot overrun."""
    if config.num_gpu_blocks_override is None and config.kv_cache_memory_bytes is None:
        return None
    parts = rank.outside_bytes + rank.weights_bytes + rank.activation_bytes + rank.non_torch_bytes
    parts += rank.cuda_graphs_bytes + rank.tables_bytes
    return rank.total_bytes - parts - num_blocks * rank.layout.block_bytes


def judge_stated(rank: RankPlan, config: EngineConfig, num_blocks: int) -> Verdict:
    """Whether the card holds a pool of stated size: neither engine checks that before it allocates."""
    room = stated_room_bytes(rank, config, num_blocks)
    spread = math.hypot(*(size for part, size in rank.uncertainty_bytes.items() if part != "kv_cache"))
    return "fits" if room is None else judge(room, round(spread))


def judge(margin_bytes: int, uncertainty_bytes: int) -> Verdict:
    """ "fits" and "does not fit" only where the margin is beyond the uncertainty."""
    if margin_bytes < -uncertainty_bytes:
        return "does not fit"
    return "fits" if margin_bytes >= uncertainty_bytes else "may not fit"
