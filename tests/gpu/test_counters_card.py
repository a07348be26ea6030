"""Counters, memory and NVML on a card: against arithmetic, against each other, and against ncu where it is."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from labkit.measure import validate_l2
from labkit.measure.allocator import AllocatorTimeline, torch_snapshot
from labkit.measure.attention_shape import AttentionShape, BatchShape
from labkit.measure.card_ceilings import measure_ceilings
from labkit.measure.counters import CORE_METRICS, METRICS, OCCUPANCY, counters
from labkit.measure.kernel_launches import CardCounter
from labkit.measure.l2_points import NCU_POINTS, points
from labkit.measure.nvml_sampler import NvmlSampler
from labkit.measure.roofline import card_ceilings
from labkit.specs import load_model, synthetic_workload
from labkit.specs.engine_config import EngineConfig
from labkit.specs.gpu_loading import load_gpu


@pytest.fixture(scope="module")
def gpu():
    return load_gpu("auto")


@pytest.fixture(scope="module")
def counter():
    return CardCounter(validate_l2.REPEATS)


def count(counter, gpu, variant="full", batch=None, **shape):
    result = counter.count(AttentionShape(batch or BatchShape.decode(64, 4096), **shape), gpu, variant)
    if not result.counters.method.startswith("measured"):
        pytest.skip(f"this card does not let count: {result.notes}")
    return result


def test_decode_reads_every_byte_once(counter, gpu):
    found = count(counter, gpu).counters
    assert found.dram_bytes == pytest.approx(64 * 4096 * 8 * 512, rel=0.02)
    assert found.l2_hit_rate < 0.05
    assert found.method == "measured (CUPTI range profiler)"


def test_a_program_for_each_query_head_reads_no_more_from_dram(counter, gpu):
    """Four programs ask for each byte of 1.07 GB; some of their reads are one before they reach the L2."""
    found = count(counter, gpu, "one program for each query head").counters
    assert found.dram_bytes == pytest.approx(64 * 4096 * 8 * 512, rel=0.03)
    assert 1.2 * found.dram_bytes < found.l2_read_bytes < 4.01 * found.dram_bytes
    assert found.l2_hit_rate <= 0.76


@pytest.mark.parametrize(("variant", "most"), [("full", 1.02), ("one program for each query head", 1.5)])
def test_what_misses_comes_from_dram(counter, gpu, variant, most):
    """Once for each byte; where several programs read it, perhaps once more in the other half of the L2."""
    found = count(counter, gpu, variant).counters
    misses = found.l2_read_bytes * (1 - found.l2_hit_rate)
    assert 0.98 < misses / found.dram_bytes < most


def test_all_metrics_are_there(counter, gpu):
    values = count(counter, gpu).values
    assert set(CORE_METRICS) <= set(values) <= set(METRICS)
    if OCCUPANCY in values:
        assert 0 < values[OCCUPANCY] <= 1


def test_code_that_runs_once(gpu):
    x = torch.ones(2**28, device="cuda")
    x.sum()
    with counters(card=gpu.name) as counting:
        x.sum()
    found = counting.result.counters
    if found is None:
        pytest.skip(f"this card does not let count: {counting.result.notes}")
    assert found.dram_bytes == pytest.approx(2**30, rel=0.03)
    assert found.l2_read_bytes == pytest.approx(2**30, rel=0.03)
    assert found.l2_hit_rate < 0.03


def test_a_second_profiler_is_refused_in_one_line(gpu):
    other = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    with other, counters(card=gpu.name) as counting:
        torch.ones(2**20, device="cuda").sum()
    assert all("\n" not in note for note in counting.result.notes)


@pytest.mark.parametrize("name", NCU_POINTS[1:2])
def test_both_methods_agree(counter, gpu, name):
    point = next(each for each in points() if each.name == name)
    here = counter.count(point.shape, gpu, point.variant).counters
    found, why_not = validate_l2.count_with_ncu(gpu, [name])
    if not found:
        pytest.skip(f"ncu does not count here: {why_not}")
    assert found[name].l2_hit_rate == pytest.approx(here.l2_hit_rate, abs=0.01)
    assert found[name].dram_bytes == pytest.approx(here.dram_bytes, rel=0.02)


def test_the_allocators_timeline_and_snapshot_see_what_was_allocated(tmp_path):
    timeline, path = AllocatorTimeline(), tmp_path / "snapshot.pickle"
    with torch_snapshot(path):
        kept = [torch.empty(2**20 * size, device="cuda") for size in (1, 3, 5)]
        before = timeline.look()
        del kept[1]
        torch.cuda.synchronize()
        after = timeline.look()
    assert before.allocated_bytes - after.allocated_bytes == 3 * 2**22
    assert after.allocated_bytes == torch.cuda.memory_allocated()
    events = pickle.loads(path.read_bytes())["device_traces"][torch.cuda.current_device()]
    assert sum(event["size"] for event in events if event["action"] == "alloc") == 9 * 2**22


def test_nvml_while_the_card_works(gpu):
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    with NvmlSampler(gpu.uuid, 0.02) as sampler:
        for _ in range(200):
            x @ x
        torch.cuda.synchronize()
    summary = sampler.stop()
    assert summary.num_samples >= 3
    assert summary.energy_j is None or summary.energy_j > 0
    assert summary.max_memory_used_bytes is None or summary.max_memory_used_bytes > x.nbytes


@pytest.fixture(scope="module")
def run(gpu, tmp_path_factory):
    """A run of a session in a worker of its own, with three counted steps, and its torch snapshot."""
    pytest.importorskip("sqlalchemy", reason="the run store needs SQLAlchemy")
    from labkit.experiments.lab_session import LabSession
    from labkit.experiments.run import RunOptions

    config = EngineConfig(load_format="dummy", max_model_len=2048, max_num_seqs=64, gpu_memory_utilization=0.3)
    workload = synthetic_workload(96, input_lengths=512, output_lengths=128, seed=1)
    store = tmp_path_factory.mktemp("runs") / "runs.sqlite3"
    torch.cuda.empty_cache()
    with LabSession(load_model("Qwen/Qwen3-0.6B"), gpu, workload, config=config, store=store) as session:
        snapshot = str(store.with_name("snapshot.pickle"))
        done = session.run(options=RunOptions(arrival_scale=0, counted_steps=3, snapshot_file=snapshot))
        return done, Path(snapshot)


@pytest.fixture
def record(run):
    return run[0]


def test_torchs_memory_viewer_opens_the_snapshot(run):
    from torch.cuda import _memory_viz

    snapshot = pickle.loads(run[1].read_bytes())
    reserved = sum(segment["total_size"] for segment in snapshot["segments"])
    assert reserved >= run[0].measured.kv_cache_bytes
    assert f"total_reserved: {_memory_viz.Bytes(reserved)}" in _memory_viz.segsum(snapshot)
    assert "entries" in _memory_viz.trace(snapshot)
    assert len(_memory_viz.trace_plot(snapshot)) > len(_memory_viz._memory_viz_template)
    assert len(_memory_viz.segment_plot(snapshot)) > len(_memory_viz._memory_viz_template)


def test_steps_of_a_run_are_counted(record):
    if record.counters is None or not record.counters.method.startswith("measured"):
        pytest.skip(f"this card does not let count: {record.counter_notes}")
    assert record.counters.method == record.step_counters.method == "measured (CUPTI range profiler)"
    least = min(row.input_tokens for row in record.requests) * record.plan.block_bytes // record.plan.config.block_size
    running = int(record.counters.scope.split(" of ")[2].split()[0])
    assert 0.9 < record.counters.dram_bytes / (running * least) < 1.4
    weights = record.measured.weights_bytes
    assert record.step_counters.dram_bytes > 0.9 * (record.counters.dram_bytes + weights)
    assert record.step_counters.kernel_time_s > record.counters.kernel_time_s


def test_memory_and_power_of_a_run(record):
    assert len(record.memory_timeline) >= 3
    last = record.memory_timeline[-1]
    assert last.allocated_bytes <= last.active_bytes <= last.reserved_bytes < last.device_used_bytes
    assert record.nvml.energy_j == record.energy_j > 0
    assert record.nvml.max_power_w > 50


def test_the_parts_sum_to_what_nvml_says(record):
    parts, used = record.measured.parts(), record.nvml.max_memory_used_bytes
    assert record.measured.used_bytes == pytest.approx(used, rel=0.01), parts


def test_ceilings_are_near_the_data_sheet(gpu):
    measured, sheet = measure_ceilings(), card_ceilings(gpu)
    assert measured.read_bytes_per_s == pytest.approx(sheet.read_bytes_per_s, rel=0.2)
    assert sheet.flops_per_s is None or 0.3 * sheet.flops_per_s < measured.flops_per_s < 1.05 * sheet.flops_per_s
