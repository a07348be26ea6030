"""Counted steps of an engine: which requests, how many steps, what is summed; the card and its counters are played."""

from types import SimpleNamespace

import pytest
import torch
from labkit_kernels import cold_timing

from labkit.engine import Engine
from labkit.engine.simulation import VirtualExecutor, bare_plan, virtual_model
from labkit.measure import step_counters
from labkit.measure.counters import CORE_METRICS, OCCUPANCY, Counted
from labkit.measure.run_record import Counters
from labkit.measure.step_counters import count_decode_steps, running_batch
from labkit.specs.engine_config import EngineConfig
from labkit.specs.model_spec import LayerSpec

FULL = LayerSpec("full", num_heads=8, num_kv_heads=2, head_dim=64)
SLIDING = LayerSpec("sliding", num_heads=8, num_kv_heads=2, head_dim=64, window=32)


class CardExecutor(VirtualExecutor):
    """Steps take 3 ms by the card's events, and attention can be launched alone."""

    def __init__(self, plan):
        super().__init__(plan)
        self.times, self.launched, self.steps = None, [], []

    def execute(self, batch):
        self.steps.append((batch.num_prefill_tokens, batch.num_decode_tokens))
        if self.times is not None:
            self.times.append((SimpleNamespace(elapsed_time=lambda end: 3.0), None))
        return super().execute(batch)

    def attention_reads(self, sequences):
        layers = (FULL, SLIDING, FULL)
        return [lambda index=index: self.launched.append(index) for index in range(len(layers))]


class PlayedCounters:
    """Counts 1,000 reads, 750 misses, 8,000 bytes and 2 ms of whatever runs, by the method that is asked for."""

    def __init__(self, method="measured (CUPTI range profiler)", notes=()):
        self.method, self.notes, self.blocks, self.replays = method, notes, 0, []

    def __call__(self, card="", replay=None):
        self.replays.append(replay)
        return self

    def count(self, call, before=None, repeats=1):
        self.blocks += repeats if before is None else 0
        for _ in range(2 * repeats):  # two passes
            call()
        return self._counted()

    def _counted(self):
        if self.method is None:
            return Counted(notes=self.notes)
        values = dict(zip(CORE_METRICS, (1000.0, 750.0, 8000.0, 2e-3), strict=True)) | {OCCUPANCY: 0.25}
        return Counted(Counters(self.method, "card", 0.25, 8000.0, 4e6, 2e-3), values, self.notes)


@pytest.fixture
def played(monkeypatch):
    played = PlayedCounters()
    monkeypatch.setattr(step_counters, "counters", played)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    uuids = {1: SimpleNamespace(uuid="second")}
    monkeypatch.setattr(torch.cuda, "get_device_properties", uuids.__getitem__)
    monkeypatch.setattr(cold_timing, "cold_l2", lambda: lambda: None)
    monkeypatch.setattr(cold_timing, "graph_time_s", lambda call, flush: 0.5e-3)
    return played


def make_engine(executor=CardExecutor, **knobs):
    defaults = {"block_size": 4, "max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    model = virtual_model().replace(layers=(FULL, SLIDING, FULL))
    plan = bare_plan(model, EngineConfig(**{**defaults, **knobs}), 256)
    made = executor(plan)
    return Engine(None, plan, executor=made, clock=made.clock), made


def prompts(*lengths):
    return [[1 + index] * length for index, length in enumerate(lengths)]


def test_steps_are_timed_then_counted_and_attention_by_itself(played):
    engine, executor = make_engine()
    found = count_decode_steps(engine, prompts(100, 120, 90), 2)
    first = next(index for index, (prefill, decode) in enumerate(executor.steps) if decode and not prefill)
    assert executor.steps[first:][:7] == [(0, 3)] * 7
    assert played.blocks == 2
    assert found.step.scope == "a decode step of 3 requests, all kernels"
    assert (found.step.l2_hit_rate, found.step.dram_bytes, found.step.kernel_time_s) == (0.25, 8000.0, 3e-3)
    assert found.step.dram_bytes_per_s == pytest.approx(8000 / 3e-3)
    assert executor.launched == [0, 2, 0, 2, 1, 1]
    assert found.attention.scope == "attention of a decode step of 3 requests"
    assert (found.attention.dram_bytes, found.attention.kernel_time_s) == (16_000.0, 1e-3)
    assert found.attention.warps_active_share == 0.25
    assert found.notes == ()


def test_the_engine_is_left_as_it_was(played):
    engine, executor = make_engine()
    count_decode_steps(engine, prompts(60, 60), 3)
    assert not engine.has_unfinished
    assert executor.times is None
    engine.check()


def test_ncu_counts_one_layer_of_each_kind(played):
    played.method = "measured (ncu on a replay)"
    engine, _ = make_engine()
    found = count_decode_steps(engine, prompts(100), 1)
    assert found.attention.dram_bytes == 8000 * 2 + 8000
    replays = [replay for replay in played.replays if replay]
    assert [replay.command[-1].count('"window": 32') for replay in replays] == [0, 1]
    assert {replay.card_uuid for replay in replays} == {"GPU-second"}


def test_nothing_counted_is_said_once_with_the_cure(played):
    played.method, played.notes = None, ("CUPTI: may not (would work: root)",)
    engine, _ = make_engine()
    found = count_decode_steps(engine, prompts(50, 50), 3)
    assert (found.step, found.attention) == (None, None)
    assert found.notes == ("CUPTI: may not (would work: root)",)
    assert played.blocks == 3
    assert not engine.has_unfinished


def test_contexts_that_do_not_fit_are_cut_or_left_out(played):
    engine, _ = make_engine(max_model_len=64)
    assert count_decode_steps(engine, prompts(500, 64), 1).step is not None
    found = count_decode_steps(engine, [], 1)
    assert found.step is None
    assert "only decodes" in found.notes[0]


def test_a_run_on_the_cpu_says_so():
    engine, _ = make_engine(VirtualExecutor)
    found = count_decode_steps(engine, prompts(8), 2)
    assert found.step is found.attention is None
    assert "not on a card" in found.notes[0]


def test_cancel_ends_it(played):
    engine, _ = make_engine()
    found = count_decode_steps(engine, prompts(100, 100), 2, lambda: True)
    assert found.step is None
    assert not engine.has_unfinished


def test_blocks_that_all_share_are_the_prefix(played):
    engine, executor = make_engine()
    seen = []
    executor.attention_reads = lambda sequences: seen.append(running_batch(engine)) or [lambda: None] * 3
    common = [1] * 40
    for _ in range(2):  # the second time the prefix is in the cache
        count_decode_steps(engine, [common + [2] * 40, common + [3] * 40], 1)
    assert seen[-1].shared_prefix_tokens == 40
    assert len(seen[-1].context_lens) == 2
