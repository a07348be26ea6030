"""labkit: a Jupyter-first laboratory for the memory of LLM serving. Names load on first use."""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from labkit.lazy import lazy_attribute

if TYPE_CHECKING:
    from labkit.experiments.store import RunStore
    from labkit.memory.planner import plan
    from labkit.session import Session
    from labkit.specs.engine_config import EngineConfig
    from labkit.specs.gpu_loading import load_gpu
    from labkit.specs.model_loading import load_model
    from labkit.specs.workload_loading import load_workload

_PLACES = MappingProxyType(
    {
        "EngineConfig": "specs",
        "RunStore": "experiments",
        "Session": "session",
        "load_gpu": "specs",
        "load_model": "specs",
        "load_workload": "specs",
        "plan": "memory",
    }
)
# Rooms that a notebook asks for by name: `labkit.widgets.doctor_panel()` without an import of its own.
_ROOMS = frozenset({"advice", "doctor", "figures", "measure", "report", "specs", "widgets"})
__all__ = ["EngineConfig", "RunStore", "Session", "__version__", "load_gpu", "load_model", "load_workload", "plan"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("labkit")
    if name in _ROOMS:
        return import_module(f"{__name__}.{name}")
    return lazy_attribute(__name__, _PLACES, name)


def __dir__() -> list[str]:
    return sorted([*__all__, *_ROOMS])
