"""The start-up runs of real vLLM servers on which the constants are fitted and tested."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any

from labkit.memory.stages import Overrides
from labkit.specs.engine_config import EngineConfig
from labkit.specs.gpu_spec import GpuSpec
from labkit.specs.model_catalogue import catalogue_model
from labkit.specs.model_config import model_from_config
from labkit.specs.model_spec import ModelSpec, WeightFormat

GIB = 2**30
RUN_FILES = ("vllm-0.19-h100-runs.csv", "vllm-0.25-h200-runs.csv")


@dataclass(frozen=True)
class Run:
    """One start of a server: what was asked, and what its log printed, in GiB as printed (two decimals).

    Attributes:
        model_name, family: the row's name, and the shape behind it (for leaving out whole models).
        setting: the flags in which rows of one family differ (for leaving out whole settings).
    """

    version: str
    model_name: str
    family: str
    setting: str
    model: ModelSpec
    gpu: GpuSpec
    config: EngineConfig
    overrides: Overrides
    weights_gib: float
    activation_gib: float
    non_torch_gib: float
    graphs_gib: float | None
    graph_estimate_gib: float | None
    pool_gib: float
    tokens: int
    concurrency: float


@lru_cache(maxsize=1)
def load_runs() -> tuple[Run, ...]:
    """Every row of the two files."""
    folder = resources.files("labkit.memory").joinpath("runs")
    models = json.loads(folder.joinpath("models.json").read_text(encoding="utf-8"))["models"]
    runs = []
    for name in RUN_FILES:
        rows = csv.DictReader(folder.joinpath(name).read_text(encoding="utf-8").splitlines())
        read = _h100_run if "h100" in name else _h200_run
        runs += [read(row, _model(row["model"], models)) for row in rows]
    return tuple(runs)


def _model(name: str, models: dict[str, Any]) -> ModelSpec:
    entry = models[name]
    if "like" in entry:
        entry = models[entry["like"]] | entry
    spec = catalogue_model(entry["catalogue"]) if "catalogue" in entry else model_from_config(entry["config"], name)
    return spec.replace(weight_format=WeightFormat(**entry["weight_format"])) if "weight_format" in entry else spec


def _h100_run(row: dict[str, str], model: ModelSpec) -> Run:
    total = float(row["init_total_memory_gib"])
    quantization = row["quantization"]
    config = EngineConfig(
        max_model_len=int(row["max_model_len"]), max_num_seqs=1024, max_num_batched_tokens=8192,
        gpu_memory_utilization=float(row["gpu_memory_utilization"]), kv_cache_dtype=row["kv_cache_dtype"],
        dtype=row["dtype"].removeprefix("torch."), tensor_parallel_size=int(row["tp"]),
        pipeline_parallel_size=int(row["pp"]), enable_prefix_caching=False,
        quantization=None if quantization in ("None", "compressed-tensors") else quantization,
    )  # fmt: skip
    return Run(
        "0.19.0",
        row["model"],
        model.name,
        f"tp{row['tp']} pp{row['pp']} {row['quantization']}",
        model,
        GpuSpec("H100 SXM", round(total * GIB)),
        config,
        Overrides(free_bytes=round(float(row["init_free_memory_gib"]) * GIB)),
        float(row["weights_memory_gib"]),
        float(row["activation_memory_gib"]),
        float(row["non_torch_forward_gib"]),
        float(row["cuda_graph_actual_gib"]),
        float(row["cuda_graph_estimated_gib"]),
        float(row["kv_cache_memory_gib"]),
        int(row["kv_cache_tokens"]),
        float(row["max_concurrency"]),
    )


def _h200_run(row: dict[str, str], model: ModelSpec) -> Run:
    config = EngineConfig(
        max_model_len=int(row["max_model_len"]), max_num_seqs=int(row["max_num_seqs"]),
        max_num_batched_tokens=int(row["max_num_batched_tokens"]), kv_cache_dtype=row["kv_cache_dtype"],
        quantization=row["quantization"] or None, block_size=int(row["block_size"] or 16),
        enforce_eager=row["enforce_eager"] == "True", gpu_memory_utilization=float(row["gpu_memory_utilization"]),
    )  # fmt: skip
    graphs = row["cudagraph_actual_gib"]
    setting = f"s{row['max_num_seqs']} t{row['max_num_batched_tokens']} e{row['enforce_eager']} {row['quantization']}"
    return Run(
        "0.25.1",
        row["model"],
        model.name,
        setting,
        model,
        GpuSpec("H200", round(float(row["total_gib"]) * GIB)),
        config,
        Overrides(free_bytes=round(float(row["free_at_start_gib"]) * GIB)),
        float(row["weights_gib"]),
        float(row["torch_peak_increase_gib"]),
        float(row["non_torch_increase_gib"]),
        float(graphs) if graphs else None,
        float(row["cudagraph_estimate_gib"] or 0) or None,
        float(row["available_kv_gib"]),
        int(row["kv_cache_tokens"]),
        float(row["max_concurrency"]),
    )
