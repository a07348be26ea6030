"""Memory of labkit's engine on the card that is here, over models and settings, for the planner to be judged by.

    python -m labkit.experiments.card_memory results/labkit-memory.json 120

One row a configuration: the parts that the engine measured before it took its pool, those that it holds afterwards, and
its blocks. Random weights, nothing is served. The file is written anew after each row, most telling models first.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.results import write_results
from labkit.specs import load_model
from labkit.specs.engine_config import EngineConfig
from labkit.specs.gpu_spec import GpuSpec
from labkit.specs.model_spec import ModelSpec
from labkit.text import plain

SMALL_MODEL, LARGE_MODEL = "Qwen/Qwen3-0.6B", "meta-llama/Llama-3.1-8B-Instruct"
BASE: Mapping[str, Any] = {
    "max_model_len": 4096, "max_num_seqs": 256, "max_num_batched_tokens": 8192, "gpu_memory_utilization": 0.3,
}  # fmt: skip


@dataclass(frozen=True)
class MemoryRun:
    """One configuration.

    Attributes:
        model: of the catalogue; `num_layers` keeps its first layers only, which saves the card's time.
        knobs: over `BASE`.
    """

    model: str
    knobs: Mapping[str, Any]
    num_layers: int | None = None

    @property
    def config(self) -> EngineConfig:
        """The knobs as a configuration."""
        return EngineConfig(**{**BASE, **self.knobs})

    def spec(self) -> ModelSpec:
        """The model, cut."""
        spec = load_model(self.model)
        return spec if self.num_layers is None else spec.replace(layers=spec.layers[: self.num_layers])


def _sweep(model: str) -> Iterator[MemoryRun]:
    """The knobs that change parts, one or two at a time, in pools of a tenth and of a fortieth of the card."""
    sizes = [(512, 32), (512, 96), (2048, 64), (2048, 128), (8192, 64), (8192, 256), (1024, 1024), (16384, 256)]
    for tokens, seqs in sizes:
        yield MemoryRun(model, {"max_num_batched_tokens": tokens, "max_num_seqs": seqs})


def memory_runs() -> list[MemoryRun]:
    """What is measured, in order."""
    small = {"gpu_memory_utilization": 0.1}
    tiny = {"gpu_memory_utilization": 0.025, "max_model_len": 2048}
    runs = [MemoryRun(SMALL_MODEL, {**run.knobs, **small}) for run in _sweep(SMALL_MODEL)]
    for tokens, seqs in ((512, 32), (512, 96), (2048, 64), (2048, 96), (8192, 64), (8192, 96)):
        knobs = {"max_num_batched_tokens": tokens, "max_num_seqs": seqs, **tiny}
        runs += [MemoryRun(SMALL_MODEL, knobs), MemoryRun(SMALL_MODEL, {**knobs, "kv_cache_dtype": "fp8"})]
    others: list[dict[str, Any]] = [
        {"enforce_eager": True}, {"block_size": 32}, {"kv_cache_dtype": "int8_per_token_head"},
        {"max_num_seqs": 1, "max_num_batched_tokens": 256}, {"max_model_len": 32768, "max_num_seqs": 16},
        {"swap_space": 1.0, "preemption_mode": "swap"}, {"max_num_batched_tokens": 32768},
    ]  # fmt: skip
    runs += [MemoryRun(SMALL_MODEL, {**small, **knobs}) for knobs in others]
    runs += [MemoryRun(SMALL_MODEL, {"gpu_memory_utilization": 0.9})]
    runs += list(_sweep(LARGE_MODEL))
    runs += [
        MemoryRun(LARGE_MODEL, knobs)
        for knobs in ({"kv_cache_dtype": "fp8"}, {"max_model_len": 131072, "max_num_seqs": 16})
    ]
    runs += [MemoryRun(LARGE_MODEL, {"gpu_memory_utilization": 0.92})]
    cut: dict[str, int] = {
        "google/gemma-3-4b-text": 8, "Qwen/Qwen3-30B-A3B": 4, "google/gemma-2-2b-it": 6, "Qwen/Qwen2.5-7B-Instruct": 4,
        "microsoft/Phi-3-mini-4k-instruct": 4, "mistralai/Mistral-7B-v0.1": 4, "Qwen/Qwen3-Embedding-0.6B": 4,
        "HuggingFaceTB/SmolLM2-135M-Instruct": 30,
    }  # fmt: skip
    for model, num_layers in cut.items():
        for tokens, seqs in ((2048, 64), (8192, 256), (512, 256)):
            knobs = {"max_num_batched_tokens": tokens, "max_num_seqs": seqs, **small}
            runs.append(MemoryRun(model, knobs, num_layers))
    for quantization in ("fp8", "awq"):
        runs.append(MemoryRun(SMALL_MODEL, {**small, "quantization": quantization}, 4))
    return runs


class MemoryBench:
    """Measures runs one after the other; weights, and what was compiled, stay while the model does."""

    def __init__(self, gpu: GpuSpec, device: str = "cuda") -> None:
        self._gpu, self._device = gpu, device
        self._loaded: tuple[Any, ...] = ()
        self._decoder: Any = None
        self._executor: Any = None

    def row(self, run: MemoryRun) -> dict[str, Any]:
        """The measured parts of one configuration."""
        from labkit.engine.cuda_executor import CudaExecutor
        from labkit.memory import plan

        self._load(run)
        planned = plan(run.spec(), self._gpu, run.config)
        if self._executor is None:
            self._executor = CudaExecutor(self._decoder, planned)
        else:
            self._executor.reconfigure(planned)
        executor = self._executor
        return {
            "model": run.model, "num_layers": run.num_layers, "settings": {**BASE, **run.knobs},
            "num_gpu_blocks": executor.plan.num_gpu_blocks, "budget_parts": dict(executor.budget_parts),
            "memory_parts": executor.memory_parts(), "total_bytes": self._total_bytes(),
        }  # fmt: skip

    def close(self) -> None:
        """Give the card's memory back; also after an error."""
        if self._executor is not None:
            self._executor.close()
        self._decoder = self._executor = None
        self._loaded = ()
        gc.collect()

    def _total_bytes(self) -> int:
        import torch

        return torch.cuda.mem_get_info()[1] if self._device == "cuda" else self._gpu.total_bytes

    def _load(self, run: MemoryRun) -> None:
        from labkit.models import load_model_weights

        wanted = (run.model, run.num_layers, run.config.quantization)
        if self._loaded == wanted:
            return
        self.close()
        self._decoder = load_model_weights(
            run.spec(), dtype="bfloat16", load_format="dummy", device=self._device, quantization=run.config.quantization
        )
        self._loaded = wanted


