"""The panel in the notebook: widgets that read and set values; all work happens in the rooms below."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from labkit.lazy import lazy_attribute

_PLACES = MappingProxyType(
    {
        "BlockSizeExperiment": "experiment",
        "KernelLab": "kernel_lab",
        "Panel": "panel",
        "PasteBox": "paste_box",
        "bench_panel": "bench",
        "doctor_panel": "doctor",
        "progress": "notebook",
        "text_table": "notebook",
    }
)
__all__ = [
    "BlockSizeExperiment", "KernelLab", "Panel", "PasteBox", "bench_panel", "doctor_panel", "progress", "text_table",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    return lazy_attribute(__name__, _PLACES, name)
