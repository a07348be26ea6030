"""Whether runs of a session are on this machine's card, found out without importing torch."""

from __future__ import annotations

import functools
from importlib.util import find_spec
from pathlib import Path

from labkit.errors import OutOfRangeError
from labkit.specs import load_gpu, read_gpus
from labkit.specs.engine_config import EngineConfig
from labkit.specs.gpu_spec import GpuSpec
from labkit.text import plain
from labkit.versions import cuda_of_version_file


def runs_on(gpu: GpuSpec) -> bool:
    """True when `gpu` is the card of this machine, and torch and Triton can compute on it."""
    if gpu.is_cpu or not torch_has_cuda() or find_spec("triton") is None:
        return False
    return gpu.origin == "nvml" or load_gpu("auto").name == gpu.name


def check_cards(gpu: GpuSpec, config: EngineConfig) -> None:
    """Refuse a run that needs more cards than this machine has; on a CPU ranks are processes, as many as asked for.

    Raises:
        OutOfRangeError: with the cards that there are.
    """
    size = config.tensor_parallel_size
    if size == 1 or gpu.is_cpu:
        return
    cards = len(read_gpus()) if runs_on(gpu) else 0
    if size > cards:
        name, works = plain(gpu.name, 60), f"up to {cards}" if cards > 1 else "= 1"
        raise OutOfRangeError(
            f"a run with tensor_parallel_size = {size} needs {size} cards, and this machine has "
            f"{cards or 'none of the kind'}; the plan for {size} holds all the same",
            needed=f"{size} × {name}",
            available=f"{cards} × {name}",
            works=f"tensor_parallel_size {works}, or gpu='cpu', where ranks are processes",
            knob="tensor_parallel_size",
        )


@functools.lru_cache(maxsize=1)
def torch_has_cuda() -> bool:
    """Whether the torch that is installed was built for CUDA, as its version file says."""
    found = find_spec("torch")
    if found is None or found.origin is None:
        return False
    return cuda_of_version_file((Path(found.origin).parent / "version.py").read_text(encoding="utf-8")) is not None
