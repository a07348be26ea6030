"""Hardware counters of user ranges through CUPTI's range profiler, by ctypes on the library that torch brings.

A range may run more than once: the counters that a card collects together are one pass. `RangeProfiler.run` repeats a
call until all passes are in; a metric set of one pass is needed where the code must run once only. A pass costs about
50 ms whatever is counted, so repeated counts of a call are ranges of the same passes.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from labkit.errors import UnsupportedError
from labkit.measure import cupti_structs as c
from labkit.text import plain

LIBRARY_NAMES = ("libcupti.so.13", "libcupti.so.12")
SUPPORTED = 3
# What to do about CUPTI's errors (cupti_result.h); other codes are shown with CUPTI's own words.
CURES: Mapping[int, str] = MappingProxyType(
    {
        17: "a set of metrics that this card has",
        26: "ending the other program that uses this card's counters",
        27: "a card of compute capability 7.5 or later",
        33: "a card that is not virtual, or ncu on the host",
        35: "root, CAP_SYS_ADMIN, or the driver option NVreg_RestrictProfilingToAdminUsers=0",
        39: "ending the other profiler of this process (torch.profiler, nsys, ncu): CUPTI serves one at a time",
        40: "permission for counters from the host of this virtual card",
        41: "a card without confidential computing",
        42: "a card that is not a mining card",
        43: "a whole card instead of a MIG slice",
        44: "a card without SLI",
        45: "Linux itself instead of WSL, or counters allowed in the NVIDIA control panel of Windows",
        46: "a CUPTI release that knows this chip",
    }
)


class CountersUnavailable(UnsupportedError):
    """This method cannot count here; the message says why and `works` what would help."""


def find_library() -> ctypes.CDLL:
    """The CUPTI that this process has loaded already, else the one of torch's CUDA wheels, else the system's.

    Raises:
        CountersUnavailable: there is none.
    """
    for path in (*_loaded_libraries(), *_wheel_libraries(), *LIBRARY_NAMES):
        try:
            library = ctypes.CDLL(path)
        except OSError:
            continue
        if hasattr(library, "cuptiRangeProfilerEnable"):
            return library
    raise CountersUnavailable(
        "CUPTI with the range profiler was not found", works="torch for CUDA 12.6 or later, which brings libcupti"
    )


def _loaded_libraries() -> list[str]:
    try:
        lines = Path("/proc/self/maps").read_text("utf-8", "replace").splitlines()
    except OSError:
        return []
    return sorted({line.split(maxsplit=5)[5] for line in lines if "/libcupti.so" in line})


def _wheel_libraries() -> list[str]:
    folders = [Path(entry) / "nvidia" for entry in sys.path if entry]
    found = [path for folder in folders for path in folder.glob("c*/lib/libcupti.so.1[2-9]")]
    return [str(path) for path in sorted(found, reverse=True)]


def check_permission(params_file: str = "/proc/driver/nvidia/params", uid: int | None = None) -> None:
    """Raises CountersUnavailable where the driver gives counters to administrators only and this is none."""
    try:
        text = Path(params_file).read_text("utf-8", "replace")
    except OSError:
        return
    restricted = any(line.replace(" ", "") == "RmProfilingAdminOnly:1" for line in text.splitlines())
    if restricted and (os.geteuid() if uid is None else uid) != 0 and not _has_sys_admin():
        raise CountersUnavailable("the driver gives counters to administrators only", works=CURES[35])


def _has_sys_admin(status_file: str = "/proc/self/status") -> bool:
    """Whether CAP_SYS_ADMIN (bit 21) or CAP_PERFMON (bit 38) is in effect."""
    try:
        lines = Path(status_file).read_text("utf-8").splitlines()
        effective = int(next(line.split()[1] for line in lines if line.startswith("CapEff:")), 16)
    except (OSError, ValueError, IndexError, StopIteration):
        return False
    return bool(effective & (1 << 21 | 1 << 38))


class Cupti:
    """CUPTI's functions; each takes one parameter structure and its errors become `CountersUnavailable`."""

    def __init__(self, library: Any = None) -> None:
        self._library = library if library is not None else find_library()

    def call(self, params: Any) -> Any:
        """Call the function of `params` with it and return it filled.

        Raises:
            CountersUnavailable: the function is missing or failed.
        """
        function = getattr(self._library, params.function, None)
        if function is None:
            raise CountersUnavailable(f"this CUPTI has no {params.function}", works="torch for CUDA 12.6 or later")
        code = function(ctypes.byref(params))
        if code:
            raise CountersUnavailable(
                f"{params.function} failed: {self._name(code)}", works=CURES.get(code, "the next method")
            )
        return params

    def _name(self, code: int) -> str:
        text = ctypes.c_char_p()
        describe = getattr(self._library, "cuptiGetResultString", None)
        if describe is None or describe(ctypes.c_int(code), ctypes.byref(text)) or not text.value:
            return f"error {code}"
        return plain(text.value.decode("utf-8", "replace"), 100)


