"""Public reports as checks: what the planner says beside what a real log printed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any

from labkit.memory.planner import plan
from labkit.memory.records import MemoryPlan
from labkit.memory.stages import Overrides
from labkit.specs.engine_config import EngineConfig
from labkit.specs.gpu_catalogue import catalogue_gpu
from labkit.specs.gpu_spec import GpuSpec
from labkit.specs.model_catalogue import catalogue_model
from labkit.specs.model_config import model_from_config
from labkit.specs.model_spec import LayerSpec, ModelSpec, StateSpec, WeightFormat

GIB = 2**30
PRINT_ROUNDING_GIB = 0.005
_CARD = GpuSpec("any card", 400 * GIB, free_bytes=400 * GIB)


@dataclass(frozen=True)
class Check:
    """One number of one report.

    Attributes:
        low, high: the planner's values at both ends of what the printed inputs can stand for.
        observed: what was printed.
    """

    case: str
    quantity: str
    observed: float | str
    low: float | str
    high: float | str

    @property
    def is_exact(self) -> bool:
        """The printed value lies between the ends, each end included."""
        if isinstance(self.observed, str):
            return self.observed == self.low == self.high
        return float(self.low) <= self.observed <= float(self.high)


@lru_cache(maxsize=1)
def case_file() -> dict[str, Any]:
    """`runs/cases.json`: "cases" and the "listed" ones with their reasons."""
    text = resources.files("labkit.memory").joinpath("runs").joinpath("cases.json").read_text(encoding="utf-8")
    return json.loads(text)


def check_case(case: dict[str, Any]) -> list[Check]:
    """Every number of one report beside the planner's."""
    checks = [_budget_check(case)] if "budget" in case else []
    if "layers" not in case:
        return checks
    spread = 0.0 if case.get("exact") else PRINT_ROUNDING_GIB
    low, high = (_planned(case, sign * spread) for sign in (-1, 1))
    for quantity, observed in case["expect"].items():
        if quantity == "pool_of_tokens_gib":
            checks.append(_pool_check(case, low.block_bytes, *observed))
            continue
        ends = [_quantity(found, quantity) for found in (low, high)]
        digits = 0.00005 if case.get("exact") else 0.005
        rounding = digits if quantity in ("concurrency", "needed_gib") else 0
        if isinstance(observed, str):
            checks.append(Check(case["id"], quantity, observed, ends[0], ends[1]))
        else:
            checks.append(Check(case["id"], quantity, observed, ends[0] - rounding, ends[1] + rounding))
    return checks


def all_checks() -> list[Check]:
    """Every number of every report."""
    return [check for case in case_file()["cases"] for check in check_case(case)]


def golden_checks() -> list[Check]:
    """`runs/golden.json`: what vLLM's own planner says, to the byte."""
    text = resources.files("labkit.memory").joinpath("runs").joinpath("golden.json").read_text(encoding="utf-8")
    return [check for case in json.loads(text)["cases"] for check in check_case(case)]


def _budget_check(case: dict[str, Any]) -> Check:
    """total × utilization − parts, each printed with two decimals."""
    budget = case["budget"]
    value = budget["total"] * budget["utilization"] - sum(budget["parts"])
    rounding = PRINT_ROUNDING_GIB * (2 + len(budget["parts"]))
    return Check(case["id"], "budget_gib", budget["kv"], value - rounding, value + rounding)


def _pool_check(case: dict[str, Any], token_bytes: int, tokens: int, pool_gib: float) -> Check:
    value = tokens * token_bytes / GIB
    return Check(case["id"], "pool_gib", pool_gib, value - 2 * PRINT_ROUNDING_GIB, value + 2 * PRINT_ROUNDING_GIB)


def _quantity(found: MemoryPlan, quantity: str) -> Any:
    if quantity == "needed_gib":
        return found.details["needed_bytes"] / GIB
    if quantity == "block_tokens":
        return found.details["ranks"][0]["groups"][0]["block_tokens"]
    rank = found.details.get("ranks", [{}])[0]
    if quantity in ("padding_layers", "groups"):
        return rank["padding_layers"] if quantity == "padding_layers" else len(rank["groups"])
    names = {
        "block_bytes": "block_bytes",
        "tokens": "kv_cache_tokens", "concurrency": "max_concurrency", "blocks": "num_gpu_blocks",
        "largest_length": "max_model_len_that_fits", "swap_blocks": "num_swap_blocks", "verdict": "verdict",
    }  # fmt: skip
    return getattr(found, names[quantity])


