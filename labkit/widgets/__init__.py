"""The panel in the notebook: widgets that read and set values; all work happens in the rooms below."""

from __future__ import annotations

from typing import Any

__all__ = ["BlockSizeExperiment", "KernelLab", "LogBox", "Panel", "bench_panel", "doctor_panel"]


def __getattr__(name: str) -> Any:
    if name == "Panel":
        from labkit.widgets.panel import Panel

        return Panel
    if name == "BlockSizeExperiment":
        from labkit.widgets.experiment import BlockSizeExperiment

        return BlockSizeExperiment
    if name == "KernelLab":
        from labkit.widgets.kernel_lab import KernelLab

        return KernelLab
    if name == "LogBox":
        from labkit.widgets.log_box import LogBox

        return LogBox
    if name == "bench_panel":
        from labkit.widgets.bench import bench_panel

        return bench_panel
    if name == "doctor_panel":
        from labkit.widgets.doctor import doctor_panel

        return doctor_panel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
