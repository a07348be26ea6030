"""The chain of methods: the first that works gives the numbers, and the ones before it say why they did not."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from fake_cupti import FakeCupti

from labkit.measure import counters as chain
from labkit.measure.counters import CORE_METRICS, METRICS, Replay, counters, to_counters
from labkit.measure.cupti import Context, CountersUnavailable, RangeProfiler
from labkit.measure.ncu import NcuKernel
from labkit.measure.run_record import Counters

VALUES = (1000.0, 250.0, 8000.0, 4000.0, 100.0, 25.0, 50.0)
SIMULATED = Counters("simulated (test)", "H200", 0.5, 10.0, 5.0, 2.0)


@pytest.fixture(autouse=True)
def _allowed(monkeypatch):
    monkeypatch.setattr(chain, "check_permission", lambda: None)


def opener(fake):
    return lambda metrics, **more: RangeProfiler(metrics, Context(5, 0), fake, **more)


def scope(fake, **rest):
    return counters(card="H200", synchronize=lambda: None, open_profiler=opener(fake), **rest)


def test_measured_in_process():
    ran = []
    with scope(FakeCupti(VALUES), simulated=lambda: SIMULATED) as counting:
        ran.append(1)
    found = counting.result.counters
    assert ran == [1]
    assert (found.l2_hit_rate, found.dram_bytes, found.kernel_time_s) == (0.75, 8000.0, pytest.approx(4e-6))
    assert found.dram_bytes_per_s == pytest.approx(2e9)
    assert found.method == "measured (CUPTI range profiler)"
    assert found.card == "H200"
    assert counting.result.notes == ()
    assert counting.result.values[chain.OCCUPANCY] == 0.25


def test_more_than_one_pass_leaves_the_core_metrics():
    class TwoThenOne(FakeCupti):
        def _cuptiProfilerHostGetNumOfPasses(self, params):
            params.numOfPasses = 2 if self.calls.count("cuptiProfilerHostGetNumOfPasses") == 1 else 1

    with scope(TwoThenOne(VALUES)) as counting:
        pass
    assert set(counting.result.values) == set(CORE_METRICS)
    assert "2 passes" in counting.result.notes[0]


class OnePass(FakeCupti):
    """Holds the metrics in one pass only without what `splits` names; knows nothing of what `unknown` names."""

    def __init__(self, splits=(), unknown=()):
        super().__init__()
        self.splits, self.unknown, self.names = splits, unknown, ()

    def _answer(self, name, params):
        if name == "cuptiProfilerHostConfigAddMetrics":
            self.names = [params.ppMetricNames[index].decode() for index in range(params.numMetrics)]
            if set(self.names) & set(self.unknown):
                return 17
        return super()._answer(name, params)

    def _cuptiProfilerHostGetNumOfPasses(self, params):
        params.numOfPasses = 2 if all(set(self.names) & set(group) for group in self.splits) and self.splits else 1

    def _cuptiProfilerHostEvaluateToGpuValues(self, params):
        found = dict(zip(METRICS, VALUES, strict=True)) | {chain.SM_READ_SECTORS: 1250.0}
        self.values = [found[name] for name in self.names]
        super()._cuptiProfilerHostEvaluateToGpuValues(params)


def test_a_card_that_counts_reads_and_misses_in_different_passes_gives_the_sms_reads():
    """As an H200 does; what meets before the L2 is then a hit."""
    with scope(OnePass(splits=((chain.READ_SECTORS,), (chain.READ_MISSES,)))) as counting:
        pass
    found, notes = counting.result.counters, counting.result.notes
    assert (found.l2_hit_rate, found.l2_read_bytes, found.dram_bytes) == (1 - 250 / 1250, 1250 * 32, 8000.0)
    assert found.dram_write_bytes == 100.0
    assert notes == ("CUPTI: reads are those that the SMs received, so that reads that met count as hits; "
                     "all 7 need 2 passes",)  # fmt: skip


def test_where_the_others_need_a_pass_too_they_are_left_out_and_said():
    splits = ((chain.READ_SECTORS, *chain.OTHER_METRICS), (chain.READ_MISSES,))
    with scope(OnePass(splits)) as counting:
        pass
    assert set(counting.result.values) == {chain.SM_READ_SECTORS, *CORE_METRICS[1:]}
    assert [note.split(";")[0] for note in counting.result.notes] == [
        "CUPTI: only the core metrics",
        "CUPTI: reads are those that the SMs received, so that reads that met count as hits",
    ]


def test_a_card_without_any_set_of_one_pass_counts_nothing_that_runs_once():
    with scope(OnePass(splits=((chain.READ_MISSES,),))) as counting:
        pass
    assert counting.result.counters is None
    assert "2 passes" in counting.result.notes[0]
    with scope(OnePass(((chain.READ_SECTORS,), (chain.READ_MISSES,)), (chain.SM_READ_SECTORS,))) as counting:
        pass
    assert counting.result.counters is None


def test_unknown_metric_leaves_the_core_metrics():
    class FirstFails(FakeCupti):
        def _answer(self, name, params):
            unknown = name == "cuptiProfilerHostConfigAddMetrics" and params.numMetrics != len(CORE_METRICS)
            return 17 if unknown else super()._answer(name, params)

    with scope(FirstFails(VALUES)) as counting:
        pass
    for result in (counting.result, scope(FirstFails(VALUES)).count(lambda: None)):
        assert set(result.values) == set(CORE_METRICS)
        assert result.counters.l2_hit_rate == 0.75
        assert "only the core metrics" in result.notes[0]


def test_core_metrics_of_a_call_are_counted_by_themselves():
    """Reads and hits of one pass, whatever the others need."""
    asked = []

    def open_profiler(metrics, max_ranges=1):
        asked.append(metrics)
        fake = FakeCupti(VALUES if metrics == CORE_METRICS else (1, 2, 3))
        return RangeProfiler(metrics, Context(5, 0), fake, max_ranges)

    result = counters(synchronize=lambda: None, open_profiler=open_profiler).count(lambda: None)
    assert asked == [CORE_METRICS, tuple(name for name in METRICS if name not in CORE_METRICS)]
    assert result.counters.l2_hit_rate == 0.75
    assert (result.counters.dram_write_bytes, result.counters.l2_read_bytes) == (1.0, 32_000.0)
    assert (result.counters.warps_active_share, result.counters.tensor_active_share) == (0.02, 0.03)


class Varying(FakeCupti):
    """The ranges of a pass have 700 and 300 misses; where a pass holds one range, they come in turn."""

    def __init__(self, merges=False, reads=(1000.0, 1000.0)):
        super().__init__()
        self.merges, self.reads, self.turn = merges, reads, 0

    def _cuptiRangeProfilerGetCounterDataInfo(self, params):
        params.numTotalRanges = 1 if self.merges else len(self.pushed)

    def _cuptiProfilerHostEvaluateToGpuValues(self, params):
        which, self.turn = self.turn % 2, self.turn + 1
        self.values = [self.reads[which], (700.0, 300.0)[which], 8000.0, 4000.0]
        super()._cuptiProfilerHostEvaluateToGpuValues(params)


@pytest.mark.parametrize("fake", [Varying(), Varying(merges=True), Varying(reads=(1000.0, 900.0))])
def test_repeated_counts_are_means(fake):
    """As ranges of the same passes; where a library merges these, one after another."""
    scope = counters(CORE_METRICS, synchronize=lambda: None, open_profiler=opener(fake))
    result = scope.count(lambda: None, repeats=2)
    assert result.counters.l2_hit_rate == pytest.approx(1 - 500 / (sum(fake.reads) / 2))
    assert fake.calls.count("cuptiRangeProfilerStart") == (3 if fake.merges else 1)


class ColdStart(FakeCupti):
    """The first range of a pass has other misses than those after it."""

    def _cuptiProfilerHostEvaluateToGpuValues(self, params):
        self.values = [1000.0, 660.0 if params.rangeIndex == 0 else 600.0, 8000.0, 4000.0]
        super()._cuptiProfilerHostEvaluateToGpuValues(params)


@pytest.mark.parametrize("repeats", [1, 4])
def test_the_first_execution_of_a_pass_does_not_count(repeats):
    runs, fake = [], ColdStart()
    scope = counters(CORE_METRICS, synchronize=lambda: None, open_profiler=opener(fake))
    result = scope.count(lambda: runs.append(1), repeats=repeats)
    assert (result.counters.l2_hit_rate, len(runs)) == (pytest.approx(0.4), repeats + 1)


def test_counts_of_one_call_that_are_not_alike_are_refused():
    scope = counters(CORE_METRICS, synchronize=lambda: None, open_profiler=opener(Varying(reads=(1000.0, 400.0))))
    scope.count(lambda: None, repeats=2)
    assert scope.result.counters.dram_bytes == 8000.0  # one after another: each was a count of its own


def replayed(values):
    def run(command, metrics, kernel=None, card_uuid=None):
        assert command == ("python", "replay.py")
        assert (kernel, card_uuid) == ("k", "GPU-second")
        twice = {name: 2 * value for name, value in values.items()}
        return (NcuKernel(0, "k", {}), NcuKernel(1, "k", dict.fromkeys(values, 0.0)), NcuKernel(2, "k", twice))

    return run


def test_ncu_comes_second_and_the_model_third():
    denied = FakeCupti(fail={"cuptiRangeProfilerEnable": 35})
    replay = Replay(("python", "replay.py"), "k", card_uuid="GPU-second")
    values = dict(zip(CORE_METRICS, (10.0, 5.0, 100.0, 2.0), strict=True))
    with scope(denied, replay=replay, run_replay=replayed(values), simulated=lambda: SIMULATED) as counting:
        pass
    assert counting.result.counters.method == "measured (ncu on a replay)"
    assert counting.result.counters.dram_bytes_per_s == 50.0
    assert "NVreg_RestrictProfilingToAdminUsers" in counting.result.notes[0]
    with scope(denied, replay=replay, run_replay=replayed({}), simulated=lambda: SIMULATED) as counting:
        pass
    assert counting.result.counters == SIMULATED
    assert len(counting.result.notes) == 2
    assert all("\n" not in note for note in counting.result.notes)


def test_no_method_left_is_no_number():
    with scope(FakeCupti(fail={"cuptiProfilerInitialize": 39})) as counting:
        pass
    assert counting.result.counters is None
    assert "one at a time" in counting.result.notes[0]


def test_a_failing_block_ends_the_range_and_its_error_is_seen():
    fake = FakeCupti(VALUES)
    with pytest.raises(ZeroDivisionError), scope(fake) as counting:
        _ = 1 / 0
    assert "cuptiRangeProfilerStop" in fake.calls
    assert fake.calls[-1] == "cuptiProfilerDeInitialize"
    assert counting.result.counters is None


def test_without_a_card_it_is_simulated():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a card")
    with counters(card="L4", simulated=lambda: SIMULATED) as counting:
        pass
    assert counting.result.counters == SIMULATED
    assert counting.result.notes


def test_a_profiler_without_a_card_to_wait_for_is_given_up():
    """Torch is asked for the card that the profiler says it has."""
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a card")
    fake = FakeCupti(VALUES)
    with counters(card="L4", open_profiler=opener(fake), simulated=lambda: SIMULATED) as counting:
        pass
    assert counting.result.counters == SIMULATED
    assert "no NVIDIA card" in counting.result.notes[0]
    assert fake.calls[-1] == "cuptiProfilerDeInitialize"


@pytest.mark.parametrize(
    "values", [(10.0, 11.0, 1.0, 1.0), (10.0, -1.0, 1.0, 1.0), (1.0, 1.0, 1.0, 0.0), (1.0, 1.0, -1.0, 1.0)]
)
def test_impossible_counts_are_refused(values):
    with pytest.raises(CountersUnavailable, match="cannot be"):
        to_counters(dict(zip(CORE_METRICS, values, strict=True)), "measured", "x")
    with pytest.raises(CountersUnavailable, match="gave no"):
        to_counters({}, "measured", "x")


def test_nothing_read_is_no_hit():
    assert to_counters(dict(zip(CORE_METRICS, (0.0, 0.0, 0.0, 1.0), strict=True)), "m", "x").l2_hit_rate == 0
