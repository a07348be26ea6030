"""`load_gpu`: a card by name, the card that is here, or the CPU."""

from __future__ import annotations

from pathlib import Path

from labkit.errors import UnknownNameError
from labkit.specs.gpu_catalogue import catalogue_gpu, cpu_gpu
from labkit.specs.gpu_file import gpu_from_file
from labkit.specs.gpu_spec import GpuSpec
from labkit.specs.nvml import read_gpus
from labkit.text import plain


def load_gpu(name: str | Path | GpuSpec = "auto") -> GpuSpec:
    """The card that `name` means.

    Args:
        name: a catalogue, NVML or short name ("H100", "rtx4090"); "auto" for the first card that NVML shows, else
            the CPU; "cpu", or "cpu:4" for a CPU with 4 GiB to stand in for the card's memory; the path of a `.json`
            file for a card of your own, see `gpu_file.gpu_from_file`.

    Raises:
        UnknownNameError: no such card; names the nearest.
        OutOfRangeError: "cpu:" with an amount out of range.
        FileFormatError: the file is missing or wrong.
    """
    if isinstance(name, GpuSpec):
        return name
    if isinstance(name, Path):
        return gpu_from_file(name)
    if not isinstance(name, str) or not name.strip():
        raise UnknownNameError(f"a GPU's name is text, not {plain(repr(name), 80)}", works="auto", knob="gpu")
    wanted = name.strip().casefold()
    if wanted == "auto":
        cards = read_gpus()
        return cards[0] if cards else cpu_gpu()
    if wanted == "cpu":
        return cpu_gpu()
    if wanted.startswith("cpu:"):
        return cpu_gpu(_amount(wanted.removeprefix("cpu:").removesuffix("gib").strip()))
    return gpu_from_file(Path(name.strip())) if wanted.endswith(".json") else catalogue_gpu(name)


def _amount(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
