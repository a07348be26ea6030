"""Versions, machine and energy: what is not there is said, and never 0."""

import psutil
import pytest

from labkit.measure.nvml import EnergyMeter
from labkit.versions import machine, versions


def test_versions_name_packages_python_and_machine():
    found = versions(num_threads=1)
    assert found["labkit"]
    assert found["python"].startswith("3.")
    assert found["numpy"].startswith("2.")
    assert "vllm" not in found
    assert list(found) == sorted(found)
    assert found["machine"].endswith("1 thread")
    assert " cores" in found["machine"]
    assert machine(4).endswith("4 threads")
    assert f"{psutil.virtual_memory().total / 2**30:.1f} GiB" in machine()


class FakeNvml:
    """A card whose energy counter goes through given values; each may be an error instead."""

    def __init__(self, *readings, init=None, handle=None):
        self._readings, self._init, self._handle = list(readings), init, handle

    def nvmlInit(self):
        if self._init:
            raise self._init

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if self._handle:
            raise self._handle
        return uuid

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        reading = self._readings.pop(0)
        if isinstance(reading, Exception):
            raise reading
        return reading


def test_energy_is_the_difference_in_joules():
    meter = EnergyMeter("GPU-1", FakeNvml(1_000_500, 1_003_000))
    assert meter.stop() == pytest.approx(2.5)
    assert meter.reason == ""


@pytest.mark.parametrize(
    ("nvml", "words"),
    [
        (FakeNvml(init=OSError("Driver Not Loaded")), "Driver Not Loaded"),
        (FakeNvml(handle=ValueError("Not Found")), "Not Found"),
        (FakeNvml(RuntimeError("Not Supported")), "Not Supported"),
        (FakeNvml(5, RuntimeError("GPU is lost")), "GPU is lost"),
        (FakeNvml(5, 4), "reset"),
        (FakeNvml(RuntimeError()), "RuntimeError"),
    ],
)
def test_every_failing_call_gives_none_and_the_reason(nvml, words):
    meter = EnergyMeter("GPU-1", nvml)
    assert meter.stop() is None
    assert meter.reason.startswith("not available")
    assert words in meter.reason


def test_no_card_gives_none_and_says_so():
    meter = EnergyMeter(None)
    assert meter.stop() is None
    assert "no NVIDIA card" in meter.reason


def test_real_nvml_without_a_driver_gives_none_or_joules():
    energy = EnergyMeter("GPU-does-not-exist").stop()
    assert energy is None
