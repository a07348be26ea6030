"""Slices, rates, clipping and synthetic traffic by their laws; prompts that share what their blocks share."""

from __future__ import annotations

import hashlib
from itertools import pairwise
from statistics import fmean, pstdev

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.errors import OutOfRangeError
from labkit.specs import RequestSpec, Workload, load_workload, prompt_token_ids, synthetic_workload
from labkit.specs.prompts import prompts
from labkit.specs.synthetic import AllAtOnce, Gamma, Poisson, Uniform, Zipf, with_arrivals
from labkit.specs.workload_steps import clip_lengths, first_requests, scale_rate, slice_time


@st.composite
def workloads(draw):
    block = draw(st.sampled_from([1, 4, 16]))
    requests = []
    for arrival in sorted(draw(st.lists(st.floats(0, 1000), min_size=1, max_size=20))):
        tokens = draw(st.integers(1, 100))
        blocks, left = [], draw(st.integers(0, -(-tokens // block)))
        while left > 0:
            span = draw(st.integers(1, left))
            first = draw(st.integers(0, 50))
            blocks.append((first, first + span - 1))
            left -= span
        requests.append(RequestSpec(arrival, tokens, draw(st.integers(1, 100)), tuple(blocks)))
    return Workload("w", tuple(requests), prefix_block_tokens=block, seed=draw(st.integers(0, 5)))


def expanded(request):
    return [block for first, last in request.prefix_blocks for block in range(first, last + 1)]


@given(workloads(), st.integers(1, 120), st.integers(1, 120))
def test_clipping_shortens_and_keeps_the_beginning(workload, longest_in, longest_out):
    clipped = clip_lengths(workload, longest_in, longest_out)
    for before, after in zip(workload.requests, clipped.requests, strict=True):
        assert after.input_tokens == min(before.input_tokens, longest_in)
        assert after.output_tokens == min(before.output_tokens, longest_out)
        kept = expanded(after)
        assert kept == expanded(before)[: -(-after.input_tokens // workload.prefix_block_tokens)]
    assert len(clipped.steps) == len(workload.steps) + 2


@given(workloads(), st.floats(0, 1000), st.floats(0.01, 1000))
def test_a_slice_keeps_exactly_what_arrives_in_it(workload, start, duration):
    sliced = slice_time(workload, start, duration)
    inside = [request for request in workload.requests if start <= request.arrival_s < start + duration]
    assert [request.input_tokens for request in sliced.requests] == [request.input_tokens for request in inside]
    assert all(0 <= request.arrival_s <= duration for request in sliced.requests)


@given(workloads(), st.floats(0.1, 10))
def test_rate_scaling_divides_arrivals_and_nothing_else(workload, scale):
    scaled = scale_rate(workload, scale)
    assert [r.arrival_s * scale for r in scaled.requests] == pytest.approx([r.arrival_s for r in workload.requests])
    assert scaled.input_tokens == workload.input_tokens
    assert scaled.output_tokens == workload.output_tokens


@given(workloads(), st.integers(1, 30))
def test_first_requests(workload, limit):
    assert first_requests(workload, limit).requests == workload.requests[:limit]


@settings(max_examples=50)
@given(workloads(), st.sets(st.integers(0, 99), max_size=20))
def test_prompts_share_exactly_what_their_blocks_share(workload, avoid):
    made = list(prompts(workload, vocab_size=100, avoid=avoid))
    by_block: dict[int, list[int]] = {}
    for index, (request, ids) in enumerate(zip(workload.requests, made, strict=True)):
        assert len(ids) == request.input_tokens
        assert all(0 <= token < 100 and token not in avoid for token in ids)
        assert ids == prompt_token_ids(workload, index, vocab_size=100, avoid=avoid)
        for place, block in enumerate(expanded(request)):
            piece = ids[place * workload.prefix_block_tokens : (place + 1) * workload.prefix_block_tokens]
            known = by_block.setdefault(block, piece)
            shorter = min(len(known), len(piece))
            assert known[:shorter] == piece[:shorter]
            by_block[block] = max(known, piece, key=len)


def test_prompts_of_other_requests_and_seeds_differ():
    workload = synthetic_workload(3, 200, seed=1)
    first, second, _ = prompts(workload, vocab_size=50_000)
    assert first != second
    assert first != prompt_token_ids(synthetic_workload(3, 200, seed=2), 0, vocab_size=50_000)
    assert first == prompt_token_ids(synthetic_workload(9, 200, seed=1), 0, vocab_size=50_000)


def test_prompts_are_the_same_on_every_machine():
    """SHAKE-128 in plain Python: word i is the i-th id that is not avoided, modulo how many there are."""
    ids = prompt_token_ids(synthetic_workload(1, 6, seed=3), 0, vocab_size=49152, avoid=(0, 1, 40000))
    allowed = [entry for entry in range(49152) if entry not in (0, 1, 40000)]
    stream = hashlib.shake_128(b"3 request 0").digest(48)
    words = [int.from_bytes(stream[place : place + 8], "little") for place in range(0, 48, 8)]
    assert ids == [allowed[word % len(allowed)] for word in words]


def test_every_id_of_the_vocabulary_is_drawn():
    workload = synthetic_workload(1, 5000)
    assert set(prompt_token_ids(workload, 0, vocab_size=64, avoid=(0, 63))) == set(range(1, 63))


@pytest.mark.parametrize(("vocab", "avoid", "index"), [(0, (), 0), (2, (0, 1), 0), (10, (), 5), (10, (), -1)])
def test_prompts_that_cannot_be(vocab, avoid, index):
    with pytest.raises(OutOfRangeError):
        prompt_token_ids(synthetic_workload(2), index, vocab_size=vocab, avoid=avoid)


def test_shared_prefix_is_shared():
    workload = synthetic_workload(3, 50, shared_prefix_tokens=20)
    made = list(prompts(workload, vocab_size=1000))
    assert made[0][:20] == made[1][:20] == made[2][:20]
    assert made[0][20:] != made[1][20:]


def test_uniform_lengths():
    lengths = [request.input_tokens for request in synthetic_workload(20_000, "uniform:10-19").requests]
    assert set(lengths) == set(range(10, 20))
    assert max(lengths.count(value) for value in range(10, 20)) < 2250
    assert min(lengths.count(value) for value in range(10, 20)) > 1750


def test_zipf_lengths_follow_the_power_law():
    lengths = [request.input_tokens for request in synthetic_workload(40_000, Zipf(1.0, 5, 104)).requests]
    harmonic = sum(1 / rank for rank in range(1, 101))
    for rank in (1, 2, 4, 8):
        assert lengths.count(4 + rank) / 40_000 == pytest.approx(1 / rank / harmonic, rel=0.08)
    assert min(lengths) == 5
    assert max(lengths) <= 104


@pytest.mark.parametrize(("arrivals", "cv"), [(Poisson(4.0), 1.0), (Gamma(4.0, 2.0), 2.0), (Gamma(4.0, 0.5), 0.5)])
def test_arrival_processes_have_their_rate_and_spread(arrivals, cv):
    times = [request.arrival_s for request in synthetic_workload(20_000, arrivals=arrivals).requests]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert times == sorted(times)
    assert fmean(gaps) == pytest.approx(0.25, rel=0.05)
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(cv, rel=0.06)


def test_regular_arrivals_and_all_at_once():
    assert [r.arrival_s for r in synthetic_workload(3, arrivals="gamma:2:0").requests] == [0.0, 0.5, 1.0]
    assert {r.arrival_s for r in synthetic_workload(3, arrivals=AllAtOnce()).requests} == {0.0}


def test_same_arguments_same_traffic_and_parts_are_independent():
    one = synthetic_workload(50, "zipf:1.2:16-512", "uniform:1-64", "poisson:3", seed=7)
    assert one == synthetic_workload(50, Zipf(1.2, 16, 512), Uniform(1, 64), Poisson(3), seed=7)
    other = synthetic_workload(50, "zipf:1.2:16-512", 9, "poisson:3", seed=7)
    assert [r.input_tokens for r in one.requests] == [r.input_tokens for r in other.requests]
    assert [r.arrival_s for r in one.requests] == [r.arrival_s for r in other.requests]
    assert one.requests != synthetic_workload(50, "zipf:1.2:16-512", "uniform:1-64", "poisson:3", seed=8).requests


@pytest.mark.parametrize(
    ("arguments", "knob"),
    [
        ({"num_requests": 0}, "num_requests"), ({"num_requests": 10**7}, "num_requests"),
        ({"input_lengths": 0}, "lengths"), ({"input_lengths": "uniform:9-3"}, "lengths"),
        ({"input_lengths": "normal:5"}, "lengths"), ({"input_lengths": "zipf:x:1-2"}, "lengths"),
        ({"input_lengths": "zipf:1:1-9999999"}, "lengths"), ({"output_lengths": None}, "lengths"),
        ({"arrivals": "poisson:0"}, "arrival rate"), ({"arrivals": "poisson:nan"}, "arrival rate"),
        ({"arrivals": "gamma:1"}, "arrivals"), ({"arrivals": "gamma:1:1000000"}, "arrivals"),
        ({"arrivals": None}, "arrivals"), ({"seed": -1}, "seed"),
        ({"shared_prefix_tokens": -1}, "shared_prefix_tokens"),
    ],
)  # fmt: skip
def test_bad_synthetic_arguments(arguments, knob):
    with pytest.raises(OutOfRangeError) as caught:
        synthetic_workload(**{"num_requests": 5, **arguments})
    assert caught.value.knob == knob


def test_new_arrivals_for_a_trace_of_lengths():
    workload = with_arrivals(load_workload("arxiv-summarization", limit=100), "poisson:10", seed=3)
    assert workload.duration_s == pytest.approx(10, rel=0.5)
    assert workload.steps[-1] == "arrivals replaced by poisson:10, seed 3"
    again = load_workload("arxiv-summarization", limit=100, arrivals="poisson:10", seed=3)
    assert again.requests == workload.requests


def test_loading_records_every_step_in_order():
    workload = load_workload(
        "mooncake-conversation", start_s=600, duration_s=600, limit=40, max_input_tokens=4096, max_output_tokens=64,
        rate_scale=2,
    )  # fmt: skip
    words = [step.split()[0] for step in workload.steps]
    assert words == ["reading", "slice:", "the", "prompts", "outputs", "request"]
    assert len(workload.requests) == 40
    assert workload.duration_s < 300


def test_a_workload_is_taken_as_it_is():
    workload = synthetic_workload(5)
    assert load_workload(workload, limit=3).requests == workload.requests[:3]
