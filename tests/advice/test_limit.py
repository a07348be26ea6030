"""Which limit binds: each limit made by hand, its sentence and its numbers."""

from __future__ import annotations

import dataclasses

import pytest
from samples import sample_plan, sample_record

import labkit
from labkit.advice import binding_limit
from labkit.advice.limit import requests_at_once, tokens_per_request
from labkit.measure.run_record import StepRow
from labkit.memory.questions import concurrent_requests
from labkit.specs.engine_config import EngineConfig


def step(index: int, **changes) -> StepRow:
    row = StepRow(
        start_s=float(index), duration_s=1.0, num_tokens=8, num_prefill_tokens=0, num_decode_tokens=8, num_running=8,
        num_waiting=0, num_blocks_used=10, num_blocks_cached=0, num_tokens_stored=100,
    )  # fmt: skip
    return dataclasses.replace(row, **changes)


def record_with(steps, **config):
    record = sample_record(EngineConfig(max_num_seqs=16, max_num_batched_tokens=64, **config))
    return dataclasses.replace(record, steps=tuple(steps))


@pytest.mark.parametrize(
    ("waiting_step", "name", "knob"),
    [
        ({"num_waiting": 3, "num_running": 16}, "max_num_seqs", "max_num_seqs"),
        ({"num_waiting": 3, "num_tokens": 64}, "max_num_batched_tokens", "max_num_batched_tokens"),
        ({"num_waiting": 3, "num_tokens": 61}, "max_num_batched_tokens", "max_num_batched_tokens"),
        ({"num_waiting": 3, "num_tokens": 60}, "kv_blocks", "kv_cache_dtype"),
        ({"num_waiting": 0, "num_preemptions": 1}, "kv_blocks", "kv_cache_dtype"),
        ({"num_waiting": 3, "num_running": 16, "num_preemptions": 1}, "kv_blocks", "kv_cache_dtype"),
        ({}, "compute", None),
        ({"duration_s": 0.5}, "traffic", None),
    ],
)
def test_the_measured_limit_is_what_held_requests_back(waiting_step, name, knob):
    record = record_with([step(0), *(step(index, **waiting_step) for index in range(1, 10))])
    limit = binding_limit(record.plan, record)
    assert (limit.name, limit.knob, limit.basis) == (name, knob, "measured")
    assert limit.sentence.startswith(limit.title)


def test_the_limit_with_the_longest_time_wins_not_the_one_with_the_most_steps():
    many_short = [step(index, num_waiting=1, num_running=16, duration_s=0.1) for index in range(10)]
    record = record_with([*many_short, step(10, num_waiting=1, num_tokens=20, duration_s=5.0)])
    assert binding_limit(record.plan, record).name == "kv_blocks"


def prompts(index: int, **changes) -> StepRow:
    return step(index, num_tokens=2048, num_prefill_tokens=2040, num_waiting=3, **changes)


def test_full_steps_of_prompts_that_only_compute_are_bound_by_computing_not_by_their_budget():
    # 2,048 tokens × 7 G parameters × 2 FLOP are 230 ms at an A10's 125 TFLOP/s; the weights are read in 25 ms.
    plan = labkit.plan(labkit.load_model("Qwen/Qwen2-7B"), labkit.load_gpu("A10"), engine="vllm")
    assert plan.config.max_num_batched_tokens == 2048
    waits = [step(index, num_waiting=3) for index in range(10, 13)]
    record = dataclasses.replace(sample_record(), plan=plan, config=plan.config, model=plan.model, gpu=plan.gpu,
                                 steps=(*map(prompts, range(10)), *waits, *map(step, range(13, 23))))  # fmt: skip
    limit = binding_limit(plan, record)
    assert (limit.name, limit.knob) == ("compute", None)
    assert "43 % of the run behind steps full of prompts" in limit.sentence
    assert "larger steps would only be longer; for 13 % they waited for KV blocks" in limit.sentence


def test_requests_that_end_within_their_step_are_not_none():
    record = record_with([step(index, num_running=0, num_blocks_used=0, num_tokens=40, duration_s=0.1)
                          for index in range(5)])  # fmt: skip
    sentence = binding_limit(record.plan, record).sentence
    assert "each request ended within its step, and no step carried more than 40 of 64 tokens" in sentence


def test_refused_requests_do_not_count_among_those_at_once():
    record = sample_record()
    refused = dataclasses.replace(record.requests[0], input_tokens=10**6, finish_reason="refused: too long")
    more = dataclasses.replace(record, requests=(*record.requests, refused))
    assert tokens_per_request(more.plan, more) == tokens_per_request(record.plan, record)


