"""Facts: models, cards, knobs and traffic. Names load on first use, so that importing this costs nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from labkit.lazy import lazy_attribute

if TYPE_CHECKING:
    from labkit.specs.config_fields import read_config_file, strip_unsafe
    from labkit.specs.datasets import dataset_names, datasets_folder
    from labkit.specs.engine_config import EngineConfig, Knob
    from labkit.specs.gpu_catalogue import cpu_gpu, gpu_names
    from labkit.specs.gpu_loading import load_gpu
    from labkit.specs.gpu_spec import GpuSpec
    from labkit.specs.model_catalogue import model_names
    from labkit.specs.model_config import model_from_config
    from labkit.specs.model_loading import load_model
    from labkit.specs.model_spec import LayerSpec, ModelSpec, MoeSpec, RopeSpec, StateSpec, WeightFormat
    from labkit.specs.nvml import read_gpus
    from labkit.specs.presets import Preset, get_preset, name_of, preset, preset_names, preset_traffic
    from labkit.specs.prompts import prompt_token_ids
    from labkit.specs.synthetic import synthetic_workload
    from labkit.specs.workload import RequestSpec, Workload
    from labkit.specs.workload_loading import load_workload

_HOMES = {
    "EngineConfig": "engine_config", "Knob": "engine_config", "GpuSpec": "gpu_spec", "LayerSpec": "model_spec",
    "ModelSpec": "model_spec", "MoeSpec": "model_spec", "RequestSpec": "workload", "RopeSpec": "model_spec",
    "StateSpec": "model_spec", "WeightFormat": "model_spec", "Workload": "workload", "cpu_gpu": "gpu_catalogue",
    "dataset_names": "datasets", "datasets_folder": "datasets", "gpu_names": "gpu_catalogue",
    "load_gpu": "gpu_loading", "load_model": "model_loading", "load_workload": "workload_loading",
    "model_from_config": "model_config", "model_names": "model_catalogue", "name_of": "presets", "preset": "presets",
    "Preset": "presets", "get_preset": "presets", "preset_names": "presets", "preset_traffic": "presets",
    "prompt_token_ids": "prompts", "read_config_file": "config_fields",
    "read_gpus": "nvml", "strip_unsafe": "config_fields", "synthetic_workload": "synthetic",
}  # fmt: skip
__all__ = [
    "EngineConfig", "GpuSpec", "Knob", "LayerSpec", "ModelSpec", "MoeSpec", "Preset", "RequestSpec", "RopeSpec",
    "StateSpec", "WeightFormat", "Workload", "cpu_gpu", "dataset_names", "datasets_folder", "get_preset", "gpu_names",
    "load_gpu", "load_model", "load_workload", "model_from_config", "model_names", "name_of", "preset", "preset_names",
    "preset_traffic", "prompt_token_ids",
    "read_config_file", "read_gpus", "strip_unsafe", "synthetic_workload",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    return lazy_attribute(__name__, _HOMES, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
