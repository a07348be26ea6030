"""`percentiles` against numpy, a run's summary against sums by hand, and both against nothing at all."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.measure.run_record import RequestRow, StepRow
from labkit.measure.summary import inter_token_s, percentiles, summarize
from tests.figures.samples import sample_record


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40))
def test_percentiles_agree_with_numpy(values):
    got = percentiles(values)
    expected = np.quantile(values, [0.5, 0.95, 0.99])
    assert [got.p50, got.p95, got.p99] == pytest.approx(list(expected), rel=1e-9, abs=1e-6)
    assert got.num_values == len(values)


def test_percentiles_of_nothing_are_none_not_zero():
    assert percentiles([]) is None


def test_energy_is_shared_by_the_output_tokens():
    record = sample_record(num_requests=4)
    tokens = sum(row.output_tokens for row in record.requests)
    assert summarize(record).energy_per_token_j is None
    assert summarize(dataclasses.replace(record, energy_j=50.0)).energy_per_token_j == 50.0 / tokens
    assert summarize(dataclasses.replace(record, energy_j=50.0, requests=())).energy_per_token_j is None


def step(num_blocks_used, num_tokens_stored, start_s=0.0):
    return StepRow(start_s, 0.5, 9, 5, 4, 2, 0, num_blocks_used, 0, num_tokens_stored)


@pytest.fixture
def run():
    """Of five requests two end by themselves; one was cancelled after four tokens, one refused, one never began."""
    requests = (
        RequestRow(0, 1.0, 2.0, 5.0, 30, 4, 16, 1, "length", (2.0, 2.5, 3.5, 5.0)),
        RequestRow(1, 2.0, 5.0, 9.0, 50, 5, 0, 2, "stop"),
        RequestRow(2, 3.0, 4.0, 6.0, 20, 4, 4, 0, "cancelled", (4.0, 4.5, 5.0, 6.0)),
        RequestRow(3, 3.0, None, 3.0, 900, 0, finish_reason="refused: too long"),
        RequestRow(4, 8.0, None, None, 70, 0),
    )
    record = sample_record()
    plan = dataclasses.replace(
        record.plan, config=record.plan.config.replace(block_size=16), num_gpu_blocks=40, details={}
    )
    steps = (step(4, 50), step(10, 120), step(10, 130), step(2, 5))
    return dataclasses.replace(record, plan=plan, requests=requests, steps=steps, duration_s=10.0)


def test_a_run_by_hand(run):
    found = summarize(run)
    assert (found.num_requests, found.num_finished, found.num_output_tokens) == (5, 2, 13)
    assert (found.duration_s, found.output_tokens_per_s, found.requests_per_s) == (10.0, 1.3, 0.2)
    # Arrival to first token: 1, 3 and 1 s; to the last one, of those that ended by themselves: 4 and 7 s.
    assert (found.ttft_s.p50, found.ttft_s.mean, found.ttft_s.num_values) == (1.0, pytest.approx(5 / 3), 3)
    assert (found.e2e_s.p50, found.e2e_s.num_values) == (5.5, 2)
    assert found.num_preemptions == 3
    # Of 30 + 50 + 20 prompt tokens that were computed, 16 + 4 came from the prefix cache.
    assert found.cached_share == 0.2
    # The first of the fullest steps: 10 of 40 blocks of 16 tokens, with 120 tokens in them.
    assert (found.peak_kv_share, found.tail_waste_share) == (0.25, 0.25)


def test_gaps_between_tokens_are_their_times_or_the_requests_mean(run):
    own, mean = [0.5, 1.0, 1.5], [1.0] * 4
    assert inter_token_s(run.requests) == [*own, *mean, 0.5, 0.5, 1.0]
    assert inter_token_s((dataclasses.replace(run.requests[1], output_tokens=1),)) == []


def test_a_run_that_never_began_has_no_numbers(run):
    found = summarize(dataclasses.replace(run, requests=(), steps=(), duration_s=0.0))
    assert (found.num_requests, found.num_output_tokens, found.duration_s) == (0, 0, 0.0)
    for name in ("ttft_s", "inter_token_s", "e2e_s", "output_tokens_per_s", "requests_per_s", "cached_share",
                 "peak_kv_share", "tail_waste_share", "energy_per_token_j"):  # fmt: skip
        assert getattr(found, name) is None, name


def test_without_a_duration_the_last_step_ends_the_run(run):
    steps = (step(1, 5, start_s=3.0), step(1, 5, start_s=1.0))
    assert summarize(dataclasses.replace(run, steps=steps, duration_s=0.0)).duration_s == 3.5
