"""Launch settings of labkit's attention kernels that decide what they allocate, read where the kernels read them.

`labkit_kernels.heuristics` needs torch; a test keeps the two readers equal.
"""

from __future__ import annotations

import json
from functools import lru_cache
from importlib import resources
from typing import Any

from labkit.specs.gpu_spec import GpuSpec

# Where the catalogue does not know a card's multiprocessors or generation.
DEFAULT_SM_COUNT, DEFAULT_ARCHITECTURE = 108, 80
_CONVERTS_E4M3 = 89


@lru_cache(maxsize=1)
def _table() -> dict[str, dict[str, list[dict[str, Any]]]]:
    text = resources.files("labkit_kernels").joinpath("heuristics.json").read_text(encoding="utf-8")
    return json.loads(text)["architectures"]


def sm_count(gpu: GpuSpec) -> int:
    """Multiprocessors of a card."""
    return gpu.sm_count or DEFAULT_SM_COUNT


def architecture(gpu: GpuSpec) -> int:
    """Compute capability as 90 for 9.0."""
    return round(10 * float(gpu.compute_capability)) if gpu.compute_capability else DEFAULT_ARCHITECTURE


def kv_kind(gpu: GpuSpec, kv_cache_dtype: str) -> str:
    """The kernels' word for a KV format; numbers as wide as the model's are "native"."""
    if kv_cache_dtype == "int8_per_token_head":
        return "int8"
    if not kv_cache_dtype.startswith("fp8"):
        return "native"
    return "fp8" if kv_cache_dtype == "fp8_e5m2" or architecture(gpu) >= _CONVERTS_E4M3 else "e4m3_bits"


def attention_settings(
    gpu: GpuSpec, kernel: str, kv_cache_dtype: str, head_dim: int, rows: int, batch: int = 1
) -> dict[str, Any]:
    """What the first fitting rule of "decode" or "prefill" says for `rows` query rows of one KV head.

    Args:
        batch: sequences, for "decode".
    """
    known = sorted(int(name) for name in _table())
    family = max((name for name in known if name <= architecture(gpu)), default=known[0])
    facts: dict[str, Any] = {"kv": kv_kind(gpu, kv_cache_dtype), "head_dim": head_dim, "rows": rows, "batch": batch}
    rules = _table()[str(family)][kernel]
    return next(
        rule["use"] for rule in rules if all(_holds(name, limit, facts) for name, limit in rule["when"].items())
    )


def _holds(name: str, limit: Any, facts: dict[str, Any]) -> bool:
    if name.startswith("max_"):
        return facts[name[4:]] <= limit
    return facts[name[4:]] >= limit if name.startswith("min_") else facts[name] in limit
