"""Checks of environment, cards, model folder, error text and configuration, each with its cause and its cure."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from labkit.lazy import lazy_attribute

_PLACES = MappingProxyType(
    {
        "Check": "check",
        "Examination": "check",
        "FixedMachine": "machine",
        "Machine": "machine",
        "Request": "run",
        "doctor": "run",
        "examine": "run",
        "examine_folder": "model_folder",
        "explain_error_text": "error_text",
        "find_vllm": "which_vllm",
        "run_preflight": "preflight",
        "run_true_test": "true_test",
        "write_missing": "tokenizer_files",
    }
)
__all__ = list(_PLACES)


def __getattr__(name: str) -> Any:
    return lazy_attribute(__name__, _PLACES, name)
