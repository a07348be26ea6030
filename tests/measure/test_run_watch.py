"""Memory and power during a run: on a CPU what the pool and the process say, on a card also torch and NVML."""

import itertools

import psutil
import pytest

from labkit.measure import run_watch
from labkit.measure.allocator import AllocatorTimeline
from labkit.measure.nvml_sampler import NvmlSample, summarize_samples
from labkit.measure.run_watch import RunWatch

STATS = {f"{name}_bytes.all.current": value for name, value in
         (("allocated", 100), ("active", 110), ("reserved", 150), ("inactive_split", 7))}  # fmt: skip


class PlayedSampler:
    def __init__(self, last):
        self.last, self.calls = last, []

    def start(self):
        self.calls.append("start")

    def stop(self):
        self.calls.append("stop")
        return summarize_samples((NvmlSample(0.0, energy_j=10.0), NvmlSample(2.0, energy_j=50.0)))


def test_on_a_cpu_the_pool_and_the_process_speak():
    with RunWatch(None, 4096) as watch:
        sample = watch.look(1.5, 10)
    assert (sample.time_s, sample.kv_used_bytes) == (1.5, 40960)
    assert sample.process_bytes == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)
    assert sample.allocated_bytes is sample.reserved_bytes is sample.device_used_bytes is None
    assert watch.samples == (sample,)
    assert watch.nvml is None


def test_on_a_card_torch_and_nvml_speak():
    sampler = PlayedSampler(NvmlSample(0.0, memory_used_bytes=900, process_bytes=500, other_processes_bytes=300))
    with RunWatch("GPU-1", 10, sampler=sampler, allocator=AllocatorTimeline(lambda: STATS)) as watch:
        sample = watch.look(0.0, 3)
    assert sampler.calls == ["start", "stop"]
    assert (sample.allocated_bytes, sample.active_bytes, sample.reserved_bytes) == (100, 110, 150)
    assert (sample.unused_split_bytes, sample.kv_used_bytes) == (7, 30)
    assert (sample.device_used_bytes, sample.process_bytes, sample.other_processes_bytes) == (900, 500, 300)
    assert watch.nvml.energy_j == 40.0


class PlayedCard(PlayedSampler):
    """A second card that took so many joules, or does not say."""

    def __init__(self, energy_j):
        super().__init__(None)
        self.energy_j = energy_j

    def stop(self):
        super().stop()
        last = None if self.energy_j is None else 7 + self.energy_j
        return summarize_samples((NvmlSample(0.0, energy_j=7.0), NvmlSample(2.0, energy_j=last)))


@pytest.mark.parametrize(("second", "expected"), [(25.0, 65.0), (0.0, 40.0), (None, None)])
def test_cards_that_share_a_model_are_counted_together(second, expected):
    """40 J of the first card; a card that does not say leaves no number."""
    first, others = PlayedSampler(None), [PlayedCard(second)]
    with RunWatch("GPU-1", 1, others=others, sampler=first, allocator=AllocatorTimeline(dict)) as watch:
        pass
    assert watch.energy_j == expected
    assert watch.nvml.energy_j == 40.0
    assert others[0].calls == ["start", "stop"]


def test_a_cpu_has_no_energy():
    with RunWatch(None, 1) as watch:
        pass
    assert watch.energy_j is None


def test_a_silent_card_is_no_zero():
    with RunWatch("GPU-1", 10, sampler=PlayedSampler(None), allocator=AllocatorTimeline(dict)) as watch:
        sample = watch.look(0.0, 0)
    assert sample.kv_used_bytes == 0
    assert sample.allocated_bytes is sample.device_used_bytes is sample.process_bytes is None


def test_a_failing_run_ends_the_thread():
    sampler = PlayedSampler(None)
    with pytest.raises(ZeroDivisionError), RunWatch("GPU-1", 1, sampler=sampler):
        _ = 1 / 0
    assert sampler.calls[-1] == "stop"


def test_a_long_run_is_kept_evenly(monkeypatch):
    monkeypatch.setattr(run_watch, "MAX_SAMPLES", 8)
    watch = RunWatch(None, 1)
    for index in range(100):
        watch.look(float(index), index)
    times = [sample.time_s for sample in watch.samples]
    assert len(times) <= 8
    steps = {after - before for before, after in itertools.pairwise(times)}
    assert (times[0], len(steps)) == (0.0, 1)
    assert times[-1] > 80
