"""The cards that labkit knows without NVML: `catalogue/gpus.json`."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

from labkit.errors import OutOfRangeError, UnknownNameError
from labkit.specs.families import CATALOGUE_FOLDER
from labkit.specs.gpu_spec import GpuSpec
from labkit.text import nearest, plain

MIB = 2**20
GIB = 2**30
# What a bare marketing name means where the catalogue has several cards of that name.
_SHORT_NAMES = (
    ("h100", "H100 SXM"), ("h10080gb", "H100 SXM"), ("h100sxm580gb", "H100 SXM"), ("h100pcie80gb", "H100 PCIe"),
    ("a100", "A100-80GB"), ("a100sxm", "A100-80GB"), ("a100pcie40gb", "A100-40GB"), ("a100pcie80gb", "A100-80GB"),
    ("v100", "V100-16GB"), ("v100pcie16gb", "V100-16GB"), ("v100pcie32gb", "V100-32GB"),
)  # fmt: skip


@lru_cache(maxsize=1)
def _entries() -> dict[str, Any]:
    return json.loads((CATALOGUE_FOLDER / "gpus.json").read_text("utf-8"))["gpus"]


def gpu_names() -> tuple[str, ...]:
    """Every catalogue name, in the catalogue's order."""
    return tuple(_entries())


def find_gpu_name(name: str) -> str | None:
    """The catalogue name that `name` means: NVML's, a marketing or a short name, in any spelling; or its number."""
    wanted = _folded(name)
    known = {**dict(_SHORT_NAMES)}
    for catalogue_name, entry in _entries().items():
        known[_folded(catalogue_name)] = catalogue_name
        known[_folded(entry["name"])] = catalogue_name
    endings = {title for spelled, title in known.items() if wanted.isdigit() and spelled.endswith(wanted)}
    return known.get(wanted) or (endings.pop() if len(endings) == 1 else None)


def catalogue_gpu(name: str) -> GpuSpec:
    """The card called `name`.

    Raises:
        UnknownNameError: the catalogue has no such card; names the nearest.
    """
    found = find_gpu_name(name)
    if found is None:
        close = nearest(name, (*gpu_names(), "auto", "cpu"))
        raise UnknownNameError(
            f"there is no GPU called {plain(name, 80)!r} in the catalogue",
            available=", ".join((*gpu_names(), "auto", "cpu")),
            works=f"{close}, or a .json file of your card" if close else "a .json file of your card",
            knob="gpu",
        )
    return spec_from_entry(found, _entries()[found])


def spec_from_entry(name: str, entry: dict[str, Any]) -> GpuSpec:
    """A `GpuSpec` from one entry of `catalogue/gpus.json`."""
    return GpuSpec(
        name=name,
        total_bytes=entry["planned_total_mib"] * MIB,
        nvidia_smi_total_bytes=_bytes(entry.get("nvidia_smi_total_mib")),
        mem_bandwidth_bytes_per_s=_times(entry.get("mem_bandwidth_gb_s"), 1e9),
        l2_bytes=_bytes(entry.get("l2_mib")),
        sm_count=entry.get("sm_count"),
        compute_capability=entry.get("compute_capability"),
        bf16_flops=_times(entry.get("bf16_dense_tflops"), 1e12),
        fp16_flops=_times(entry.get("fp16_dense_tflops"), 1e12),
        fp8_flops=_times(entry.get("fp8_dense_tflops"), 1e12),
    )


def cpu_gpu(memory_gib: float = 2.0) -> GpuSpec:
    """A machine without a GPU; `memory_gib` stands in for the card's total.

    Raises:
        OutOfRangeError: not a number of 0.01 to 65,536 GiB.
    """
    correct = isinstance(memory_gib, (int, float)) and not isinstance(memory_gib, bool) and 0.01 <= memory_gib <= 65536
    if not correct:
        raise OutOfRangeError(
            f"the CPU's memory cannot be {plain(repr(memory_gib), 80)}",
            needed="0.01 to 65536 GiB",
            knob="cpu_memory_gib",
        )
    return GpuSpec(name="cpu", total_bytes=int(memory_gib * GIB), origin="cpu")


def _folded(name: str) -> str:
    return re.sub(r"nvidia|geforce|tesla|[^a-z0-9]", "", str(name)[:200].casefold())


def _bytes(mib: float | None) -> int | None:
    return None if mib is None else int(mib * MIB)


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
