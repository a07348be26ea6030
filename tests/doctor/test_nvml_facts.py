"""NVML with every call missing or failing in turn: the rest is still read, and nothing becomes 0."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from labkit.doctor.nvml_facts import CardProcess, read_nvml

GIB = 2**30


class _Error(Exception):
    pass


def _good() -> dict:
    memory = SimpleNamespace(total=80 * GIB, free=70 * GIB, used=10 * GIB)
    processes = [SimpleNamespace(pid=5, usedGpuMemory=9 * GIB), SimpleNamespace(pid=6, usedGpuMemory=None)]
    return {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlSystemGetDriverVersion": lambda: b"570.124.06",
        "nvmlSystemGetCudaDriverVersion_v2": lambda: 12080,
        "nvmlDeviceGetHandleByIndex": lambda index: object(),
        "nvmlDeviceGetName": lambda handle: "NVIDIA H100",
        "nvmlDeviceGetUUID": lambda handle: "GPU-1",
        "nvmlDeviceGetMemoryInfo": lambda handle, version=None: memory,
        "nvmlDeviceGetCudaComputeCapability": lambda handle: (9, 0),
        "nvmlDeviceGetMigMode": lambda handle: [0, 0],
        "nvmlDeviceGetPersistenceMode": lambda handle: 1,
        "nvmlDeviceGetTemperature": lambda handle, sensor: 41,
        "nvmlDeviceGetTemperatureThreshold": lambda handle, kind: 90,
        "nvmlDeviceGetCurrentClocksEventReasons": lambda handle: 0x44,
        "nvmlDeviceGetComputeRunningProcesses": lambda handle: processes,
        "nvmlSystemGetProcessName": lambda pid: b"python\x1b[31m",
    }


def _library(**changes) -> SimpleNamespace:
    return SimpleNamespace(**{name: call for name, call in (_good() | changes).items() if call is not None})


def test_everything_that_nvml_says():
    facts = read_nvml(_library())
    (card,) = facts.cards
    assert (facts.driver, facts.cuda, facts.reason) == ("570.124.06", (12, 8), "")
    assert (card.name, card.capability, card.total_bytes, card.free_bytes) == (
        "NVIDIA H100",
        (9, 0),
        80 * GIB,
        70 * GIB,
    )
    assert (card.temperature_c, card.slowdown_c, card.persistence, card.mig) == (41, 90, True, False)
    assert card.throttling == ("hardware thermal limit", "power cap")
    assert card.processes == (CardProcess(5, "python[31m", 9 * GIB), CardProcess(6, "python[31m", None))


FIELDS = {
    "nvmlDeviceGetMemoryInfo": ("total_bytes", "free_bytes"),
    "nvmlDeviceGetCudaComputeCapability": ("capability",),
    "nvmlDeviceGetMigMode": ("mig",),
    "nvmlDeviceGetPersistenceMode": ("persistence",),
    "nvmlDeviceGetTemperature": ("temperature_c",),
    "nvmlDeviceGetTemperatureThreshold": ("slowdown_c",),
    "nvmlDeviceGetCurrentClocksEventReasons": ("throttling",),
    "nvmlDeviceGetComputeRunningProcesses": ("processes",),
    "nvmlDeviceGetUUID": ("uuid",),
}


def _fails(*arguments, **keywords):
    raise _Error("Not Supported")


@pytest.mark.parametrize("how", [_fails, None], ids=["fails", "missing"])
@pytest.mark.parametrize("name", FIELDS)
def test_one_call_that_fails_leaves_its_own_fields_unknown(name, how):
    (card,) = read_nvml(_library(**{name: how})).cards
    whole = read_nvml(_library()).cards[0]
    for field in card.__dataclass_fields__:
        expected = None if field in FIELDS[name] else getattr(whole, field)
        assert getattr(card, field) == expected, field


def test_an_old_driver_without_the_second_memory_call_is_read_by_the_first():
    def first_only(handle, version=None):
        if version is not None:
            raise _Error("Function Not Found")
        return SimpleNamespace(total=8, free=4)

    library = _library(nvmlDeviceGetMemoryInfo=first_only, nvmlMemory_v2=2)
    assert read_nvml(library).cards[0].total_bytes == 8


def test_not_available_is_not_a_number():
    huge = SimpleNamespace(total=2**64 - 1, free=2**64 - 1)
    card = read_nvml(_library(nvmlDeviceGetMemoryInfo=lambda handle, version=None: huge)).cards[0]
    assert card.total_bytes is None


def test_nvml_that_does_not_start_says_why():
    facts = read_nvml(_library(nvmlInit=_fails))
    assert facts.cards == ()
    assert facts.reason == "NVML does not start: Not Supported"


def test_no_handle_is_no_card():
    assert read_nvml(_library(nvmlDeviceGetHandleByIndex=_fails)).cards == ()
