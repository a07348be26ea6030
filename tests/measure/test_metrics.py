"""Numbers of a run against hand calculations, and against runs that gave nothing."""

import dataclasses

import pytest

from labkit.errors import OutOfRangeError
from labkit.measure.memory_snapshot import measured_breakdown
from labkit.measure.metrics import goodput, kv_use
from labkit.measure.run_record import RequestRow, RunRecord, StepRow
from labkit.memory.records import MemoryBreakdown, MemoryPlan
from labkit.specs.engine_config import EngineConfig
from labkit.specs.gpu_spec import GpuSpec
from labkit.specs.model_spec import ModelSpec

MODEL = ModelSpec("m", "A", "llama", (), 64, 128, 256, 512)
PLAN = MemoryPlan(
    MODEL, GpuSpec("cpu", 10_000, origin="cpu"), EngineConfig(block_size=10), "labkit", "",
    MemoryBreakdown("predicted", 10_000),
    block_bytes=100, num_gpu_blocks=50, num_swap_blocks=0, kv_cache_tokens=500, max_concurrency=1.0,
    max_model_len_that_fits=500, verdict="fits", margin_bytes=0, binding_limit="", formulas={},
)  # fmt: skip


def record(requests=(), steps=(), duration_s=10.0):
    return RunRecord(
        "r",
        "r",
        "",
        "finished",
        PLAN.config,
        MODEL,
        PLAN.gpu,
        {},
        PLAN,
        tuple(requests),
        tuple(steps),
        duration_s=duration_s,
    )


def step(start_s, duration_s, used, stored, cached=0):
    return StepRow(start_s, duration_s, 1, 0, 1, 1, 0, used, cached, stored)


def test_use_of_the_pool_is_weighted_by_time():
    use = kv_use(record(steps=[step(0, 1.0, 10, 100), step(1, 3.0, 30, 240, cached=10)]))
    assert use.mean_share == pytest.approx((10 * 1 + 30 * 3) / 4 / 50)
    assert use.peak_share == pytest.approx(30 / 50)
    assert use.mean_tail_waste_share == pytest.approx(1 - (100 * 1 + 240 * 3) / (100 * 1 + 300 * 3))
    assert use.mean_cached_share == pytest.approx(10 * 3 / 4 / 50)


def test_use_of_nothing_is_none_and_of_an_empty_pool_is_zero():
    assert kv_use(record()) is None
    empty = kv_use(record(steps=[step(0, 1.0, 0, 0)]))
    assert (empty.mean_share, empty.mean_tail_waste_share) == (0, 0)
    without_blocks = dataclasses.replace(
        record(steps=[step(0, 1, 1, 1)]), plan=dataclasses.replace(PLAN, num_gpu_blocks=0)
    )
    assert kv_use(without_blocks) is None


REQUESTS = (
    RequestRow(0, 0.0, 0.5, 2.5, 8, 5, finish_reason="length"),  # TTFT 0.5, 0.5 s a token
    RequestRow(1, 1.0, 3.0, 4.0, 8, 11, finish_reason="stop"),  # TTFT 2.0, 0.1 s a token
    RequestRow(2, 1.0, 1.2, None, 8, 3, finish_reason="cancelled"),
    RequestRow(3, 2.0, 2.5, 2.5, 8, 1, finish_reason="length"),  # one token: no time between tokens
    RequestRow(4, 2.0, None, None, 900, 0, finish_reason="refused: too long"),
)


@pytest.mark.parametrize(
    ("goal", "met"),
    [
        ({"ttft_s": 10.0}, 3),
        ({"ttft_s": 0.5}, 2),
        ({"ttft_s": 0.49}, 0),
        ({"ttft_s": 10.0, "inter_token_s": 0.1}, 2),
        ({"ttft_s": 0.5, "inter_token_s": 0.1}, 1),
    ],
)
def test_goodput_counts_requests_that_met_the_goal(goal, met):
    assert goodput(record(REQUESTS), **goal) == pytest.approx(met / 10.0)


def test_goodput_without_duration_and_with_a_goal_of_nothing():
    assert goodput(record(REQUESTS, duration_s=0.0), ttft_s=1.0) is None
    for goal in ({"ttft_s": 0}, {"ttft_s": float("nan")}, {"ttft_s": 1, "inter_token_s": -1}):
        with pytest.raises(OutOfRangeError):
            goodput(record(REQUESTS), **goal)


def test_measured_parts_sum_to_the_total_to_the_byte():
    parts = {"weights": 1001, "kv_cache": 5003, "activation": 77, "free": 123456}
    measured = measured_breakdown(parts, PLAN, step(0, 1, 12, 110))
    assert sum(measured.parts().values()) == 10_000
    assert (measured.kind, measured.weights_bytes, measured.cuda_graphs_bytes) == ("measured", 1001, 0)
    assert measured.free_bytes == 10_000 - 1001 - 5003 - 77
    assert (measured.kv_reserved_bytes, measured.kv_stored_bytes) == (1200, 1100)


def test_measured_more_than_the_total_shows_as_negative_rest():
    assert measured_breakdown({"weights": 10_001}, PLAN).free_bytes == -1


def test_nothing_ran_so_nothing_was_reserved():
    assert measured_breakdown({}, PLAN).kv_reserved_bytes is None


@pytest.mark.parametrize("parts", [{"weight": 1}, {"weights": -1}])
def test_unknown_and_negative_parts(parts):
    with pytest.raises(OutOfRangeError, match="weight"):
        measured_breakdown(parts, PLAN)
