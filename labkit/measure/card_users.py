"""The card that this process works on, and the other programs on it, from NVML: who holds memory that a plan needs."""

from __future__ import annotations

import importlib
import os
from typing import Any

from labkit.format import memory

_SHOWN = 3


def current_card_uuid() -> str:
    """NVML's identity of torch's current card, whatever CUDA_VISIBLE_DEVICES numbers it; torch has a card."""
    import torch

    return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"


def other_card_uuids(count: int) -> list[str]:
    """NVML's identity of the `count` cards that CUDA shows after the first."""
    import torch

    return [f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in range(1, count + 1)]


def other_programs(uuid: str | None, pynvml: Any = None) -> str:
    """Such as "process 4711 holds 120 GiB", largest first; "" where there are none or NVML does not say.

    Args:
        uuid: NVML's identity of the card; None for no card.
        pynvml: the module, for tests.
    """
    if uuid is None:
        return ""
    try:
        library = pynvml or importlib.import_module("pynvml")
        library.nvmlInit()
        running = library.nvmlDeviceGetComputeRunningProcesses(library.nvmlDeviceGetHandleByUUID(uuid))
    except Exception:
        # NVML's errors are a class of their own per code; without it the error is as good, only shorter.
        return ""
    others = [process for process in running if process.pid != os.getpid()]
    others.sort(key=lambda process: process.usedGpuMemory or 0, reverse=True)
    parts = [
        f"process {process.pid} holds " + (memory(process.usedGpuMemory) if process.usedGpuMemory else "memory")
        for process in others[:_SHOWN]
    ]
    return ", ".join(parts) + (f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else "")
