"""Which knobs labkit's own engine carries out; without torch, so that a refusal costs nothing."""

from __future__ import annotations

from labkit.errors import UnsupportedError
from labkit.memory.records import MemoryPlan
from labkit.memory.resolve import LABKIT_KV_DTYPES
from labkit.models.quantization import engine_format

CARD_KV_DTYPES = (
    "auto", "float32", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "int8_per_token_head",
    "fp8_per_token_head",
)  # fmt: skip
# Values that the engine does not go beyond: one copy of it, all of whose ranks share every layer.
_ONLY = {"pipeline_parallel_size": 1, "data_parallel_size": 1, "enable_expert_parallel": False}


def check_knobs(plan: MemoryPlan) -> None:
    """Refuse a plan whose knobs the engine would not carry out.

    Raises:
        UnsupportedError: naming every such knob at once.
        OutOfRangeError: a `quantization` that the model's files do not have.
    """
    config = plan.config
    asked = [name for name, value in _ONLY.items() if getattr(config, name) != value]
    if asked:
        named = ", ".join(f"{name} = {getattr(config, name)}" for name in asked)
        raise UnsupportedError(
            f"a run in one worker does not carry out {named}; the memory of it can be planned",
            works=", ".join(f"{name} = {_ONLY[name]}" for name in asked),
            knob=asked[0],
        )
    known = LABKIT_KV_DTYPES if plan.gpu.is_cpu else CARD_KV_DTYPES
    if config.kv_cache_dtype not in known:
        raise UnsupportedError(
            f"labkit's engine does not store KV as {config.kv_cache_dtype}",
            works=", ".join(known),
            knob="kv_cache_dtype",
        )
    engine_format(plan.model, config.quantization, config.load_format)