@pytest.mark.parametrize(("waiting_steps", "name"), [(4, "compute"), (5, "max_num_seqs")])
def test_less_than_five_percent_of_waiting_does_not_bind(waiting_steps, name):
    waiting = [step(index, num_waiting=1, num_running=16) for index in range(waiting_steps)]
    record = record_with([*waiting, *(step(index) for index in range(waiting_steps, 100))])
    assert binding_limit(record.plan, record).name == name


@pytest.mark.parametrize(("duration_s", "name"), [(0.89, "traffic"), (0.91, "compute")])
def test_where_nothing_waits_a_busy_engine_is_held_by_computing(duration_s, name):
    record = record_with([step(index, duration_s=duration_s) for index in range(100)])
    assert binding_limit(record.plan, record).name == name


def test_the_sentence_carries_the_numbers():
    record = record_with([step(0), *(step(index, num_waiting=1, num_running=16) for index in range(1, 4))])
    sentence = binding_limit(record.plan, record).sentence
    assert "75 % of the run" in sentence
    assert "all 16 places" in sentence


def test_a_run_without_steps_is_judged_by_its_plan():
    record = record_with([])
    assert binding_limit(record.plan, record) == binding_limit(record.plan)


def test_zero_time_does_not_divide_by_zero():
    record = record_with([step(0, duration_s=0.0, num_waiting=5)])
    assert binding_limit(record.plan, record).name == "traffic"


def test_the_predicted_limit_compares_kv_with_max_num_seqs():
    roomy = sample_plan(EngineConfig(max_num_seqs=4))
    assert (binding_limit(roomy).name, binding_limit(roomy).basis) == ("max_num_seqs", "predicted")
    tight = dataclasses.replace(roomy, max_concurrency=3.9)
    assert binding_limit(tight).name == "kv_blocks"


def test_what_does_not_fit_says_needed_available_and_what_would():
    plan = sample_plan(EngineConfig(max_model_len=8192, num_gpu_blocks_override=100))
    limit = binding_limit(plan, sample_record())
    assert plan.verdict == "does not fit"
    assert "one request of 8,192 tokens needs 180 MiB" in limit.sentence
    assert "1,600 tokens would fit" in limit.sentence
    nothing = dataclasses.replace(plan, max_model_len_that_fits=0)
    assert binding_limit(nothing).name == "weights"


def test_requests_at_once_rounds_up_to_blocks_and_stops_at_max_num_seqs():
    plan = sample_plan(EngineConfig(max_model_len=1024, max_num_seqs=1000, num_gpu_blocks_override=100))
    assert requests_at_once(plan, 17) == pytest.approx(1600 / 32)
    assert requests_at_once(plan, 1024) == pytest.approx(100 / 64)
    assert requests_at_once(sample_plan(EngineConfig(max_num_seqs=2)), 16) == 2.0


def test_requests_below_the_longest_follow_the_layout_of_windows():
    """Gemma 3 27B: its sliding layers hold 1,024 tokens however long a request is."""
    config = EngineConfig(max_model_len=32768, max_num_seqs=4096)
    plan = labkit.plan(labkit.load_model("google/gemma-3-27b-it"), labkit.load_gpu("H100 SXM"), config, engine="vllm")
    assert requests_at_once(plan, 32768) == plan.max_concurrency
    assert concurrent_requests(plan, [4096]) == int(requests_at_once(plan, 4096))
    assert requests_at_once(plan, 4096) < 8 * plan.max_concurrency


def test_tokens_per_request_come_from_the_run_where_there_is_one():
    record = sample_record(num_requests=4)
    lengths = [row.input_tokens + row.output_tokens for row in record.requests]
    assert tokens_per_request(record.plan, record) == pytest.approx(sum(lengths) / 4)
    assert tokens_per_request(record.plan, dataclasses.replace(record, requests=())) == 8192


def test_a_model_without_kv_is_bound_by_the_token_budget():
    from labkit.specs.model_config import model_from_config

    bert = model_from_config(
        {
            "architectures": ["BertModel"], "model_type": "bert", "hidden_size": 768, "num_hidden_layers": 12,
            "num_attention_heads": 12, "intermediate_size": 3072, "vocab_size": 30522, "max_position_embeddings": 512,
        },
        "bert",
    )  # fmt: skip
    limit = binding_limit(labkit.plan(bert, labkit.load_gpu("L4"), engine="vllm"))
    assert (limit.name, limit.knob) == ("max_num_batched_tokens", "max_num_batched_tokens")
    assert "keeps no KV" in limit.sentence
