"""Predicted = measured: every part of the engine's memory against the plan that it was built from."""

from __future__ import annotations

import pytest

from labkit.engine import Engine
from labkit.memory.planner import plan
from labkit.specs.engine_config import EngineConfig
from labkit.specs.gpu_spec import GpuSpec
from labkit.specs.model_spec import LayerSpec

CPU = GpuSpec(name="cpu", total_bytes=2**31, origin="cpu")
FULL = LayerSpec(kind="full", num_heads=8, num_kv_heads=4, head_dim=64)
SLIDING = LayerSpec(kind="sliding", num_heads=8, num_kv_heads=4, head_dim=64, window=64)


@pytest.fixture
def small_spec(tiny_spec):
    """Wide enough that rows outweigh the fixed buffers inside torch's operators."""

    def make(**changes):
        fields = {"layers": (FULL, FULL), "hidden_size": 256, "intermediate_size": 512, "vocab_size": 1000}
        return tiny_spec(**{**fields, "max_position_embeddings": 20_000, **changes})

    return make


def _config(**changes) -> EngineConfig:
    defaults = {
        "max_model_len": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 128,
        "dtype": "float32",
        "num_gpu_blocks_override": 50,
    }
    return EngineConfig(**{**defaults, **changes})


def _compare(decoder, config) -> None:
    predicted = plan(decoder.spec, CPU, config, engine="labkit")
    engine = Engine(decoder, predicted)
    measured = engine.memory_parts()
    assert measured["kv_cache"] == predicted.breakdown.kv_cache_bytes == 50 * predicted.block_bytes
    assert measured["block_tables"] == predicted.breakdown.block_tables_bytes
    assert measured["workspace"] == predicted.breakdown.workspace_bytes
    assert measured["weights"] == pytest.approx(predicted.breakdown.weights_bytes, rel=0.02)
    assert measured["activation"] == pytest.approx(predicted.breakdown.activation_bytes, rel=0.10)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"block_size": 1},
        {"block_size": 64},
        {"kv_cache_dtype": "fp8"},
        {"kv_cache_dtype": "fp8_e5m2", "block_size": 8},
        {"kv_cache_dtype": "int8_per_token_head"},
        {"kv_cache_dtype": "bfloat16"},
        {"dtype": "bfloat16"},
        {"max_num_batched_tokens": 2048},
        {"max_num_seqs": 128, "max_num_batched_tokens": 128},
        {"max_model_len": 10_000},
    ],
    ids=str,
)
def test_small_model_parts_equal_the_plan(tiny_decoder, small_spec, changes):
    decoder = tiny_decoder(small_spec(), changes.get("dtype", "float32"))
    _compare(decoder, _config(**changes))


@pytest.mark.parametrize(
    "traits",
    [
        {"intermediate_size": 64},
        {"intermediate_size": 2048},
        {"layers": (SLIDING, FULL), "intermediate_size": 64},
        {"attention_softcap": 20.0},
        {"sandwich_norms": True, "norms_per_layer": 4, "norm_offset": True, "qk_norm": True},
        {"qk_norm": True},
        {"vocab_size": 50_000},
    ],
    ids=lambda traits: next(iter(traits)),
)
def test_other_networks_agree_too(tiny_decoder, small_spec, traits):
    _compare(tiny_decoder(small_spec(**traits)), _config())


@pytest.mark.parametrize("budget", [128, 512])
def test_real_model_parts_equal_the_plan(smollm2_gguf, one_thread, budget):
    from labkit.models.loading import load_model_weights
    from labkit.specs.gguf_spec import model_from_gguf

    decoder = load_model_weights(model_from_gguf(smollm2_gguf), smollm2_gguf, "float32")
    _compare(decoder, _config(max_num_batched_tokens=budget, max_num_seqs=16, max_model_len=1024))


def test_peak_is_that_of_the_allocator(one_thread):
    from labkit.engine.memory_meter import peak_bytes

    torch = one_thread

    def call():
        first = torch.empty(1000, 1000)
        second = torch.empty(500, 1000)
        del first
        third = torch.empty(250, 1000)
        return second.shape, third.shape

    assert peak_bytes(call) == 4 * 1_500_000
    assert peak_bytes(lambda: None) == 0
