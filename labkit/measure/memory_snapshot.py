"""The measured memory breakdown of a run, in the planner's parts."""

from __future__ import annotations

from collections.abc import Mapping

from labkit.errors import OutOfRangeError
from labkit.measure.run_record import StepRow
from labkit.memory.records import PARTS, MemoryBreakdown, MemoryPlan
from labkit.text import plain


def measured_breakdown(
    parts: Mapping[str, int], plan: MemoryPlan, fullest_step: StepRow | None = None
) -> MemoryBreakdown:
    """The breakdown of what `engine.memory_parts()` found; its parts sum to the plan's total to the byte.

    Args:
        parts: part → measured bytes, names of `PARTS`; "free" is what is left and is ignored.
        plan: of the run; gives the total, and the bytes of a block and a token.
        fullest_step: the step with the most blocks in use, for what was reserved and what held a token.

    Raises:
        OutOfRangeError: an unknown part or a negative number.
    """
    for part, num_bytes in parts.items():
        if part not in PARTS or num_bytes < 0:
            raise OutOfRangeError(
                f"{plain(part, 40)} = {plain(num_bytes, 40)} is no measured memory part", works=", ".join(PARTS)
            )
    reserved = stored = None
    if fullest_step is not None:
        reserved = fullest_step.num_blocks_used * plan.block_bytes
        stored = fullest_step.num_tokens_stored * plan.block_bytes // plan.config.block_size
    fields = {f"{part}_bytes": int(num_bytes) for part, num_bytes in parts.items() if part != "free"}
    return MemoryBreakdown(
        kind="measured",
        total_bytes=plan.breakdown.total_bytes,
        kv_reserved_bytes=reserved,
        kv_stored_bytes=stored,
        **fields,  # type: ignore[arg-type]
    )