def measure_memory(
    path: Path, budget_s: float, gpu: GpuSpec, *, device: str = "cuda", on_progress: Callable[[str], None] = print
) -> list[dict[str, Any]]:
    """Measure until all is done or the time is over, and write it."""
    bench, start = MemoryBench(gpu, device), time.monotonic()
    rows: list[dict[str, Any]] = []
    for run in memory_runs():
        if time.monotonic() - start > budget_s:
            on_progress(f"{budget_s:g} s were over; {len(rows)} rows")
            break
        try:
            row = bench.row(run)
        except Exception as error:
            bench.close()
            reason = plain(f"{type(error).__name__}: {error}", 300)
            row = {"model": run.model, "num_layers": run.num_layers, "settings": {**BASE, **run.knobs}, "error": reason}
        rows.append(row)
        command = f"python -m labkit.experiments.card_memory {path.name}"
        write_results(path, command=command, card=gpu.name, rows=rows, summary={})
        found = row.get("num_gpu_blocks", row.get("error"))
        on_progress(f"{time.monotonic() - start:6.1f} s {run.model} {dict(run.knobs)} {found}")
    bench.close()
    return rows


def main() -> None:
    """The command line of this module."""
    from labkit.experiments.microbench import Bench, check_card

    parser = argparse.ArgumentParser(description="Memory of labkit's engine on the card that is here.")
    parser.add_argument("path", type=Path)
    parser.add_argument("budget_s", type=float, nargs="?", default=120.0)
    options = parser.parse_args()
    check_card()
    measure_memory(options.path, options.budget_s, Bench("cuda").gpu)


if __name__ == "__main__":
    main()
