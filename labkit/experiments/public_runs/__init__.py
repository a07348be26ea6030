"""Measured vLLM runs that others published, as ground truth for the virtual GPU."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources

import numpy as np

from labkit.engine.step_constants import StepConstants
from labkit.engine.step_cost import StepCost, step_cost
from labkit.engine.step_time import StepLoad, StepTimeModel
from labkit.specs import load_gpu, load_model, model_from_config
from labkit.specs.engine_config import EngineConfig
from labkit.specs.gpu_spec import GpuSpec
from labkit.specs.model_spec import ModelSpec, WeightFormat

_CATALOGUE_NAMES = {"meta-llama/Llama-3.1-70B": "meta-llama/Llama-3.1-70B-Instruct"}
_GPU_NAMES = {"A100 (size not stated)": "A100-40GB"}
_FORMATS = {
    "fp8": WeightFormat("fp8", 8, 0, scale_bytes=4),
    "fp4": WeightFormat("nvfp4", 4, 16, scale_bytes=1),
    "int4": WeightFormat("int4", 4, 32, unquantized=("embed", "lm_head", "router", "norm", "attention", "mlp")),
}
# Their concurrency seems to be that of a node of eight cards: predictions of any constants miss by a factor.
_EXCLUDED_MODELS = ("nvidia/Llama-3.1-8B-Instruct-FP8", "Qwen/Qwen3-235B-A22B-FP8")


@dataclass(frozen=True)
class PublicRun:
    """One measured run.

    Attributes:
        run_id: of the source. model_name, gpu_name: as this table names them.
        engine: "V1" (a server under constant concurrency) or "V0" (one offline batch).
        input_tokens, output_tokens: mean lengths. concurrency: requests at once.
        seconds: measured mean time per output token (V1) or batch latency over output tokens (V0).
    """

    run_id: str
    model_name: str
    gpu_name: str
    engine: str
    weights: str
    config: EngineConfig
    input_tokens: float
    output_tokens: float
    concurrency: int
    seconds: float
    ttft_s: float | None

    @property
    def is_moe(self) -> bool:
        """Whether the model has routed experts."""
        return run_model(self.model_name, self.weights).moe is not None

    @property
    def deployment(self) -> tuple[str, str, str, int]:
        """Model, weights, card and cards: what one server is."""
        return (self.model_name, self.weights, self.gpu_name, self.config.tensor_parallel_size)


@lru_cache(maxsize=32)
def run_model(name: str, weights: str) -> ModelSpec:
    """The model of a run with the weight format that it was served in."""
    configs = json.loads(resources.files(__package__).joinpath("models.json").read_text(encoding="utf-8"))
    spec = model_from_config(configs[name], name) if name in configs else load_model(_CATALOGUE_NAMES.get(name, name))
    if spec.weight_format.kind == "mxfp4" or weights not in _FORMATS:
        return spec
    return spec.replace(weight_format=_FORMATS[weights], weights_bytes=None)


@lru_cache(maxsize=1)
def public_runs() -> tuple[PublicRun, ...]:
    """The runs that accuracy is stated on; the README of this folder and `docs/method.md` say what is left out."""
    text = resources.files(__package__).joinpath("latency_runs.csv").read_text(encoding="utf-8")
    return tuple(_run(row) for row in csv.DictReader(text.splitlines()) if _is_used(row))


def _is_used(row: dict[str, str]) -> bool:
    if row["model"] in _EXCLUDED_MODELS or (row["ep"] or "1") != "1" or (row["dp"] or "1") != "1":
        return False
    lacks_version = row["model"].startswith("openai/gpt-oss") and not row["version"]
    impossible = row["version"] == "0.11.2" and row["load"] == "512"
    return not lacks_version and not impossible


def _run(row: dict[str, str]) -> PublicRun:
    is_batch = row["load_kind"] == "offline batch"
    share = 0.9 if "R0.8" in row["flags"] else 1.0
    output_tokens = float(row["osl"]) * share
    kv = row["kv_dtype"] if row["kv_dtype"] == "fp8" else "auto"
    config = EngineConfig(
        tensor_parallel_size=int(row["tp"]),
        kv_cache_dtype=kv,
        max_num_batched_tokens=int(row["max_num_batched_tokens"] or 8192),
        max_num_seqs=int(float(row["max_num_seqs"] or 512)),
    )
    return PublicRun(
        run_id=row["id"],
        model_name=row["model"],
        gpu_name=_GPU_NAMES.get(row["gpu"], row["gpu"]),
        engine="V0" if is_batch else "V1",
        weights=row["weights"],
        config=config,
        input_tokens=float(row["isl"]) * share,
        output_tokens=output_tokens,
        concurrency=int(row["load"]),
        seconds=float(row["e2e_ms_mean"]) / 1e3 / output_tokens if is_batch else float(row["tpot_ms_mean"]) / 1e3,
        ttft_s=float(row["ttft_ms_mean"]) / 1e3 if row["ttft_ms_mean"] else None,
    )


@lru_cache(maxsize=512)
def _cost(model_name: str, weights: str, tensor_parallel_size: int, kv_cache_dtype: str) -> StepCost:
    config = EngineConfig(tensor_parallel_size=tensor_parallel_size, kv_cache_dtype=kv_cache_dtype)
    return step_cost(run_model(model_name, weights), config)


@lru_cache(maxsize=32)
def _gpu(name: str) -> GpuSpec:
    return load_gpu(name)


def predict(runs: tuple[PublicRun, ...], constants: StepConstants) -> np.ndarray:
    """Predicted `seconds` of each run, [runs].

    Under a constant concurrency C each request computes its prompt once in every `output_tokens` steps, so a step is
    a decode step of C requests plus C/output_tokens prompts; its own prompt is not in a request's time per token.
    """
    groups: dict[tuple, list[int]] = {}
    for index, run in enumerate(runs):
        groups.setdefault((run.deployment, run.config.kv_cache_dtype), []).append(index)
    seconds = np.empty(len(runs))
    for indices in groups.values():
        seconds[indices] = _predict_deployment([runs[index] for index in indices], constants)
    return seconds


def _predict_deployment(runs: list[PublicRun], constants: StepConstants) -> np.ndarray:
    first = runs[0]
    config = first.config
    cost = _cost(first.model_name, first.weights, config.tensor_parallel_size, config.kv_cache_dtype)
    model = StepTimeModel(cost, _gpu(first.gpu_name), constants)
    requests = np.array([float(run.concurrency) for run in runs])
    inputs = np.array([run.input_tokens for run in runs])
    outputs = np.array([run.output_tokens for run in runs])
    contexts = tuple(requests * np.minimum(inputs + outputs / 2, kind.window or np.inf) for kind in cost.kv)
    nothing = tuple(np.zeros_like(requests) for _ in cost.kv)
    budget = np.array([float(run.config.max_num_batched_tokens or 8192) for run in runs])
    decode = model.seconds(StepLoad(requests, requests, requests, contexts, nothing))
    if first.engine == "V0":
        return decode + _prefill_s(model, requests * inputs, inputs, 0 * requests, budget) / outputs
    return decode + (requests - 1) / outputs * _prefill_s(model, inputs, inputs, requests, budget)


def _prefill_s(
    model: StepTimeModel, tokens: np.ndarray, length: np.ndarray, beside: np.ndarray, budget: np.ndarray
) -> np.ndarray:
    """Seconds that `tokens` prompt tokens add, in chunks of the token budget beside `beside` decoding requests."""
    chunks = np.ceil(tokens / np.maximum(budget - beside, 1.0))
    chunk = tokens / chunks
    pairs = tuple(chunk * np.minimum(length / 2, kind.window or np.inf) for kind in model.cost.kv)
    nothing = tuple(np.zeros_like(tokens) for _ in model.cost.kv)
    one = np.maximum(1.0, chunk / length)
    step = model.seconds(StepLoad(beside + chunk, beside + one, beside + one, nothing, pairs))
    alone = model.seconds(StepLoad(beside, beside, beside, nothing, nothing)) if beside.any() else 0.0
    return chunks * (step - alone)
