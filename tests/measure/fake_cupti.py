"""A CUPTI that answers as the library does, call by call, and notes what it was called with."""

import ctypes


class FakeCupti:
    """`fail` maps a function's name to the code that it returns; `values` are what the ranges count."""

    def __init__(self, values=(), passes=1, fail=None, supported=3):
        self.values, self.passes, self.fail, self.supported = list(values), passes, fail or {}, supported
        self.calls, self.submitted, self.pushed, self.devices = [], 0, [], set()

    def call(self, params):
        from labkit.measure.cupti import Cupti

        return Cupti(self).call(params)

    def __getattr__(self, name):
        if not name.startswith("cupti"):
            raise AttributeError(name)
        if name == "cuptiGetResultString":
            return self._describe
        return lambda reference: self._answer(name, reference._obj)

    def _describe(self, code, reference):
        reference._obj.value = {17: b"CUPTI_ERROR_INVALID_METRIC_NAME"}.get(code.value, b"CUPTI_ERROR_X")
        return 0

    def _answer(self, name, params):
        self.calls.append(name)
        assert params.structSize == type(params).declared_size()
        if self.fail.get(name):
            return self.fail[name]
        fill = getattr(self, f"_{name}", None)
        if fill is not None:
            fill(params)
        return 0

    def _cuptiProfilerDeviceSupported(self, params):
        self.devices.add(params.cuDevice)
        params.isSupported, params.vGpu = self.supported, 2 if self.supported != 3 else 3

    def _cuptiDeviceGetChipName(self, params):
        self.devices.add(params.deviceIndex)
        params.pChipName = b"GH100"

    def _cuptiProfilerGetCounterAvailability(self, params):
        params.counterAvailabilityImageSize = 64

    def _cuptiProfilerHostInitialize(self, params):
        assert params.pChipName == b"GH100"
        params.pHostObject = 11

    def _cuptiProfilerHostGetConfigImageSize(self, params):
        params.configImageSize = 32

    def _cuptiProfilerHostGetNumOfPasses(self, params):
        params.numOfPasses = self.passes

    def _cuptiRangeProfilerEnable(self, params):
        assert params.ctx == 5
        params.pRangeProfilerObject = 12

    def _cuptiRangeProfilerGetCounterDataSize(self, params):
        params.counterDataSize = 128

    def _cuptiRangeProfilerSetConfig(self, params):
        assert (params.range, params.replayMode, params.numNestingLevels, params.targetNestingLevel) == (2, 3, 1, 1)
        assert params.counterDataImageSize == 128

    def _cuptiRangeProfilerStart(self, params):
        self.pushed = []

    def _cuptiRangeProfilerPushRange(self, params):
        assert params.pRangeName not in self.pushed
        self.pushed.append(params.pRangeName)

    def _cuptiRangeProfilerStop(self, params):
        self.submitted += 1
        params.isAllPassSubmitted = self.submitted % self.passes == 0

    def _cuptiRangeProfilerGetCounterDataInfo(self, params):
        params.numTotalRanges = len(self.pushed)

    def _cuptiProfilerHostEvaluateToGpuValues(self, params):
        assert params.rangeIndex < len(self.pushed)
        values = ctypes.cast(params.pMetricValues, ctypes.POINTER(ctypes.c_double))
        for index in range(params.numMetrics):
            values[index] = self.values[index]
