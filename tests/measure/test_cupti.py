"""The structures have the layout that a compiled program printed; the call sequence, errors and cures on a fake."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from fake_cupti import FakeCupti

from labkit.measure import cupti, cupti_structs
from labkit.measure.cupti import CURES, Context, CountersUnavailable, RangeProfiler

SIZES = json.loads((Path(__file__).parent / "data" / "cupti_sizes.json").read_text())


@pytest.mark.parametrize("params", cupti_structs.ALL_PARAMS, ids=lambda params: params.function)
def test_layout_is_that_of_the_headers(params):
    recorded = SIZES[params.function]
    layout = {name: [getattr(params, name).offset, getattr(params, name).size] for name, _ in params._fields_}
    assert layout == recorded["offsets"]
    assert params.declared_size() == recorded["declared"]
    assert params().structSize == recorded["declared"]


def test_enums_are_those_of_the_headers():
    assert SIZES["enums"] == {
        "CUPTI_UserRange": cupti_structs.USER_RANGE,
        "CUPTI_UserReplay": cupti_structs.USER_REPLAY,
        "CUPTI_PROFILER_TYPE_RANGE_PROFILER": cupti_structs.RANGE_PROFILER_TYPE,
        "CUPTI_PROFILER_CONFIGURATION_SUPPORTED": cupti.SUPPORTED,
    }


def profiler(fake, metrics=("a.sum", "b.sum")):
    return RangeProfiler(metrics, context=Context(5, 1), cupti=fake)


@pytest.mark.parametrize("passes", [1, 3])
def test_a_call_runs_once_for_each_pass(passes):
    fake, log = FakeCupti((7.0, 8.5), passes), []
    with profiler(fake) as open_profiler:
        values = open_profiler.run(lambda: log.append("call"), lambda: None, lambda: log.append("before"))
    assert values == ({"a.sum": 7.0, "b.sum": 8.5},)
    assert log == ["before", "call"] * passes
    one = [f"cuptiRangeProfiler{name}" for name in ("Start", "PushRange", "PopRange", "Stop")]
    assert [name for name in fake.calls if name in one] == one * passes
    closing = ["cuptiRangeProfilerDisable", "cuptiProfilerHostDeinitialize", "cuptiProfilerDeInitialize"]
    assert fake.calls[-3:] == closing


def test_repeated_counts_are_ranges_of_the_same_passes():
    fake, log = FakeCupti((7.0, 8.5), 2), []
    with RangeProfiler(("a.sum", "b.sum"), context=Context(5, 1), cupti=fake, max_ranges=3) as open_profiler:
        values = open_profiler.run(lambda: log.append("call"), lambda: None, lambda: log.append("before"))
    assert values == ({"a.sum": 7.0, "b.sum": 8.5},) * 3
    assert log == ["before", "call"] * 6
    assert fake.calls.count("cuptiRangeProfilerStart") == fake.calls.count("cuptiRangeProfilerStop") == 2


def test_fewer_ranges_than_were_pushed_are_refused():
    class Merges(FakeCupti):
        def _cuptiRangeProfilerGetCounterDataInfo(self, params):
            params.numTotalRanges = 1

    open_profiler = RangeProfiler(("a.sum",), context=Context(5, 1), cupti=Merges((7.0,)), max_ranges=2)
    with open_profiler, pytest.raises(CountersUnavailable, match="1 of 2 ranges"):
        open_profiler.run(lambda: None, lambda: None)


def test_code_that_runs_once_needs_one_pass():
    with profiler(FakeCupti(passes=2)) as open_profiler, pytest.raises(CountersUnavailable, match="2 passes"):
        open_profiler.configure_once()


def test_the_range_ends_when_the_call_fails():
    fake = FakeCupti((1.0, 1.0))
    with profiler(fake) as open_profiler, pytest.raises(ZeroDivisionError):
        open_profiler.run(lambda: 1 / 0, lambda: None)
    assert "cuptiRangeProfilerStop" in fake.calls
    assert fake.calls[-1] == "cuptiProfilerDeInitialize"


OPENING = [
    "cuptiProfilerInitialize", "cuptiProfilerDeviceSupported", "cuptiDeviceGetChipName",
    "cuptiProfilerGetCounterAvailability", "cuptiProfilerHostInitialize", "cuptiProfilerHostConfigAddMetrics",
    "cuptiProfilerHostGetConfigImageSize", "cuptiProfilerHostGetConfigImage", "cuptiProfilerHostGetNumOfPasses",
    "cuptiRangeProfilerEnable", "cuptiRangeProfilerGetCounterDataSize",
]  # fmt: skip


@pytest.mark.parametrize("function", OPENING)
def test_whatever_fails_is_named_and_everything_is_closed(function):
    fake = FakeCupti(fail={function: 999})
    with pytest.raises(CountersUnavailable, match=function):
        profiler(fake)
    opened = fake.calls.count("cuptiRangeProfilerEnable") and function != "cuptiRangeProfilerEnable"
    assert fake.calls.count("cuptiRangeProfilerDisable") == (
        1 if opened and fake.calls.index("cuptiRangeProfilerEnable") < len(fake.calls) - 1 else 0
    )
    if function != "cuptiProfilerInitialize":
        assert fake.calls[-1] == "cuptiProfilerDeInitialize"


@pytest.mark.parametrize("code", sorted(CURES))
def test_known_errors_come_with_their_cure(code):
    with pytest.raises(CountersUnavailable) as caught:
        profiler(FakeCupti(fail={"cuptiRangeProfilerEnable": code}))
    assert caught.value.works == CURES[code]
    assert "\n" not in str(caught.value)


def test_a_card_without_counters_says_why():
    with pytest.raises(CountersUnavailable, match="virtual"):
        profiler(FakeCupti(supported=1))


def test_permission(tmp_path):
    params = tmp_path / "params"
    params.write_text("EnableMSI: 1\nRmProfilingAdminOnly: 1\n")
    with pytest.raises(CountersUnavailable, match="NVreg_RestrictProfilingToAdminUsers"):
        _check_without_capabilities(params, 1000)
    cupti.check_permission(str(params), uid=0)
    params.write_text("RmProfilingAdminOnly: 0\n")
    cupti.check_permission(str(params), uid=1000)
    cupti.check_permission(str(tmp_path / "none"), uid=1000)


def _check_without_capabilities(params, uid):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cupti, "_has_sys_admin", lambda: False)
        cupti.check_permission(str(params), uid=uid)


@pytest.mark.parametrize(
    ("mask", "answer"), [("0000000000200000", True), ("0000004000000000", True), ("0", False), ("x", False)]
)
def test_capabilities(tmp_path, mask, answer):
    status = tmp_path / "status"
    status.write_text(f"Name:\tpython\nCapEff:\t{mask}\n")
    assert cupti._has_sys_admin(str(status)) is answer


class Driver:
    """libcuda whose current context is one of the card `device`; 0 is no context."""

    def __init__(self, handle, device, code=0):
        self.handle, self.device, self.code = handle, device, code

    def cuCtxGetCurrent(self, reference):
        reference._obj.value = self.handle
        return self.code

    def cuCtxGetDevice(self, reference):
        reference._obj.value = self.device
        return 0 if self.handle else 201


def test_the_card_that_counts_is_that_of_the_context(monkeypatch):
    """A process that sees two cards and works on the second, or on any with CUDA_VISIBLE_DEVICES."""
    assert cupti.current_context(Driver(7, 1)) == Context(7, 1)
    monkeypatch.setattr(cupti, "current_context", lambda: Context(5, 1))
    fake = FakeCupti()
    RangeProfiler(("a.sum",), cupti=fake).close()
    assert fake.devices == {1}


@pytest.mark.parametrize("driver", [Driver(0, 0), Driver(7, 0, code=100)])
def test_a_thread_without_a_context_has_nothing_to_count(driver):
    with pytest.raises(CountersUnavailable, match="no CUDA context"):
        cupti.current_context(driver)


def test_without_a_driver_it_is_one_line():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a driver")
    with pytest.raises(CountersUnavailable, match="no CUDA") as caught:
        cupti.current_context()
    assert "\n" not in str(caught.value)
    assert caught.value.works
