"""Power, clocks, temperature, throttling and memory of a card while something runs, from NVML in a thread of its own.

Each of NVML's calls may fail alone (MIG, old drivers, missing rights): then that field is None and the reason is kept;
nothing that was not read is ever 0.
"""

from __future__ import annotations

import importlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from labkit.errors import OutOfRangeError
from labkit.text import plain

# nvmlClocksEventReason… bits (nvml.h); those that are no limit of speed are left out.
THROTTLE_REASONS: Mapping[int, str] = MappingProxyType(
    {
        0x4: "power cap", 0x8: "hardware slowdown", 0x10: "sync boost", 0x20: "thermal (software)",
        0x40: "thermal (hardware)", 0x80: "power brake", 0x100: "display clocks",
    }
)  # fmt: skip
_CLOCK_SM, _CLOCK_MEM, _TEMPERATURE_GPU = 1, 2, 0
MAX_SAMPLES = 200_000


@dataclass(frozen=True)
class NvmlSample:
    """One look; None is "not available".

    Attributes:
        time_s: since the sampler started.
        throttle_reasons: names of what holds the clocks down; () for nothing.
        memory_used_bytes: of the whole card, without what the driver reserves where NVML can tell.
        process_bytes, other_processes_bytes: of this process, and of all others.
        energy_j: counted by the card since the driver was loaded.
    """

    time_s: float
    power_w: float | None = None
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    temperature_c: int | None = None
    throttle_reasons: tuple[str, ...] | None = None
    memory_used_bytes: int | None = None
    process_bytes: int | None = None
    other_processes_bytes: int | None = None
    energy_j: float | None = None


@dataclass(frozen=True)
class NvmlSummary:
    """A run as the card saw it.

    Attributes:
        energy_j: from the card's own counter, else power over time; None without either.
        energy_method: which of them, "" without.
        throttled_share: share of the samples in which something held the clocks down.
        unavailable: field → why NVML did not say.
    """

    num_samples: int
    duration_s: float
    energy_j: float | None
    energy_method: str
    mean_power_w: float | None
    max_power_w: float | None
    min_sm_clock_mhz: int | None
    max_temperature_c: int | None
    throttle_reasons: tuple[str, ...]
    throttled_share: float | None
    max_memory_used_bytes: int | None
    unavailable: Mapping[str, str]


