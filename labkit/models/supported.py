"""Which models labkit's decoder runs; without torch, so that a refusal costs nothing."""

from __future__ import annotations

from labkit.errors import UnsupportedError
from labkit.memory.supported import decoder_lacks
from labkit.specs.model_spec import ModelSpec


def check_supported(spec: ModelSpec) -> None:
    """Say what of `spec` this network lacks.

    Raises:
        UnsupportedError: with all of it in one message.
    """
    lacks = decoder_lacks(spec)
    if lacks:
        raise UnsupportedError(
            f"labkit's decoder does not run {spec.model_type}: it lacks {', '.join(lacks)}; its memory can be planned",
            works="Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE, Gemma 2, Gemma 3",
        )
