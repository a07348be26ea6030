"""Networks, weights and tokenizers; everything that needs torch is imported when it is first used."""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import Any

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
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
