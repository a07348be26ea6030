"""Memory of labkit's engine on the card that is here, over models and settings, for the planner to be judged by.

    python -m labkit.experiments.card_memory results/labkit-memory.json 60 Qwen/Qwen3-0.6B

One row a configuration: the parts that the engine measured before it took its pool, those that it holds afterwards, and
its blocks. Random weights, nothing is served. Rows of models that are not named stay in the file; a process for each
model shows what the first engine of a process takes.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Mapping, Sequence
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
    "max_model_len": 4096, "max_num_seqs": 256, "max_num_batched_tokens": 8192, "gpu_memory_utilization": 0.1,
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


def _knobs(tokens: int, seqs: int, share: float = 0.1, **others: Any) -> dict[str, Any]:
    return {
        "max_num_batched_tokens": tokens, "max_num_seqs": seqs, "gpu_memory_utilization": share, **others
    }  # fmt: skip


def memory_runs() -> list[MemoryRun]:
    """What is measured: pools from half a GiB to nearly all of a card, every knob that a part depends on."""
    small = [
        _knobs(8192, 256, 0.9), _knobs(2048, 96, 0.025, max_model_len=2048), _knobs(8192, 64, max_model_len=2048),
        _knobs(512, 48, 0.03, kv_cache_dtype="fp8"), _knobs(3072, 160), _knobs(128, 4, 0.0125, max_model_len=1024),
        _knobs(6144, 320, 0.2, kv_cache_dtype="int8_per_token_head"), _knobs(1536, 24, 0.05, block_size=32),
        _knobs(4096, 100, enforce_eager=True), _knobs(768, 700),
        _knobs(2048, 64, swap_space=1.0, preemption_mode="swap"), _knobs(16384, 200, 0.3),
        # Tables of positions stay as long as they were.
        _knobs(2048, 8, 0.15, max_model_len=32768),
    ]  # fmt: skip
    large = [
        _knobs(8192, 256, 0.92), _knobs(2048, 64, 0.3), _knobs(512, 16, 0.125), _knobs(4096, 48, 0.15),
        _knobs(1024, 300, 0.2, kv_cache_dtype="fp8"), _knobs(16384, 128, 0.5, max_model_len=16384),
    ]  # fmt: skip
    runs = [MemoryRun(SMALL_MODEL, knobs) for knobs in small] + [MemoryRun(LARGE_MODEL, knobs) for knobs in large]
    others: dict[str, tuple[int, list[dict[str, Any]]]] = {
        "google/gemma-3-4b-text": (8, [_knobs(3072, 100), _knobs(512, 200)]),
        "Qwen/Qwen3-30B-A3B": (4, [_knobs(1024, 128), _knobs(4096, 64)]),
        "Qwen/Qwen2.5-7B-Instruct": (4, [_knobs(3072, 100)]),
        "HuggingFaceTB/SmolLM2-135M-Instruct": (30, [_knobs(4096, 128, max_model_len=2048)]),
    }
    for model, (num_layers, rows) in others.items():
        runs += [MemoryRun(model, knobs, num_layers) for knobs in rows]
    return [*runs, MemoryRun("Qwen/Qwen3-Embedding-0.6B", _knobs(4096, 32, quantization="fp8"), 4)]


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
            "num_gpu_blocks": executor.plan.num_gpu_blocks, "planned_blocks": planned.num_gpu_blocks,
            "budget_parts": dict(executor.budget_parts), "memory_parts": executor.memory_parts(),
            "total_bytes": self._total_bytes(),
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
    path: Path,
    budget_s: float,
    gpu: GpuSpec,
    models: Sequence[str] = (),
    *,
    device: str = "cuda",
    on_progress: Callable[[str], None] = print,
) -> list[dict[str, Any]]:
    """Measure the runs of `models` (all of them when empty) until all is done or the time is over, and write them."""
    bench, start = MemoryBench(gpu, device), time.monotonic()
    runs = [run for run in memory_runs() if not models or run.model in models]
    mine = {run.model for run in runs}
    kept = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    rows: list[dict[str, Any]] = [row for row in kept if row["model"] not in mine]
    for run in runs:
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
        found = row.get("error") or f"{row['num_gpu_blocks']} blocks, planned {row['planned_blocks']}"
        on_progress(f"{time.monotonic() - start:6.1f} s {run.model} {dict(run.knobs)} {found}")
    bench.close()
    return rows


def main() -> None:
    """The command line of this module."""
    from labkit.experiments.microbench import Bench, check_card

    parser = argparse.ArgumentParser(description="Memory of labkit's engine on the card that is here.")
    parser.add_argument("path", type=Path)
    parser.add_argument("budget_s", type=float, nargs="?", default=120.0)
    parser.add_argument("models", nargs="*", help="names of the catalogue; none means all that are in the list")
    options = parser.parse_args()
    check_card()
    measure_memory(options.path, options.budget_s, Bench("cuda").gpu, options.models)


if __name__ == "__main__":
    main()
