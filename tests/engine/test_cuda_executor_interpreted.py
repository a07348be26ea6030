"""The GPU executor on CPU tensors, its kernels interpreted: the CPU executor's tokens, whatever the knobs."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def results(interpreted):
    return interpreted("interpreted_engine.py")


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "qwen with a penalty",
        "windows and caps",
        "recompute",
        "swap",
        "swap block by block",
        "padded",
        "other blocks",
    ],
)
def test_greedy_tokens_are_those_of_the_cpu_executor(results, name):
    """Prefill in chunks beside decode, fused and plain layers, preempted requests."""
    assert results[name]["cuda"] == results[name]["cpu"]


@pytest.mark.parametrize("name", ["recompute", "swap", "swap block by block"])
def test_small_pools_do_send_requests_back(results, name):
    assert results[name]["preemptions"] > 0


def test_a_pool_of_the_same_size_keeps_its_memory(results):
    assert results["other blocks"]["kept"]


def test_what_is_drawn_does_not_depend_on_the_pool(results):
    assert results["drawn"]["cuda"] == results["drawn"]["cpu"]
    assert len({tuple(tokens) for tokens in results["drawn"]["cuda"]}) == 3
