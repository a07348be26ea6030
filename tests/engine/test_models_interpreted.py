"""Embeddings, experts and 4-bit weights on the GPU executor, its kernels interpreted, beside the CPU's way."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def results(interpreted):
    return interpreted("interpreted_models.py")


def test_embeddings_are_those_of_the_cpu_executor(results):
    assert results["vectors"] < 1e-4


def test_experts_give_the_cpu_executors_tokens_and_say_why_they_are_not_captured(results):
    ours, theirs = results["experts"]
    assert ours == theirs
    assert "on a CPU" in results["why eager"]


def test_awq_layers_run_the_kernel_and_give_the_unpacked_weights_tokens(results):
    assert results["awq runs the kernel"]
    assert results["awq"] < 0.01
    assert results["awq tokens"][0] == results["awq tokens"][1]
