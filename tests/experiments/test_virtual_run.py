"""`simulate` gives records that everything above reads, without losing a request or a token."""

from __future__ import annotations

import dataclasses
import gc

import numpy as np
import pytest

from labkit.engine.step_constants import load_constants
from labkit.errors import UnsupportedError
from labkit.experiments.export import to_json
from labkit.experiments.serialise import from_plain, to_plain
from labkit.experiments.virtual_run import (
    VirtualOptions,
    VirtualRun,
    simulate,
    stand_in_prompt,
    step_time_model,
    virtual_engine,
)
from labkit.measure.run_record import RunRecord, StepRow, step_rows
from labkit.measure.summary import summarize
from labkit.memory import plan as memory_plan
from labkit.specs import cpu_gpu, load_gpu, load_model, load_workload, synthetic_workload
from labkit.specs.engine_config import EngineConfig


@pytest.fixture(scope="module")
def small():
    return load_workload("azure-2023-conv", limit=60)


def test_every_request_and_token_of_the_trace_is_served(small):
    record = simulate(load_model("Qwen/Qwen3-8B"), load_gpu("L40S"), small)
    assert (record.origin, record.status, record.error) == ("simulated", "finished", "")
    assert [row.request_id for row in record.requests] == list(range(60))
    assert [row.output_tokens for row in record.requests] == [request.output_tokens for request in small.requests]
    assert sum(step.num_tokens for step in record.steps) == small.input_tokens + small.output_tokens - 60
    assert all(row.arrival_s < row.first_token_s <= row.finish_s <= record.duration_s for row in record.requests)
    assert record.versions["step-time constants"] == "shipped"
    assert "90" not in record.name
    low, high = load_constants().interval_low, load_constants().interval_high
    assert f"Nine in ten measured runs had {low:.2f} to {high:.2f} times the time per output token" in record.note


def test_a_record_goes_through_the_store_and_gives_equal_bytes(small):
    model, gpu = load_model("Qwen/Qwen3-8B"), load_gpu("H100 SXM")
    first, second = (simulate(model, gpu, small, created="2026-01-01T00:00:00Z") for _ in range(2))
    assert to_json(first) == to_json(second)
    assert from_plain(RunRecord, to_plain(first)) == first


def test_steps_follow_each_other_and_tokens_come_at_their_ends(small):
    record = simulate(load_model("Qwen/Qwen3-8B"), load_gpu("A10"), small, options=VirtualOptions(arrival_scale=0))
    ends = np.array([step.start_s + step.duration_s for step in record.steps])
    starts = np.array([step.start_s for step in record.steps])
    assert np.all(starts[1:] >= ends[:-1] - 1e-9)
    times = {round(time_s, 9) for row in record.requests for time_s in row.token_times_s}
    assert times <= {round(end, 9) for end in ends}


def test_a_larger_pool_preempts_less_and_serves_faster():
    traffic = synthetic_workload(60, input_lengths=900, output_lengths=600, seed=1)
    model, gpu = load_model("Qwen/Qwen3-8B"), load_gpu("H100 SXM")
    options = VirtualOptions(arrival_scale=0)
    small, large = (
        summarize(
            simulate(
                model, gpu, traffic, EngineConfig(num_gpu_blocks_override=blocks, max_model_len=4096), options=options
            )
        )
        for blocks in (1000, 20000)
    )
    assert small.num_preemptions > 0 == large.num_preemptions
    assert large.output_tokens_per_s > small.output_tokens_per_s


def test_a_server_delays_the_first_token_and_nothing_else(small):
    model, gpu = load_model("Qwen/Qwen3-8B"), load_gpu("H100 SXM")
    alone, server = (
        summarize(simulate(model, gpu, small, options=VirtualOptions(has_server=has_server)))
        for has_server in (False, True)
    )
    assert 0.03 < server.ttft_s.p50 - alone.ttft_s.p50 < 0.08
    assert server.inter_token_s.p50 == pytest.approx(alone.inter_token_s.p50, rel=0.05)


def test_what_the_plan_refuses_is_a_failed_record_with_its_reason(small):
    record = simulate(load_model("Qwen/Qwen2.5-32B-Instruct"), load_gpu("A10"), small)
    assert record.status == "failed"
    assert "does not fit" in record.error
    assert not record.requests


def test_a_machine_without_known_bandwidth_is_refused(small):
    with pytest.raises(UnsupportedError):
        simulate(load_model("Qwen/Qwen3-0.6B"), cpu_gpu(8.0), small)


