"""Paged attention against the dense one, for every layer kind, storage type, split of the prompt and block order."""

from __future__ import annotations

import random

import pytest
import torch

from labkit.engine.kv_cache import BlockRun, KVCache
from labkit.engine.paged_attention import PagedAttention, Span
from labkit.errors import UnsupportedError
from labkit.models.attention import DenseAttention
from labkit.specs.model_spec import LayerSpec

BLOCK_SIZE, NUM_BLOCKS, LENGTH = 4, 40, 37


def _cache(spec, kind="auto", dtype=torch.float32, swap=0) -> KVCache:
    return KVCache(
        spec,
        num_blocks=NUM_BLOCKS,
        num_swap_blocks=swap,
        block_size=BLOCK_SIZE,
        kv_cache_dtype=kind,
        dtype=dtype,
        max_blocks_per_seq=16,
    )


def _blocks(order: str) -> list[int]:
    count = -(-LENGTH // BLOCK_SIZE)
    return list(range(5, 5 + count)) if order == "run" else random.Random(3).sample(range(NUM_BLOCKS), count)


def _run(blocks: list[int], num_tokens: int, order: str) -> BlockRun:
    used = blocks[: -(-num_tokens // BLOCK_SIZE)]
    return BlockRun(used[0], len(used), num_tokens, None if order == "run" else torch.tensor(used))


def _slots(blocks: list[int], start: int, stop: int) -> torch.Tensor:
    return torch.tensor([blocks[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(start, stop)])


def _tokens(layer: LayerSpec, seed: int = 0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    v_dim = layer.v_head_dim or layer.head_dim
    shapes = ((layer.num_heads, layer.head_dim), (layer.num_kv_heads, layer.head_dim), (layer.num_kv_heads, v_dim))
    return [torch.randn(LENGTH, *shape, generator=generator).to(dtype) for shape in shapes]


def _paged(spec, cache, splits: list[int], order: str, q, k, v) -> torch.Tensor:
    attention, blocks, parts, start = PagedAttention(spec, cache), _blocks(order), [], 0
    for length in splits:
        stop = start + length
        attention.begin([Span(0, length, _run(blocks, stop, order))], _slots(blocks, start, stop))
        parts.append(attention.attend(0, q[start:stop], k[start:stop], v[start:stop]))
        start = stop
    return torch.cat(parts)


LAYERS = {
    "full": LayerSpec(kind="full", num_heads=6, num_kv_heads=2, head_dim=16),
    "mha": LayerSpec(kind="full", num_heads=3, num_kv_heads=3, head_dim=8),
    "mqa": LayerSpec(kind="full", num_heads=5, num_kv_heads=1, head_dim=8),
    "sliding": LayerSpec(kind="sliding", num_heads=4, num_kv_heads=2, head_dim=8, window=9),
    "sliding-wider-than-all": LayerSpec(kind="sliding", num_heads=4, num_kv_heads=2, head_dim=8, window=100),
    "window-of-one": LayerSpec(kind="sliding", num_heads=2, num_kv_heads=2, head_dim=8, window=1),
    "chunked": LayerSpec(kind="chunked", num_heads=4, num_kv_heads=2, head_dim=8, window=10),
    "narrow-v": LayerSpec(kind="full", num_heads=4, num_kv_heads=2, head_dim=16, v_head_dim=8),
}
SPLITS = {
    "whole": [37],
    "chunks": [10, 1, 9, 17],
    "tokens": [1] * 37,
    "prompt-then-tokens": [30] + [1] * 7,
}


@pytest.mark.parametrize("order", ["run", "scattered"])
@pytest.mark.parametrize("splits", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_equals_dense_attention(one_thread, tiny_spec, layer, splits, order):
    spec = tiny_spec(layers=(layer,))
    q, k, v = _tokens(layer)
    expected = DenseAttention(spec, [LENGTH]).attend(0, q, k, v)
    torch.testing.assert_close(_paged(spec, _cache(spec), splits, order, q, k, v), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("splits", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("layer", [LAYERS["full"], LAYERS["sliding"]], ids=["full", "sliding"])
@pytest.mark.parametrize(("softcap", "scale"), [(5.0, None), (None, 0.7), (2.0, 0.7)])
def test_softcap_and_own_scale_equal_dense_attention(one_thread, tiny_spec, layer, splits, softcap, scale):
    spec = tiny_spec(layers=(layer,), attention_softcap=softcap, attention_scale=scale)
    q, k, v = _tokens(layer)
    expected = DenseAttention(spec, [LENGTH]).attend(0, q, k, v)
    torch.testing.assert_close(_paged(spec, _cache(spec), splits, "run", q, k, v), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("order", ["run", "scattered"])
@pytest.mark.parametrize(
    ("kind", "round_trip"),
    [
        ("float16", lambda x: x.to(torch.float16).float()),
        ("bfloat16", lambda x: x.to(torch.bfloat16).float()),
        ("fp8", lambda x: x.clamp(-448, 448).to(torch.float8_e4m3fn).float()),
        ("fp8_e4m3", lambda x: x.clamp(-448, 448).to(torch.float8_e4m3fn).float()),
        ("fp8_e5m2", lambda x: x.clamp(-57344, 57344).to(torch.float8_e5m2).float()),
        ("int8_per_token_head", lambda x: (x / (s := x.abs().amax(-1, keepdim=True) / 127)).round() * s),
    ],
)
def test_storage_types_keep_what_their_cast_keeps(one_thread, tiny_spec, kind, round_trip, order):
    """Attention over the stored tokens equals dense attention over keys and values sent through the cast."""
    layer = LAYERS["full"]
    spec = tiny_spec(layers=(layer,))
    q, k, v = _tokens(layer)
    k[3] *= 300.0  # beyond 448: must saturate, not become NaN
    expected = DenseAttention(spec, [LENGTH]).attend(0, q, round_trip(k), round_trip(v))
    found = _paged(spec, _cache(spec, kind), SPLITS["chunks"], order, q, k, v)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_int8_of_a_zero_row_is_zero(one_thread, tiny_spec):
    layer = LAYERS["full"]
    spec = tiny_spec(layers=(layer,))
    cache = _cache(spec, "int8_per_token_head")
    zeros = torch.zeros(1, layer.num_kv_heads, layer.head_dim)
    cache.write(0, torch.tensor([0]), zeros, zeros)
    keys, values = cache.read(0, BlockRun(0, 1, 1, None))
    assert not keys.any()
    assert not values.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_close_to_float32(one_thread, tiny_spec, dtype):
    layer = LAYERS["full"]
    spec = tiny_spec(layers=(layer,))
    q, k, v = _tokens(layer, dtype=dtype)
    expected = DenseAttention(spec, [LENGTH]).attend(0, q.float(), k.float(), v.float())
    found = _paged(spec, _cache(spec, dtype=dtype), SPLITS["chunks"], "scattered", q, k, v)
    torch.testing.assert_close(found.float(), expected, atol=3e-2, rtol=3e-2)


def test_sequences_of_one_step_do_not_see_each_other(one_thread, tiny_spec):
    layer = LAYERS["full"]
    spec = tiny_spec(layers=(layer,))
    cache = _cache(spec)
    attention = PagedAttention(spec, cache)
    tables = [[0, 2, 4], [1, 3, 5]]
    lengths = [9, 11]
    tokens = [_tokens(layer, seed) for seed in (1, 2)]
    q, k, v = (torch.cat([tokens[0][i][:9], tokens[1][i][:11]]) for i in range(3))
    spans = [
        Span(0, 9, BlockRun(0, 3, 9, torch.tensor(tables[0]))),
        Span(9, 20, BlockRun(1, 3, 11, torch.tensor(tables[1]))),
    ]
    attention.begin(spans, torch.cat([_slots(table, 0, n) for table, n in zip(tables, lengths, strict=True)]))
    expected = DenseAttention(spec, lengths).attend(0, q, k, v)
    torch.testing.assert_close(attention.attend(0, q, k, v), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", ["auto", "fp8", "int8_per_token_head"])
def test_swapped_blocks_come_back_bit_for_bit(one_thread, tiny_spec, kind):
    layer = LAYERS["full"]
    spec = tiny_spec(layers=(layer, layer))
    cache = _cache(spec, kind, swap=6)
    _, k, v = _tokens(layer)
    for index in (0, 1):
        cache.write(index, torch.arange(LENGTH), k * (index + 1), v * (index + 1))
    run = BlockRun(0, 10, LENGTH, None)
    before = [tensor.clone() for index in (0, 1) for tensor in cache.read(index, run)]
    cache.swap([(2, 5), (7, 0)], [])
    for index in (0, 1):
        cache.write(index, torch.arange(8, 12), k[:4] * 9, v[:4] * 9)
        cache.write(index, torch.arange(28, 32), k[:4] * 9, v[:4] * 9)
    cache.swap([], [(2, 5), (7, 0)])
    after = [tensor.clone() for index in (0, 1) for tensor in cache.read(index, run)]
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


@pytest.mark.parametrize(
    ("kind", "element", "scale"), [("auto", 4, 0), ("bfloat16", 2, 0), ("fp8", 1, 0), ("int8_per_token_head", 1, 8)]
)
def test_pool_bytes_are_blocks_times_tokens_times_width(one_thread, tiny_spec, kind, element, scale):
    layer = LAYERS["full"]
    cache = _cache(tiny_spec(layers=(layer, layer, layer)), kind)
    token = 3 * layer.num_kv_heads * (2 * layer.head_dim * element + scale)
    assert cache.pool_bytes == NUM_BLOCKS * BLOCK_SIZE * token


def test_layer_kinds_and_types_that_it_cannot_hold_are_refused(tiny_spec):
    with pytest.raises(UnsupportedError, match="mla"):
        _cache(tiny_spec(layers=(LayerSpec(kind="mla", num_heads=2, kv_lora_rank=8),)))
    with pytest.raises(UnsupportedError):
        _cache(tiny_spec(), "nvfp4")
