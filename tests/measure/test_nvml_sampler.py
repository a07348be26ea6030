"""Every one of NVML's calls fails alone: its field is None with a reason, the rest stays, and no number is 0."""

import dataclasses
import os
from types import SimpleNamespace

import pytest

from labkit.errors import OutOfRangeError
from labkit.measure.nvml_sampler import NvmlSample, NvmlSampler, summarize_samples

GIB = 2**30


class FakeNvml:
    """A card that draws 400 W and counts 400 J a look; functions in `broken` raise."""

    nvmlMemory_v2 = 0x2000028

    def __init__(self, broken=(), process_memory=20 * GIB):
        self.broken, self.looks, self.process_memory = set(broken), 0, process_memory

    def __getattribute__(self, name):
        if name.startswith("nvml") and name in object.__getattribute__(self, "broken"):
            raise AttributeError(f"NVML Function Not Found: {name}")
        return object.__getattribute__(self, name)

    def nvmlInit(self):
        return None

    def nvmlDeviceGetHandleByUUID(self, uuid):
        assert uuid == "GPU-1"
        return "handle"

    def nvmlDeviceGetPowerUsage(self, handle):
        return 400_000

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        self.looks += 1
        return 10**9 + 400_000 * self.looks

    def nvmlDeviceGetClockInfo(self, handle, kind):
        return {1: 1980, 2: 3201}[kind]

    def nvmlDeviceGetTemperature(self, handle, sensor):
        assert sensor == 0
        return 51

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle):
        return 0x1 | 0x4 | 0x40

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):
        return 0x8

    def nvmlDeviceGetMemoryInfo(self, handle, version=None):
        return SimpleNamespace(used=30 * GIB if version else 31 * GIB)

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        return [SimpleNamespace(pid=os.getpid(), usedGpuMemory=self.process_memory),
                SimpleNamespace(pid=1, usedGpuMemory=4 * GIB)]  # fmt: skip


def one_look(fake):
    sampler = NvmlSampler("GPU-1", 60, pynvml=fake)
    sampler.start()
    return sampler, sampler.samples[0]


def test_everything_is_read():
    sampler, sample = one_look(FakeNvml())
    summary = sampler.stop()
    assert dataclasses.replace(sample, time_s=0.0) == NvmlSample(
        0.0, 400.0, 1980, 3201, 51, ("power cap", "thermal (hardware)"), 30 * GIB, 20 * GIB, 4 * GIB, 1_000_400.0
    )
    assert (summary.energy_j, summary.energy_method) == (400.0, "energy counter of the card")
    assert summary.throttled_share == 1.0
    assert summary.num_samples == 2
    assert dict(summary.unavailable) == {}
    assert sampler.stop() == summary


CALLS = {
    "nvmlDeviceGetPowerUsage": ["power_w"],
    "nvmlDeviceGetTotalEnergyConsumption": ["energy_j"],
    "nvmlDeviceGetClockInfo": ["sm_clock_mhz", "memory_clock_mhz"],
    "nvmlDeviceGetTemperature": ["temperature_c"],
    "nvmlDeviceGetMemoryInfo": ["memory_used_bytes"],
    "nvmlDeviceGetComputeRunningProcesses": ["process_bytes", "other_processes_bytes"],
}


@pytest.mark.parametrize("broken", CALLS)
def test_each_call_fails_alone(broken):
    sampler, sample = one_look(FakeNvml([broken]))
    values = dataclasses.asdict(sample)
    assert {name for name, value in values.items() if value is None} == set(CALLS[broken])
    assert 0 not in [value for name, value in values.items() if name != "time_s"]
    summary = sampler.stop()
    assert broken in summary.unavailable[CALLS[broken][0]]


def test_all_calls_fail():
    calls = [*CALLS, "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"]
    sampler, sample = one_look(FakeNvml(calls))
    assert {value for name, value in dataclasses.asdict(sample).items() if name != "time_s"} == {None}
    summary = sampler.stop()
    assert (summary.energy_j, summary.throttled_share, summary.mean_power_w) == (None, None, None)


def test_old_drivers_name_of_throttling():
    sampler, sample = one_look(FakeNvml(["nvmlDeviceGetCurrentClocksEventReasons"]))
    sampler.stop()
    assert sample.throttle_reasons == ("hardware slowdown",)


def test_a_driver_without_each_processs_memory():
    sampler, sample = one_look(FakeNvml(process_memory=None))
    assert (sample.process_bytes, sample.other_processes_bytes) == (None, 4 * GIB)
    assert "process" in sampler.stop().unavailable["process_bytes"]


@pytest.mark.parametrize("broken", ["nvmlInit", "nvmlDeviceGetHandleByUUID"])
def test_no_driver_or_no_such_card(broken):
    with NvmlSampler("GPU-1", pynvml=FakeNvml([broken])) as sampler:
        pass
    assert sampler.samples == ()
    assert sampler.reason.startswith("not available")
    assert sampler.stop().unavailable["all"] == sampler.reason


def test_a_machine_without_a_card_says_so():
    with NvmlSampler(None) as sampler:
        pass
    assert "no NVIDIA card" in sampler.reason
    assert sampler.stop().energy_j is None


def test_the_thread_looks_and_ends():
    import threading

    with NvmlSampler("GPU-1", 0.01, pynvml=FakeNvml()) as sampler:
        for _ in range(500):
            if len(sampler.samples) >= 4:
                break
            threading.Event().wait(0.01)
    assert len(sampler.samples) >= 5
    assert "labkit-nvml" not in [thread.name for thread in threading.enumerate()]


def test_power_over_time_where_the_card_does_not_count():
    samples = (NvmlSample(0.0, 100.0), NvmlSample(1.0, 300.0), NvmlSample(3.0, 300.0))
    summary = summarize_samples(samples)
    assert (summary.energy_j, summary.energy_method) == (800.0, "power over time")
    assert summary.mean_power_w == pytest.approx(800 / 3)
    assert summarize_samples((NvmlSample(0.0, 100.0),)).mean_power_w == 100.0
    assert summarize_samples(()).num_samples == 0


def test_a_counter_that_was_reset_is_not_used():
    samples = (NvmlSample(0.0, 100.0, energy_j=50.0), NvmlSample(2.0, 100.0, energy_j=1.0))
    assert summarize_samples(samples).energy_j == 200.0


@pytest.mark.parametrize("interval_s", [0, -1, 0.001, 61, float("nan")])
def test_interval(interval_s):
    with pytest.raises(OutOfRangeError):
        NvmlSampler(None, interval_s)
