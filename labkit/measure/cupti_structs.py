"""Parameter structures of CUPTI's range profiler and profiler host, laid out as in CUDA 13.0's headers.

`cupti_target.h`, `cupti_profiler_target.h`, `cupti_profiler_host.h`, `cupti_range_profiler.h` of nvidia-cuda-cupti
13.0.85. Each begins with `structSize`, the offset of the end of its last field, by which newer libraries know what an
older caller has. Sizes and offsets were compared with a compiled program; a test keeps what it printed.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_double, c_int, c_size_t, c_uint8, c_uint16, c_uint32, c_void_p
from typing import Any

USER_RANGE, USER_REPLAY = 2, 3
RANGE_PROFILER_TYPE = 0

Names = POINTER(c_char_p)


class Params(ctypes.Structure):
    """A parameter structure; `function` is the call that takes it."""

    function = ""

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        self.structSize = self.declared_size()

    @classmethod
    def declared_size(cls) -> int:
        """`CUPTI_PROFILER_STRUCT_SIZE`: to the end of the last field, padding left out."""
        name, kind = cls._fields_[-1][:2]
        return getattr(cls, name).offset + ctypes.sizeof(kind)


def _params(name: str, function: str, *fields: tuple[str, Any]) -> Any:
    """A structure of `structSize`, `pPriv` and `fields`."""
    head = [("structSize", c_size_t), ("pPriv", c_void_p)]
    return type(name, (Params,), {"_fields_": [*head, *fields], "function": function, "__module__": __name__})


_HOST, _RANGE = ("pHostObject", c_void_p), ("pRangeProfilerObject", c_void_p)
_IMAGE, _IMAGE_SIZE = ("pCounterDataImage", c_void_p), ("counterDataImageSize", c_size_t)
_METRICS = (("ppMetricNames", Names), ("numMetrics", c_size_t))

ProfilerInitialize = _params("ProfilerInitialize", "cuptiProfilerInitialize")
ProfilerDeInitialize = _params("ProfilerDeInitialize", "cuptiProfilerDeInitialize")
DeviceSupported = _params(
    "DeviceSupported", "cuptiProfilerDeviceSupported", ("cuDevice", c_int), ("isSupported", c_int),
    ("architecture", c_int), ("sli", c_int), ("vGpu", c_int), ("confidentialCompute", c_int), ("cmp", c_int),
    ("wsl", c_int), ("api", c_int),
)  # fmt: skip
GetChipName = _params(
    "GetChipName", "cuptiDeviceGetChipName", ("deviceIndex", c_size_t), ("pChipName", c_char_p)
)  # fmt: skip
GetCounterAvailability = _params(
    "GetCounterAvailability", "cuptiProfilerGetCounterAvailability", ("ctx", c_void_p),
    ("counterAvailabilityImageSize", c_size_t), ("pCounterAvailabilityImage", c_void_p),
)  # fmt: skip
HostInitialize = _params(
    "HostInitialize", "cuptiProfilerHostInitialize", ("profilerType", c_int), ("pChipName", c_char_p),
    ("pCounterAvailabilityImage", c_void_p), _HOST,
)  # fmt: skip
HostDeinitialize = _params("HostDeinitialize", "cuptiProfilerHostDeinitialize", _HOST)
HostConfigAddMetrics = _params("HostConfigAddMetrics", "cuptiProfilerHostConfigAddMetrics", _HOST, *_METRICS)
HostGetConfigImageSize = _params(
    "HostGetConfigImageSize", "cuptiProfilerHostGetConfigImageSize", _HOST, ("configImageSize", c_size_t)
)
HostGetConfigImage = _params(
    "HostGetConfigImage", "cuptiProfilerHostGetConfigImage", _HOST, ("configImageSize", c_size_t),
    ("pConfigImage", c_void_p),
)  # fmt: skip
HostGetNumOfPasses = _params(
    "HostGetNumOfPasses", "cuptiProfilerHostGetNumOfPasses", ("configImageSize", c_size_t),
    ("pConfigImage", c_void_p), ("numOfPasses", c_size_t),
)  # fmt: skip
HostEvaluateToGpuValues = _params(
    "HostEvaluateToGpuValues", "cuptiProfilerHostEvaluateToGpuValues", _HOST, _IMAGE, _IMAGE_SIZE,
    ("rangeIndex", c_size_t), *_METRICS, ("pMetricValues", POINTER(c_double)),
)  # fmt: skip
RangeEnable = _params("RangeEnable", "cuptiRangeProfilerEnable", ("ctx", c_void_p), _RANGE)
RangeDisable = _params("RangeDisable", "cuptiRangeProfilerDisable", _RANGE)
RangeSetConfig = _params(
    "RangeSetConfig", "cuptiRangeProfilerSetConfig", _RANGE, ("configSize", c_size_t), ("pConfig", c_void_p),
    _IMAGE_SIZE, _IMAGE, ("range", c_int), ("replayMode", c_int), ("maxRangesPerPass", c_size_t),
    ("numNestingLevels", c_uint16), ("minNestingLevel", c_uint16), ("passIndex", c_size_t),
    ("targetNestingLevel", c_uint16),
)  # fmt: skip
RangeStart = _params("RangeStart", "cuptiRangeProfilerStart", _RANGE)
RangeStop = _params(
    "RangeStop", "cuptiRangeProfilerStop", _RANGE, ("passIndex", c_size_t), ("targetNestingLevel", c_size_t),
    ("isAllPassSubmitted", c_uint8),
)  # fmt: skip
RangePush = _params("RangePush", "cuptiRangeProfilerPushRange", _RANGE, ("pRangeName", c_char_p))
RangePop = _params("RangePop", "cuptiRangeProfilerPopRange", _RANGE)
RangeDecodeData = _params(
    "RangeDecodeData", "cuptiRangeProfilerDecodeData", _RANGE, ("numOfRangeDropped", c_size_t)
)  # fmt: skip
RangeGetCounterDataSize = _params(
    "RangeGetCounterDataSize", "cuptiRangeProfilerGetCounterDataSize", _RANGE, ("pMetricNames", Names),
    ("numMetrics", c_size_t), ("maxNumOfRanges", c_size_t), ("maxNumRangeTreeNodes", c_uint32),
    ("counterDataSize", c_size_t),
)  # fmt: skip
RangeCounterDataImageInitialize = _params(
    "RangeCounterDataImageInitialize", "cuptiRangeProfilerCounterDataImageInitialize", _RANGE,
    ("counterDataSize", c_size_t), ("pCounterData", c_void_p),
)  # fmt: skip
RangeGetCounterDataInfo = _params(
    "RangeGetCounterDataInfo", "cuptiRangeProfilerGetCounterDataInfo", _IMAGE, _IMAGE_SIZE,
    ("numTotalRanges", c_size_t),
)  # fmt: skip

ALL_PARAMS: tuple[Any, ...] = (
    ProfilerInitialize, ProfilerDeInitialize, DeviceSupported, GetChipName, GetCounterAvailability, HostInitialize,
    HostDeinitialize, HostConfigAddMetrics, HostGetConfigImageSize, HostGetConfigImage, HostGetNumOfPasses,
    HostEvaluateToGpuValues, RangeEnable, RangeDisable, RangeSetConfig, RangeStart, RangeStop, RangePush, RangePop,
    RangeDecodeData, RangeGetCounterDataSize, RangeCounterDataImageInitialize, RangeGetCounterDataInfo,
)  # fmt: skip