class NvmlSampler:
    """Looks at a card every `interval_s` between `start` and `stop`; also a context manager.

    Args:
        uuid: NVML's identity of the card; None for a machine without one, which is then said.
        interval_s: 0.01 to 60 seconds.
        pynvml: the module, for tests.
        clock: monotonic seconds, for tests.

    Attributes:
        reason: why there is nothing at all, "" where there is.
    """

    def __init__(
        self, uuid: str | None, interval_s: float = 0.1, pynvml: Any = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        if not 0.01 <= interval_s <= 60:
            raise OutOfRangeError(f"interval_s is {interval_s:g}", needed="0.01 to 60 seconds", knob="interval_s")
        self.reason, self.interval_s = "", interval_s
        self._uuid, self._nvml, self._clock = uuid, pynvml, clock
        self._handle: Any = None
        self._samples: list[NvmlSample] = []
        self._unavailable: dict[str, str] = {}
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        self._start_s = clock()

    @property
    def samples(self) -> tuple[NvmlSample, ...]:
        """What was seen so far."""
        return tuple(self._samples)

    @property
    def last(self) -> NvmlSample | None:
        """The newest look; None before the first."""
        return self._samples[-1] if self._samples else None

    def start(self) -> NvmlSampler:
        """Begin; without a card only `reason` is set."""
        self._start_s = self._clock()
        if self._uuid is None:
            self.reason = "not available: no NVIDIA card in this run"
            return self
        try:
            self._nvml = self._nvml or importlib.import_module("pynvml")
            self._nvml.nvmlInit()
            self._handle = self._nvml.nvmlDeviceGetHandleByUUID(self._uuid)
        except Exception as error:
            self.reason = f"not available: {plain(error, 200) or type(error).__name__}"
            return self
        self.look()
        self._thread = threading.Thread(target=self._loop, name="labkit-nvml", daemon=True)
        self._thread.start()
        return self

    def stop(self) -> NvmlSummary:
        """End, with a last look; a second call gives the same summary."""
        if self._thread is not None:
            self._done.set()
            self._thread.join()
            self._thread = None
            self.look()
        return summarize_samples(self.samples, {"all": self.reason} if self.reason else self._unavailable)

    def __enter__(self) -> NvmlSampler:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _loop(self) -> None:
        while not self._done.wait(self.interval_s) and len(self._samples) < MAX_SAMPLES:
            self.look()

    def look(self) -> NvmlSample:
        """One sample now; it is kept."""
        now_s = self._clock() - self._start_s
        power_mw = self._ask("power_w", "nvmlDeviceGetPowerUsage")
        energy_mj = self._ask("energy_j", "nvmlDeviceGetTotalEnergyConsumption")
        process, others = self._processes()
        sample = NvmlSample(
            time_s=now_s,
            power_w=None if power_mw is None else power_mw / 1000,
            sm_clock_mhz=self._ask("sm_clock_mhz", "nvmlDeviceGetClockInfo", _CLOCK_SM),
            memory_clock_mhz=self._ask("memory_clock_mhz", "nvmlDeviceGetClockInfo", _CLOCK_MEM),
            temperature_c=self._ask("temperature_c", "nvmlDeviceGetTemperature", _TEMPERATURE_GPU),
            throttle_reasons=self._throttling(),
            memory_used_bytes=self._memory_used(),
            process_bytes=process,
            other_processes_bytes=others,
            energy_j=None if energy_mj is None else energy_mj / 1000,
        )
        self._samples.append(sample)
        return sample

    def _ask(self, field: str, function: str, *arguments: Any) -> Any:
        """NVML's number, or None with the reason under `field`."""
        try:
            answer = getattr(self._nvml, function)(self._handle, *arguments)
        except Exception as error:
            self._unavailable[field] = plain(error, 160) or type(error).__name__
            return None
        self._unavailable.pop(field, None)
        return answer

    def _throttling(self) -> tuple[str, ...] | None:
        bits = None
        for name in ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"):
            bits = self._ask("throttle_reasons", name)
            if bits is not None:
                return tuple(text for bit, text in THROTTLE_REASONS.items() if bits & bit)
        return None

    def _memory_used(self) -> int | None:
        """`used` of the second version, which leaves out the driver's share; else the first version's."""
        version = getattr(self._nvml, "nvmlMemory_v2", None)
        memory = None
        if version is not None:
            memory = self._ask("memory_used_bytes", "nvmlDeviceGetMemoryInfo", version)
        if memory is None:
            memory = self._ask("memory_used_bytes", "nvmlDeviceGetMemoryInfo")
        used = getattr(memory, "used", None)
        return used if isinstance(used, int) else None

    def _processes(self) -> tuple[int | None, int | None]:
        """Bytes of this process and of others; `usedGpuMemory` is None where the driver does not tell."""
        running = self._ask("process_bytes", "nvmlDeviceGetComputeRunningProcesses")
        if running is None:
            return None, None
        mine = [process.usedGpuMemory for process in running if process.pid == os.getpid()]
        others = [process.usedGpuMemory for process in running if process.pid != os.getpid()]
        if None in mine or None in others:
            self._unavailable["process_bytes"] = "the driver does not tell each process's memory"
        own = None if not mine or None in mine else sum(mine)
        return own, None if None in others else sum(others)


def summarize_samples(samples: tuple[NvmlSample, ...], unavailable: Mapping[str, str] | None = None) -> NvmlSummary:
    """Extremes, means over time, and energy of samples in order of time."""
    energy_j, method = _energy(samples)
    duration_s = samples[-1].time_s - samples[0].time_s if samples else 0.0
    held = [sample.throttle_reasons for sample in samples if sample.throttle_reasons is not None]
    powers, clocks = _known(samples, "power_w"), _known(samples, "sm_clock_mhz")
    by_time = energy_j / duration_s if energy_j is not None and duration_s > 0 else None
    mean = by_time if by_time is not None else sum(powers) / len(powers) if powers else None
    return NvmlSummary(
        num_samples=len(samples),
        duration_s=duration_s,
        energy_j=energy_j,
        energy_method=method,
        mean_power_w=mean,
        max_power_w=max(powers, default=None),
        min_sm_clock_mhz=min(clocks, default=None),
        max_temperature_c=max(_known(samples, "temperature_c"), default=None),
        throttle_reasons=tuple(sorted({name for names in held for name in names})),
        throttled_share=sum(bool(names) for names in held) / len(held) if held else None,
        max_memory_used_bytes=max(_known(samples, "memory_used_bytes"), default=None),
        unavailable=MappingProxyType(dict(unavailable or {})),
    )


def _known(samples: tuple[NvmlSample, ...], field: str) -> list[Any]:
    return [getattr(sample, field) for sample in samples if getattr(sample, field) is not None]


def _energy(samples: tuple[NvmlSample, ...]) -> tuple[float | None, str]:
    """The card's counter from first to last sample; else power by the trapezoid rule."""
    counted = _known(samples, "energy_j")
    if len(counted) >= 2 and counted[-1] >= counted[0]:
        return counted[-1] - counted[0], "energy counter of the card"
    points = [(sample.time_s, sample.power_w) for sample in samples if sample.power_w is not None]
    if len(points) < 2:
        return None, ""
    total = sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in itertools.pairwise(points))
    return total, "power over time"