def test_cancel_keeps_what_was_served(small):
    asked = iter([False, False, True, True])
    record = simulate(load_model("Qwen/Qwen3-8B"), load_gpu("H100 SXM"), small, is_cancelled=lambda: next(asked, True))
    assert record.status == "cancelled"
    assert 0 < len([row for row in record.requests if row.finish_reason == "length"]) < 60


@pytest.mark.parametrize("is_enabled", [True, False])
def test_the_search_for_cycles_is_as_before_after_a_run_and_after_an_error(small, is_enabled):
    seen = []
    try:
        (gc.enable if is_enabled else gc.disable)()
        simulate(
            load_model("Qwen/Qwen3-8B"), load_gpu("L40S"), small, is_cancelled=lambda: bool(seen.append(gc.isenabled()))
        )
        assert gc.isenabled() is is_enabled
        with pytest.raises(UnsupportedError):
            simulate(load_model("Qwen/Qwen3-0.6B"), cpu_gpu(8.0), small)
        assert gc.isenabled() is is_enabled
    finally:
        gc.enable()
    assert not any(seen), "none while a run goes on"


def test_a_run_leaves_no_cycles_while_it_goes_on(small):
    plan = memory_plan(load_model("Qwen/Qwen3-8B"), load_gpu("L40S"), EngineConfig(max_model_len=16384))
    constants = load_constants()
    gc.collect()
    gc.disable()
    try:
        run = VirtualRun(virtual_engine(plan, constants), small, VirtualOptions(), constants, lambda: False)
        served = run.serve()
        assert gc.collect() < 100
    finally:
        gc.enable()
    assert len(served["requests"]) == 60


def test_no_requests_and_requests_that_can_never_run():
    model, gpu = load_model("Qwen/Qwen3-0.6B"), load_gpu("T4")
    nothing = simulate(model, gpu, synthetic_workload(1, input_lengths=10, output_lengths=1).with_requests((), "none"))
    assert (nothing.status, nothing.steps, nothing.requests) == ("finished", (), ())
    long = synthetic_workload(2, input_lengths=5000, output_lengths=10)
    record = simulate(model, gpu, long, EngineConfig(max_model_len=2048))
    assert [row.finish_reason.startswith("refused") for row in record.requests] == [True, True]


def test_prompts_share_what_the_trace_says_and_nothing_else():
    shared = load_workload("mooncake-conversation", limit=30)
    record = simulate(load_model("Qwen/Qwen3-8B"), load_gpu("H200"), shared)
    assert sum(row.num_cached_tokens for row in record.requests) > 0
    own = load_workload("azure-2023-conv", limit=250)
    beginnings = [stand_in_prompt(own, index, 16)[:2] for index in range(250) if own.requests[index].input_tokens > 1]
    assert len(set(beginnings)) == len(beginnings) > 200


@pytest.mark.parametrize(
    ("model", "gpu", "knobs", "is_captured"),
    [
        ("Qwen/Qwen3-8B", "A10", {}, True),
        ("Qwen/Qwen3-30B-A3B", "H200", {}, True),
        ("Qwen/Qwen3-30B-A3B", "A100-80GB", {}, False),
        ("Qwen/Qwen3-30B-A3B", "H200", {"quantization": "fp8"}, False),
        ("Qwen/Qwen3-8B", "H200", {"enforce_eager": True}, False),
    ],
)
def test_the_lab_captures_what_needs_no_look_at_the_router(model, gpu, knobs, is_captured):
    plan = memory_plan(load_model(model), load_gpu(gpu), EngineConfig(max_model_len=2048, **knobs))
    found = step_time_model(plan, load_constants(engine="labkit"))
    assert bool(found.launch.graph_sizes) == is_captured
    assert found.launch.overlaps


def test_rows_made_at_once_are_those_made_one_by_one():
    columns = [(index, 10 * index) for index in range(len(dataclasses.fields(StepRow)))]
    rows = step_rows(*columns)
    assert rows == [StepRow(*(values[row] for values in columns)) for row in range(2)]
    assert hash(rows[1]) == hash(StepRow(*(10 * index for index in range(len(columns)))))
    with pytest.raises(dataclasses.FrozenInstanceError):
        rows[0].start_s = 1.0
    for wrong in (columns[:-1], [*columns, (1, 2)], [(1, 2, 3), *columns[1:]]):
        with pytest.raises(ValueError, match=r"unpack|shorter"):
            step_rows(*wrong)
    assert step_rows(*([] for _ in columns)) == []