class Context(NamedTuple):
    """A CUDA context and the index of its card among those that CUDA_VISIBLE_DEVICES leaves."""

    handle: int
    device_index: int


def current_context(driver: Any = None) -> Context:
    """The calling thread's CUDA context.

    Args:
        driver: libcuda, for tests.

    Raises:
        CountersUnavailable: no driver, or nothing ran on a card yet.
    """
    context, device = ctypes.c_void_p(), ctypes.c_int()
    try:
        driver = driver or ctypes.CDLL("libcuda.so.1")
        code = driver.cuCtxGetCurrent(ctypes.byref(context)) or driver.cuCtxGetDevice(ctypes.byref(device))
    except (OSError, AttributeError) as error:
        raise CountersUnavailable(f"no CUDA driver: {plain(error, 120)}", works="a machine with a card") from error
    if code or not context.value:
        raise CountersUnavailable("no CUDA context in this thread", works="a tensor on the card before counting")
    return Context(context.value, device.value)


class RangeProfiler:
    """Counters of user ranges of the current CUDA context; one at a time in a process.

    Args:
        metrics: NVIDIA's metric names.
        context: whose card counts; None takes the thread's current one.
        cupti: the library, for tests.
        max_ranges: ranges of a pass, at most.

    Raises:
        CountersUnavailable: why not, with the cure.
    """

    def __init__(
        self, metrics: Sequence[str], context: Context | None = None, cupti: Cupti | None = None, max_ranges: int = 1
    ) -> None:
        self.metrics = tuple(metrics)
        self._max_ranges = max_ranges
        self._range_names = [f"labkit {index}".encode() for index in range(max_ranges)]
        self._names = (ctypes.c_char_p * len(self.metrics))(*(name.encode() for name in self.metrics))
        self._host = self._range = self._initialized = None
        self._cupti = cupti or Cupti()
        try:
            self._open(context or current_context())
        except BaseException:
            self.close()
            raise

    def _open(self, context: Context) -> None:
        call = self._cupti.call
        self._initialized = call(c.ProfilerInitialize())
        support = call(c.DeviceSupported(cuDevice=context.device_index))
        if support.isSupported != SUPPORTED:
            raise CountersUnavailable("this card or its set-up has no counters for programs", works=_support(support))
        # Chip name and availability image stay alive as long as the host object that was made from them.
        self._chip = call(c.GetChipName(deviceIndex=context.device_index)).pChipName
        size = call(c.GetCounterAvailability(ctx=context.handle)).counterAvailabilityImageSize
        self._available = ctypes.create_string_buffer(size)
        call(c.GetCounterAvailability(
            ctx=context.handle, counterAvailabilityImageSize=size,
            pCounterAvailabilityImage=ctypes.addressof(self._available),
        ))  # fmt: skip
        self._host = call(c.HostInitialize(
            profilerType=c.RANGE_PROFILER_TYPE, pChipName=self._chip,
            pCounterAvailabilityImage=ctypes.addressof(self._available),
        )).pHostObject  # fmt: skip
        call(c.HostConfigAddMetrics(pHostObject=self._host, ppMetricNames=self._names, numMetrics=len(self.metrics)))
        size = call(c.HostGetConfigImageSize(pHostObject=self._host)).configImageSize
        self._config = ctypes.create_string_buffer(size)
        config = {"configImageSize": size, "pConfigImage": ctypes.addressof(self._config)}
        call(c.HostGetConfigImage(pHostObject=self._host, **config))
        self.num_passes = int(call(c.HostGetNumOfPasses(**config)).numOfPasses)
        self._range = call(c.RangeEnable(ctx=context.handle)).pRangeProfilerObject
        size = call(c.RangeGetCounterDataSize(
            pRangeProfilerObject=self._range, pMetricNames=self._names, numMetrics=len(self.metrics),
            maxNumOfRanges=self._max_ranges, maxNumRangeTreeNodes=self._max_ranges,
        )).counterDataSize  # fmt: skip
        self._data = ctypes.create_string_buffer(size)

    def _configure(self) -> None:
        """An empty image for the ranges, and the passes from the first."""
        data, size = ctypes.addressof(self._data), len(self._data)
        ctypes.memset(data, 0, size)
        self._cupti.call(c.RangeCounterDataImageInitialize(
            pRangeProfilerObject=self._range, counterDataSize=size, pCounterData=data
        ))  # fmt: skip
        self._cupti.call(c.RangeSetConfig(
            pRangeProfilerObject=self._range, configSize=len(self._config), pConfig=ctypes.addressof(self._config),
            counterDataImageSize=size, pCounterDataImage=data, range=c.USER_RANGE, replayMode=c.USER_REPLAY,
            maxRangesPerPass=self._max_ranges, numNestingLevels=1, minNestingLevel=1, passIndex=0, targetNestingLevel=1,
        ))  # fmt: skip

    def run(
        self, call: Callable[[], object], synchronize: Callable[[], object],
        before: Callable[[], object] = lambda: None,
    ) -> tuple[dict[str, float], ...]:  # fmt: skip
        """Metric → value for each of `max_ranges` executions of `call`, which all run once for each pass.

        Args:
            synchronize: waits until the card is done; counters cover finished work.
            before: runs before each execution outside its range, such as a flush of the L2.
        """
        self._configure()
        for _ in range(max(1, self.num_passes)):
            self._start()
            try:
                for index in range(self._max_ranges):
                    before()
                    synchronize()
                    self._push(index)
                    try:
                        call()
                        synchronize()
                    finally:
                        self._pop()
            finally:
                submitted = self._stop()
            if submitted:
                return self.read_all()
        raise CountersUnavailable(f"the card did not deliver all of {self.num_passes} passes", works="fewer metrics")

    def configure_once(self) -> None:
        """Prepare for one `begin` … `end` … `read` around code that runs once.

        Raises:
            CountersUnavailable: the metrics need more than one pass.
        """
        if self.num_passes != 1:
            raise CountersUnavailable(
                f"these {len(self.metrics)} metrics need {self.num_passes} passes and the code runs once",
                works="fewer metrics, or a call that can be repeated",
            )
        self._configure()

    def begin(self) -> None:
        """Counting begins; the card is idle."""
        self._start()
        self._push(0)

    def end(self) -> bool:
        """Counting ends; the card is idle. True when all passes are in."""
        self._pop()
        return self._stop()

    def read(self) -> dict[str, float]:
        """The values of the range that just ended."""
        return self.read_all()[0]

    def read_all(self) -> tuple[dict[str, float], ...]:
        """The values of each range of the passes that just ended.

        Raises:
            CountersUnavailable: there are fewer than were pushed.
        """
        self._cupti.call(c.RangeDecodeData(pRangeProfilerObject=self._range))
        image = {"pCounterDataImage": ctypes.addressof(self._data), "counterDataImageSize": len(self._data)}
        found = self._cupti.call(c.RangeGetCounterDataInfo(**image)).numTotalRanges
        if found < self._max_ranges:
            raise CountersUnavailable(
                f"the card counted {found} of {self._max_ranges} ranges", works="work on the card in each range"
            )
        return tuple(self._evaluate(index, image) for index in range(self._max_ranges))

    def _evaluate(self, index: int, image: Mapping[str, int]) -> dict[str, float]:
        values = (ctypes.c_double * len(self.metrics))()
        self._cupti.call(c.HostEvaluateToGpuValues(
            pHostObject=self._host, rangeIndex=index, ppMetricNames=self._names, numMetrics=len(self.metrics),
            pMetricValues=values, **image,
        ))  # fmt: skip
        return dict(zip(self.metrics, values, strict=True))

    def _start(self) -> None:
        self._cupti.call(c.RangeStart(pRangeProfilerObject=self._range))

    def _push(self, index: int) -> None:
        self._cupti.call(c.RangePush(pRangeProfilerObject=self._range, pRangeName=self._range_names[index]))

    def _pop(self) -> None:
        self._cupti.call(c.RangePop(pRangeProfilerObject=self._range))

    def _stop(self) -> bool:
        return bool(self._cupti.call(c.RangeStop(pRangeProfilerObject=self._range)).isAllPassSubmitted)

    def close(self) -> None:
        """Let go of the card's counters; more than once is fine."""
        closing: list[Any] = []
        if self._range:
            closing.append(c.RangeDisable(pRangeProfilerObject=self._range))
        if self._host:
            closing.append(c.HostDeinitialize(pHostObject=self._host))
        if self._initialized is not None:
            closing.append(c.ProfilerDeInitialize())
        self._host = self._range = self._initialized = None
        for params in closing:
            try:
                self._cupti.call(params)
            except CountersUnavailable:
                continue

    def __enter__(self) -> RangeProfiler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _support(support: Any) -> str:
    """Which part of CUPTI's answer is the reason, as a cure."""
    cures = {
        "architecture": CURES[27], "sli": CURES[44], "vGpu": CURES[40], "confidentialCompute": CURES[41],
        "cmp": CURES[42], "wsl": CURES[45],
    }  # fmt: skip
    reasons = [cure for field, cure in cures.items() if getattr(support, field) not in (0, SUPPORTED)]
    return "; ".join(reasons) or "the next method"
