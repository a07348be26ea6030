"""The guides' case (a): which reading of it fails, by vLLM's start-up rules worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from labkit.advice.claims import CASE_A, claim_ids, judge
from labkit.advice.claims.case_a import (
    AFTER,
    SAID_RATE,
    TEXT_TOKENS,
    better_answer,
    cures,
    planned_as,
    readings,
    shared_range_gib,
    try_reading,
)
from labkit.specs import load_gpu

GIB = 2**30


@pytest.fixture(scope="module")
def found():
    return {reading.name: try_reading(reading) for reading in readings()}


def test_one_text_of_an_8b_model_is_too_long_for_what_the_weights_leave(found):
    # Qwen3-8B: 36 layers x 8 KV heads x 128 x (K and V) x 2 bytes x 32,768 tokens = 4.5 GiB; 15.3 GiB of weights less
    # the head that an embedding model lacks, 1.16 GiB, and the peak leave less of 0.9 x 22.0 GiB.
    entry = found["8B model"]
    needed = 36 * 8 * 128 * 2 * 2 * 32768
    left = 0.9 * load_gpu("A10").total_bytes - planned_as(entry.reading, AFTER).breakdown.weights_bytes
    assert left - needed < 1.5 * GIB
    assert (entry.failure, entry.is_stable, entry.is_memory_story) == ("memory", True, True)
    # 28 texts a second of 2,300 tokens through 6.9e9 weights are 890 TFLOP/s on a card that peaks at 125.
    assert not entry.allows_rate
    assert entry.rate < 125e12 / (2 * 6.9e9 * TEXT_TOKENS) < SAID_RATE / 5
    assert "max_model_len" in cures(entry.reading)
    assert "block_size" not in cures(entry.reading)


def test_the_small_model_fails_only_when_others_hold_a_tenth_of_the_card(found):
    assert found["alone on the card"].failure == "none"
    entry = found["shared card"]
    assert entry.is_memory_story
    # 0.44e9 weights and attention: the card's peak allows 50 of them, so 28 are within reach.
    assert entry.allows_rate
    assert entry.rate < 125e12 / (2 * 0.44e9 * TEXT_TOKENS)
    assert cures(entry.reading) == ("gpu_memory_utilization",)
    low, high = shared_range_gib()
    total = load_gpu("A10").total_bytes / GIB
    # vLLM asks for the utilization's share of the total to be free: a tenth may be in use before, 0.18 after.
    assert low == pytest.approx(0.1 * total, abs=0.3)
    assert 0.14 * total < high < 0.18 * total


def test_rules_that_refuse_the_first_flags_are_no_lack_of_memory(found):
    assert found["no chunked prefill"].failure == found["block 8"].failure == "flags"
    assert "multiple of 16" in found["block 8"].reason


def test_the_same_rate_needs_a_fraction_of_the_memory(found):
    theirs, ours = better_answer(found["shared card"].reading)
    assert ours.rate >= 0.99 * theirs.rate
    assert ours.p99_s <= 1.01 * theirs.p99_s
    assert ours.used_bytes < 0.5 * theirs.used_bytes
    assert "--gpu-memory-utilization" in ours.command


def test_on_a_card_with_room_nothing_fails():
    reading = next(entry for entry in readings() if entry.name == "8B model")

    class Roomy(type(reading)):
        @property
        def gpu(self):
            return replace(load_gpu("A10"), total_bytes=40 * GIB)

    roomy = Roomy(reading.name, reading.words, reading.model)
    assert try_reading(roomy).failure == "none"


def test_the_verdict_says_which_assumption_it_needs():
    verdict = judge("case-a")
    assert verdict.claim == CASE_A not in claim_ids()
    assert verdict.verdict == "depends"
    assert "another process on the card" in verdict.conditions
    assert "“8B model” fails and recovers as told" in verdict.conditions
    assert verdict.numbers["0.82 of the card, GiB"] == pytest.approx(18.2, rel=0.02)
