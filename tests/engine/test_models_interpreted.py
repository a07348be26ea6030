"""Embeddings, experts and 4-bit weights on the GPU executor, its kernels interpreted, beside the CPU's way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def results():
    if find_spec("triton") is None:
        pytest.skip("needs Triton, which interprets the kernels: pip install 'labkit[triton]'")
    root = Path(__file__).resolve().parents[2]
    paths = os.pathsep.join((str(root / "kernels"), str(root)))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    script = Path(__file__).with_name("interpreted_models.py")
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


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
