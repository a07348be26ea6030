"""The golden table of notes/engines-and-vllm.md §3.7: printed by vLLM 0.33's own planner, run on a CPU."""

from __future__ import annotations

import pytest

from labkit.memory import Overrides, plan
from labkit.specs.engine_config import EngineConfig
from labkit.specs.gpu_spec import GpuSpec
from labkit.specs.model_spec import LayerSpec, ModelSpec

GIB = 2**30
CARD = GpuSpec("any", 80 * GIB)


def model(*layers: LayerSpec) -> ModelSpec:
    return ModelSpec("shape", "LlamaForCausalLM", "llama", layers, 4096, 14336, 32000, 1 << 20)


def full(heads: int, dim: int) -> LayerSpec:
    return LayerSpec("full", 64, heads, dim)


def sliding(heads: int, dim: int, window: int) -> LayerSpec:
    return LayerSpec("sliding", 64, heads, dim, window=window)


MLA = LayerSpec("mla", 128, 1, 192, v_head_dim=128, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128)
LLAMA = model(*[full(8, 128)] * 32)
GPT_OSS = model(*[sliding(8, 64, 128), full(8, 64)] * 12)
GEMMA = model(*[sliding(16, 128, 1024)] * 52, *[full(16, 128)] * 10)
DEEPSEEK = model(*[MLA] * 61)


def planned(spec, gib, length, version="0.33.0", **knobs):
    knobs.setdefault("max_num_batched_tokens", 2048)
    config = EngineConfig(max_model_len=length, max_num_seqs=256, **knobs)
    overrides = Overrides(available_kv_bytes=int(gib * GIB))
    return plan(spec, CARD, config, engine="vllm", engine_version=version, overrides=overrides)


@pytest.mark.parametrize(
    ("spec", "gib", "length", "knobs", "block_bytes", "blocks", "tokens", "concurrency"),
    [
        (LLAMA, 40, 8192, {}, 2_097_152, 20_480, 327_680, 40.0),
        (LLAMA, 40, 8192, {"block_size": 32}, 4_194_304, 10_240, 327_680, 40.0),
        (LLAMA, 40, 8192, {"kv_cache_dtype": "fp8"}, 1_048_576, 40_960, 655_360, 80.0),
        (LLAMA, 40, 8192, {"tensor_parallel_size": 2}, 1_048_576, 40_960, 655_360, 80.0),
        (LLAMA, 40, 8001, {}, 2_097_152, 20_480, 327_066, 40.8782),
        (LLAMA, 16 + 2 / 1024, 131072, {}, 2_097_152, 8_193, 131_088, 1.0001),
        (GPT_OSS, 20, 131072, {}, 393_216, 54_613, 846_427, 6.4577),
        (GPT_OSS, 20, 131072, {"max_num_batched_tokens": 8192}, 393_216, 54_613, 775_960, 5.9201),
        (GPT_OSS, 20, 131072, {"max_num_batched_tokens": 16384}, 393_216, 54_613, 698_432, 5.3286),
        (GEMMA, 20, 32768, {}, 1_310_720, 16_384, 135_095, 4.1228),
        (GEMMA, 20, 32768, {"max_num_batched_tokens": 8192}, 1_310_720, 16_384, 62_557, 1.9091),
        (DEEPSEEK, 30, 163840, {"block_size": 64}, 4_497_408, 7_162, 458_368, 2.7977),
        (DEEPSEEK, 30, 163840, {"block_size": 64, "kv_cache_dtype": "fp8"}, 2_248_704, 14_324, 916_736, 5.5953),
        (DEEPSEEK, 30, 163840, {"block_size": 64, "kv_cache_dtype": "fp8_ds_mla"}, 2_561_024, 12_577, 804_928, 4.9129),
    ],
)
def test_blocks_tokens_and_concurrency(spec, gib, length, knobs, block_bytes, blocks, tokens, concurrency):
    got = planned(spec, gib, length, **knobs)
    assert (got.block_bytes, got.num_gpu_blocks, got.kv_cache_tokens) == (block_bytes, blocks, tokens)
    assert round(got.max_concurrency, 4) == concurrency
    assert got.verdict == "fits"


@pytest.mark.parametrize(
    ("spec", "gib", "length", "block_bytes", "blocks", "tokens", "concurrency"),
    [
        (GPT_OSS, 20, 131072, 786_432, 27_306, 436_896, 3.3333),
        (GEMMA, 20, 32768, 8_126_464, 2_642, 42_272, 1.29),
    ],
)
def test_without_the_hybrid_manager_windows_are_full(spec, gib, length, block_bytes, blocks, tokens, concurrency):
    got = planned(spec, gib, length, disable_hybrid_kv_cache_manager=True)
    assert (got.block_bytes, got.num_gpu_blocks, got.kv_cache_tokens) == (block_bytes, blocks, tokens)
    assert round(got.max_concurrency, 4) == concurrency


def test_one_request_that_takes_the_whole_pool_lacks_the_null_block():
    small, equal = planned(LLAMA, 1, 131072), planned(LLAMA, 16, 131072)
    assert (small.verdict, small.max_model_len_that_fits) == ("does not fit", 8176)
    assert (equal.verdict, equal.max_model_len_that_fits) == ("does not fit", 131056)


def test_gemma_pads_eight_layers_into_seven_groups():
    rank = planned(GEMMA, 20, 32768).details["ranks"][0]
    assert (len(rank["groups"]), rank["padding_layers"]) == (7, 8)


@pytest.mark.parametrize(
    ("kv_cache_dtype", "token_bytes"),
    [
        ("auto", 4096), ("fp8", 2048), ("int8_per_token_head", 2112), ("fp8_per_token_head", 2112),
        ("int4_per_token_head", 1088), ("nvfp4", 1152), ("turboquant_k8v4", 1568), ("turboquant_4bit_nc", 1072),
        ("turboquant_k3v4_nc", 944), ("turboquant_3bit_nc", 816),
    ],
)  # fmt: skip
def test_bytes_of_a_token_and_layer_of_eight_heads_of_128(kv_cache_dtype, token_bytes):
    got = planned(LLAMA, 40, 8192, kv_cache_dtype=kv_cache_dtype)
    assert got.block_bytes == 32 * 16 * token_bytes
