"""Runs, sweeps, the worker process and the run store. Names load on first use."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from labkit.lazy import lazy_attribute

if TYPE_CHECKING:
    from labkit.experiments.export import export_json, export_parquet, import_json
    from labkit.experiments.grid_sweep import sweep
    from labkit.experiments.lab_session import LabSession
    from labkit.experiments.run import RunOptions
    from labkit.experiments.runner import LocalRunner, Runner
    from labkit.experiments.store import RunStore, RunWriter, StoredRun
    from labkit.experiments.worker import Worker

_PLACES = MappingProxyType(
    {
        "LabSession": "lab_session",
        "LocalRunner": "runner",
        "RunOptions": "run",
        "RunStore": "store",
        "RunWriter": "store",
        "Runner": "runner",
        "StoredRun": "store",
        "Worker": "worker",
        "export_json": "export",
        "export_parquet": "export",
        "import_json": "export",
        "sweep": "grid_sweep",
    }
)
__all__ = [
    "LabSession",
    "LocalRunner",
    "RunOptions",
    "RunStore",
    "RunWriter",
    "Runner",
    "StoredRun",
    "Worker",
    "export_json",
    "export_parquet",
    "import_json",
    "sweep",
]


def __getattr__(name: str) -> Any:
    return lazy_attribute(__name__, _PLACES, name)
