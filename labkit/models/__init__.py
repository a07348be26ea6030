"""Networks, weights and tokenizers; everything that needs torch is imported when it is first used."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from labkit.lazy import lazy_attribute

_PLACES = MappingProxyType(
    {
        "AttentionBackend": "attention",
        "DenseAttention": "attention",
        "Decoder": "decoder",
        "load_model_weights": "loading",
        "load_tokenizer": "tokenizer",
        "Tokenizer": "tokenizer",
        "embed": "embedding",
    }
)
__all__ = list(_PLACES)


def __getattr__(name: str) -> Any:
    return lazy_attribute(__name__, _PLACES, name)
