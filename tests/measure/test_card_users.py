"""Who else is on a card: a fake NVML, whatever it says."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from labkit.measure.card_users import other_programs


def nvml(*processes, fails: bool = False):
    def running(handle):
        if fails:
            raise RuntimeError("no permission")
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in processes]

    return SimpleNamespace(
        nvmlInit=lambda: None, nvmlDeviceGetHandleByUUID=lambda uuid: uuid, nvmlDeviceGetComputeRunningProcesses=running
    )


@pytest.mark.parametrize(
    ("processes", "text"),
    [
        ((), ""),
        (((os.getpid(), 5 * 2**30),), ""),
        (((11, 2**30), (12, 120 * 2**30)), "process 12 holds 120 GiB, process 11 holds 1.00 GiB"),
        (((11, None),), "process 11 holds memory"),
        (tuple((pid, 2**30) for pid in range(21, 26)), "process 23 holds 1.00 GiB and 2 more"),
    ],
)
def test_others_are_named_with_what_they_hold(processes, text):
    found = other_programs("GPU-1", nvml(*processes))
    assert found.endswith(text)
    assert bool(found) is bool(text)


def test_silence_of_nvml_is_no_text():
    assert other_programs(None, nvml((11, 5))) == ""
    assert other_programs("GPU-1", nvml(fails=True)) == ""
    assert other_programs("GPU-1", SimpleNamespace()) == ""
