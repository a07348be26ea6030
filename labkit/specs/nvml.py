"""What the driver says of the cards here, through NVML. Every call may fail alone; what is not known stays None."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from labkit.specs.gpu_catalogue import catalogue_gpu, find_gpu_name
from labkit.specs.gpu_spec import GpuSpec
from labkit.text import plain


def read_gpus(library: Any = None) -> tuple[GpuSpec, ...]:
    """Every card that this process may use, in CUDA's order; () where there is no NVML, driver or card.

    `total_bytes` is what CUDA will report: from the catalogue where the card is in it, else NVML's total without its
    reserved part.

    Args:
        library: a module with pynvml's functions; by default pynvml.
    """
    if library is None:
        try:
            import pynvml as library  # type: ignore[no-redef]
        except ImportError:
            return ()
    if _call(library, "nvmlInit") is _FAILED:
        return ()
    try:
        count = _call(library, "nvmlDeviceGetCount")
        total = count if isinstance(count, int) else 0
        cards = [_read_gpu(library, index) for index in range(total)]
        return _visible([card for card in cards if card is not None])
    finally:
        _call(library, "nvmlShutdown")


class _Failed:
    """The answer of an NVML call that failed; None is a value of some calls."""


_FAILED = _Failed()


def _call(library: Any, name: str, *arguments: Any) -> Any:
    function: Callable[..., Any] | None = getattr(library, name, None)
    if function is None:
        return _FAILED
    try:
        return function(*arguments)
    except Exception:
        # NVMLError has one class per code, and an old driver lacks functions altogether: each means "not known".
        return _FAILED


def _value(library: Any, name: str, *arguments: Any) -> Any:
    answer = _call(library, name, *arguments)
    return None if isinstance(answer, _Failed) else answer


def _read_gpu(library: Any, index: int) -> GpuSpec | None:
    handle = _value(library, "nvmlDeviceGetHandleByIndex", index)
    if handle is None:
        return None
    name = _text(_value(library, "nvmlDeviceGetName", handle)) or f"GPU {index}"
    total, free, reserved = _read_memory(library, handle)
    known = find_gpu_name(name)
    base = catalogue_gpu(known) if known is not None else None
    if total is None and base is None:
        return None
    visible = _visible_bytes(base, total, reserved)
    spec = base if base is not None else GpuSpec(name=plain(name, 80), total_bytes=visible)
    capability = _value(library, "nvmlDeviceGetCudaComputeCapability", handle)
    return replace(
        spec,
        total_bytes=visible,
        nvidia_smi_total_bytes=total if total is not None else spec.nvidia_smi_total_bytes,
        free_bytes=None if free is None else min(free, visible),
        compute_capability=_dotted(capability) or spec.compute_capability,
        origin="nvml",
        uuid=_text(_value(library, "nvmlDeviceGetUUID", handle)) or None,
    )


def _visible_bytes(base: GpuSpec | None, total: int | None, reserved: int | None) -> int:
    """What CUDA will report: a MIG slice or another variant has a total of its own, and then only NVML's holds."""
    if base is not None and (total is None or base.nvidia_smi_total_bytes is None):
        return base.total_bytes
    if base is not None and abs(total - base.nvidia_smi_total_bytes) <= base.nvidia_smi_total_bytes * 0.02:  # type: ignore[operator]
        return base.total_bytes
    return (total or 0) - (reserved or 0)


def _read_memory(library: Any, handle: Any) -> tuple[int | None, int | None, int | None]:
    """Total, free and reserved bytes; the second version first, whose `used` leaves out what the driver reserves."""
    version = getattr(library, "nvmlMemory_v2", None)
    memory = _value(library, "nvmlDeviceGetMemoryInfo", handle, version) if version is not None else None
    if memory is None:
        memory = _value(library, "nvmlDeviceGetMemoryInfo", handle)
    return _bytes(memory, "total"), _bytes(memory, "free"), _bytes(memory, "reserved")


def _bytes(memory: Any, field: str) -> int | None:
    value = getattr(memory, field, None)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _text(value: Any) -> str:
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    return plain(value, 200) if isinstance(value, str) else ""


def _dotted(capability: Any) -> str | None:
    if isinstance(capability, (tuple, list)) and len(capability) == 2:
        return f"{capability[0]}.{capability[1]}"
    return None


def _visible(cards: list[GpuSpec]) -> tuple[GpuSpec, ...]:
    """The cards that CUDA_VISIBLE_DEVICES leaves, in its order; NVML itself does not look at it."""
    setting = os.environ.get("CUDA_VISIBLE_DEVICES")
    if setting is None:
        return tuple(cards)
    chosen: list[GpuSpec] = []
    for word in (part.strip() for part in setting.split(",")):
        if word.isdecimal() and int(word) < len(cards):
            chosen.append(cards[int(word)])
            continue
        found = next((card for card in cards if word and (card.uuid or "").startswith(word)), None)
        if found is None:
            break
        chosen.append(found)
    return tuple(chosen)