def _planned(case: dict[str, Any], rounding_gib: float) -> MemoryPlan:
    flags = dict(case["flags"])
    flags.setdefault("max_num_batched_tokens", 8192)
    flags.setdefault("max_num_seqs", 256)
    if "blocks" in case:
        flags["num_gpu_blocks_override"] = case["blocks"]
    pool = case.get("pool_gib")
    available = None if pool is None else round((pool + rounding_gib) * GIB)
    return plan(
        case_model(case),
        _CARD,
        EngineConfig(**flags),
        engine=case.get("engine", "vllm"),
        engine_version=case.get("vllm", "0.33.0"),
        overrides=Overrides(available_kv_bytes=available),
    )


def case_model(case: dict[str, Any]) -> ModelSpec:
    """A model with the report's layers; what is not about KV is filled with any numbers."""
    layers = [layer for entry in case["layers"] for layer in [_layer(*entry[1:])] * entry[0]]
    return ModelSpec(case["id"], "LlamaForCausalLM", "llama", tuple(layers), 4096, 14336, 32000, 2**20)


def _layer(kind: str, first: int, second: int, window: int | None = None) -> LayerSpec:
    if kind == "gdn":
        keys, values = first, second
        conv = (3, 2 * keys * 128 + values * 128)
        state = StateSpec("gdn", (conv, (values, 128, 128)), ("auto", "float32"), (1, 0))
        return LayerSpec("state", state=state)
    if kind == "mla":
        return LayerSpec("mla", 16, 16, 192, v_head_dim=128, kv_lora_rank=first, qk_rope_head_dim=second)
    if kind == "shared":
        return LayerSpec("full", 8, first, second, shares_kv_with=0)
    return LayerSpec("sliding" if kind == "sliding" else "full", 32, first, second, window=window)


def verdict_file() -> list[dict[str, Any]]:
    """`runs/verdicts.json`: reports that say whether the server started."""
    text = resources.files("labkit.memory").joinpath("runs").joinpath("verdicts.json").read_text(encoding="utf-8")
    return json.loads(text)["cases"]


def verdict_plan(case: dict[str, Any]) -> MemoryPlan:
    """The plan of one of them, from model, card and flags alone."""
    spec = catalogue_model(case["model"]) if "model" in case else model_from_config(case["config"], case["id"])
    if "weight_format" in case:
        spec = spec.replace(weight_format=WeightFormat(**case["weight_format"]), weights_bytes=None)
    gpu = catalogue_gpu(case["gpu"]) if "gpu" in case else _CARD
    sizes = {name: round(case[f"{name}_gib"] * GIB) for name in ("total", "free") if f"{name}_gib" in case}
    overrides = Overrides(**{f"{name}_bytes": value for name, value in sizes.items()})
    config = EngineConfig(**case["flags"])
    return plan(spec, gpu, config, engine="vllm", engine_version=case["vllm"], overrides=overrides)


def unfitted_activations() -> dict[str, tuple[float, float]]:
    """`runs/activations.json`: family → activation peak planned and reported, in GiB; none was in the fit."""
    text = resources.files("labkit.memory").joinpath("runs").joinpath("activations.json").read_text(encoding="utf-8")
    found = {}
    for entry in json.loads(text)["models"]:
        known = "model" in entry
        spec = catalogue_model(entry["model"]) if known else model_from_config(entry["config"], entry["name"])
        config = EngineConfig(max_model_len=8192, max_num_seqs=1024, max_num_batched_tokens=8192,
                              tensor_parallel_size=entry["tp"])  # fmt: skip
        got = plan(spec, catalogue_gpu("H100 SXM"), config, engine="vllm", engine_version="0.19.0")
        found[entry["name"]] = (got.breakdown.activation_bytes / GIB, entry["gib"])
    return found
