"""Driver and cards through NVML, field by field: a call that fails leaves None and the rest is still read."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from labkit.text import plain

# Reasons that slow a card down; the others (idle, application clocks) are normal.
_SLOWING = MappingProxyType(
    {0x08: "hardware slowdown", 0x20: "software thermal limit", 0x40: "hardware thermal limit", 0x80: "power brake",
     0x04: "power cap"}
)  # fmt: skip


@dataclass(frozen=True)
class CardProcess:
    """A process on a card; `used_bytes` is None where the driver does not say (containers, MIG, WSL)."""

    pid: int
    name: str
    used_bytes: int | None


@dataclass(frozen=True)
class CardFacts:
    """One card; a field is None where the driver did not say."""

    index: int
    name: str
    uuid: str | None = None
    capability: tuple[int, int] | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    temperature_c: int | None = None
    slowdown_c: int | None = None
    throttling: tuple[str, ...] | None = None
    persistence: bool | None = None
    mig: bool | None = None
    processes: tuple[CardProcess, ...] | None = None


@dataclass(frozen=True)
class NvmlFacts:
    """What NVML said.

    Attributes:
        reason: why nothing could be asked; "" where it could.
        driver: version of the driver.
        cuda: the newest CUDA that the driver runs, such as (13, 0).
    """

    reason: str = ""
    driver: str | None = None
    cuda: tuple[int, int] | None = None
    cards: tuple[CardFacts, ...] = ()


def read_nvml(library: Any = None) -> NvmlFacts:
    """What NVML says of this machine.

    Args:
        library: a module with pynvml's functions; by default pynvml.
    """
    if library is None:
        try:
            library = importlib.import_module("pynvml")
        except ImportError:
            return NvmlFacts(reason="nvidia-ml-py is not installed")
    try:
        library.nvmlInit()
    except Exception as error:
        return NvmlFacts(reason=f"NVML does not start: {plain(_text(error), 200)}")
    ask = _Asker(library)
    try:
        count = ask("nvmlDeviceGetCount") or 0
        version = ask("nvmlSystemGetCudaDriverVersion_v2") or ask("nvmlSystemGetCudaDriverVersion")
        cards = tuple(card for index in range(count) if (card := _card(ask, index)) is not None)
        driver = ask("nvmlSystemGetDriverVersion")
        cuda = (version // 1000, version % 1000 // 10) if isinstance(version, int) else None
        return NvmlFacts(driver=_text(driver) if driver else None, cuda=cuda, cards=cards)
    finally:
        ask("nvmlShutdown")


class _Asker:
    def __init__(self, library: Any) -> None:
        self.library = library

    def __call__(self, name: str, *arguments: Any) -> Any:
        """The answer of an NVML call, None where it is missing or fails."""
        try:
            return getattr(self.library, name)(*arguments)
        except Exception:
            # NVML's errors are a class of their own per code, and old drivers lack functions.
            return None


def _card(ask: _Asker, index: int) -> CardFacts | None:
    handle = ask("nvmlDeviceGetHandleByIndex", index)
    if handle is None:
        return None
    memory = ask("nvmlDeviceGetMemoryInfo", handle, getattr(ask.library, "nvmlMemory_v2", None))
    memory = memory or ask("nvmlDeviceGetMemoryInfo", handle)
    capability = ask("nvmlDeviceGetCudaComputeCapability", handle)
    mig = ask("nvmlDeviceGetMigMode", handle)
    persistence = ask("nvmlDeviceGetPersistenceMode", handle)
    uuid = ask("nvmlDeviceGetUUID", handle)
    return CardFacts(
        index=index,
        name=_text(ask("nvmlDeviceGetName", handle) or f"card {index}"),
        uuid=_text(uuid) if uuid else None,
        capability=(int(capability[0]), int(capability[1])) if capability else None,
        total_bytes=_size(memory, "total"),
        free_bytes=_size(memory, "free"),
        temperature_c=ask("nvmlDeviceGetTemperature", handle, 0),
        slowdown_c=ask("nvmlDeviceGetTemperatureThreshold", handle, 1),
        throttling=_throttling(ask, handle),
        persistence=None if persistence is None else bool(persistence),
        mig=None if mig is None else bool(mig[0]),
        processes=_processes(ask, handle),
    )


def _throttling(ask: _Asker, handle: Any) -> tuple[str, ...] | None:
    bits = ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
    if bits is None:
        bits = ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
    if not isinstance(bits, int):
        return None
    return tuple(word for bit, word in _SLOWING.items() if bits & bit)


def _processes(ask: _Asker, handle: Any) -> tuple[CardProcess, ...] | None:
    found = ask("nvmlDeviceGetComputeRunningProcesses", handle)
    if found is None:
        return None
    return tuple(
        CardProcess(
            entry.pid,
            _text(ask("nvmlSystemGetProcessName", entry.pid) or "not visible from here"),
            _size(entry, "usedGpuMemory"),
        )
        for entry in found[:256]
    )


def _size(record: Any, field: str) -> int | None:
    value = getattr(record, field, None)
    # 2**64 - 1 is NVML's word for "not available".
    return value if isinstance(value, int) and 0 <= value < 2**63 else None


def _text(value: Any) -> str:
    return plain(value.decode("utf-8", "replace") if isinstance(value, bytes) else value, 200)
