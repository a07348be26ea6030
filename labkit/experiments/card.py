"""Whether runs of a session are on this machine's card, found out without importing torch."""

from __future__ import annotations

import functools
from importlib.util import find_spec
from pathlib import Path

from labkit.specs import load_gpu
from labkit.specs.gpu_spec import GpuSpec
from labkit.versions import cuda_of_version_file


def runs_on(gpu: GpuSpec) -> bool:
    """True when `gpu` is the card of this machine, and torch and Triton can compute on it."""
    if gpu.is_cpu or not torch_has_cuda() or find_spec("triton") is None:
        return False
    return gpu.origin == "nvml" or load_gpu("auto").name == gpu.name


@functools.lru_cache(maxsize=1)
def torch_has_cuda() -> bool:
    """Whether the torch that is installed was built for CUDA, as its version file says."""
    found = find_spec("torch")
    if found is None or found.origin is None:
        return False
    return cuda_of_version_file((Path(found.origin).parent / "version.py").read_text(encoding="utf-8")) is not None
