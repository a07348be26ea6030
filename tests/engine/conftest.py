"""Tiny random models, plans without memory behind them, and a plain greedy loop to compare with."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from labkit.engine import Engine, EngineRequest, RequestOutput, SamplingParams
from labkit.engine.simulation import bare_plan
from labkit.specs.engine_config import EngineConfig
from labkit.specs.model_spec import LayerSpec, ModelSpec

_MATRICES = ("qkv", "output", "gate_up", "down")


def _tiny_spec(**changes) -> ModelSpec:
    layer = LayerSpec(kind="full", num_heads=4, num_kv_heads=2, head_dim=8)
    fields = {
        "name": "tiny",
        "architecture": "LlamaForCausalLM",
        "model_type": "llama",
        "layers": (layer, layer),
        "hidden_size": 32,
        "intermediate_size": 48,
        "vocab_size": 101,
        "max_position_embeddings": 512,
        "dtype": "float32",
        "eos_token_ids": (0,),
    }
    return ModelSpec(**{**fields, **changes})


@pytest.fixture(scope="session")
def tiny_spec() -> Callable[..., ModelSpec]:
    return _tiny_spec


@pytest.fixture(scope="session")
def tiny_decoder(one_thread):
    """A decoder with random weights that are large enough to make greedy choices clear."""
    from labkit.models.decoder import Decoder
    from labkit.models.loading import load_model_weights

    def make(spec: ModelSpec | None = None, dtype: str = "float32") -> Decoder:
        decoder = load_model_weights(spec or _tiny_spec(), dtype=dtype, load_format="dummy")
        generator = one_thread.Generator().manual_seed(5)

        def matrix(shape: tuple[int, ...]):
            return (one_thread.randn(shape, generator=generator) * shape[-1] ** -0.5).to(decoder.dtype)

        layers = tuple(
            dataclasses.replace(layer, **{name: matrix(getattr(layer, name).shape) for name in _MATRICES})
            for layer in decoder.weights.layers
        )
        weights = dataclasses.replace(
            decoder.weights,
            layers=layers,
            embedding=matrix(decoder.weights.embedding.shape),
            head=matrix(decoder.weights.head.shape),
        )
        return Decoder(decoder.spec, weights)

    return make


@pytest.fixture(scope="session")
def make_plan():
    def make(model: ModelSpec | None = None, blocks: int = 64, swap: int = 0, **config):
        defaults = {"max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 64, "block_size": 4}
        return bare_plan(model or _tiny_spec(), EngineConfig(**{**defaults, **config}), blocks, swap)

    return make


@pytest.fixture(scope="session")
def drain():
    """Step until nothing is left, balancing the books each time; outputs by request id."""

    def run(engine: Engine, max_steps: int = 5000) -> dict[int, RequestOutput]:
        finished = {}
        for _ in range(max_steps):
            if not engine.has_unfinished:
                return finished
            finished |= {output.request_id: output for output in engine.step().finished}
            engine.check()
        raise AssertionError(f"not done after {max_steps} steps")

    return run


@pytest.fixture(scope="session")
def greedy_tokens(one_thread):
    """Greedy output of one prompt by computing everything anew at each token, without a cache."""

    def run(decoder, prompt: tuple[int, ...], count: int) -> list[int]:
        from labkit.models.attention import DenseAttention

        tokens = list(prompt)
        for _ in range(count):
            attention = DenseAttention(decoder.spec, [len(tokens)])
            hidden = decoder.forward(one_thread.tensor(tokens), one_thread.arange(len(tokens)), attention)
            tokens.append(int(decoder.logits(hidden[-1:]).argmax()))
        return tokens[len(prompt) :]

    return run


@pytest.fixture(scope="session")
def greedy_request():
    def make(request_id: int, prompt: tuple[int, ...], max_tokens: int, **sampling) -> EngineRequest:
        return EngineRequest(
            request_id, prompt, SamplingParams(**{"max_tokens": max_tokens, "ignore_eos": True, **sampling})
        )

    return make


@pytest.fixture(scope="session")
def interpreted():
    """What a script of this folder prints (one JSON object) with Triton's kernels interpreted, in a process of its own:
    kernels imported for the interpreter stay interpreted."""

    def run(script: str):
        if find_spec("triton") is None:
            pytest.skip("needs Triton, which interprets the kernels: pip install 'labkit[triton]'")
        root = Path(__file__).resolve().parents[2]
        paths = os.pathsep.join((str(root / "kernels"), str(root)))
        environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
        command = [sys.executable, Path(__file__).with_name(script)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run
