"""The KV write on a card against its reference, byte for byte."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from labkit_kernels.kv_write import KVTarget, write_kv
from labkit_kernels.reference import quantise, token_head_scales

DTYPES = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8)


@pytest.mark.parametrize("num_tokens", [1, 300, 3000])
@pytest.mark.parametrize("token_scales", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_write_equals_reference(dtype, token_scales, num_tokens):
    if token_scales and dtype is torch.bfloat16:
        pytest.skip("a 16-bit cache has no scales")
    torch.manual_seed(num_tokens)
    heads, dim, block_size = 3, 128, 16
    blocks = num_tokens // block_size + 3
    key = torch.randn(num_tokens, heads, dim, device="cuda", dtype=torch.bfloat16) * 3
    value = torch.randn_like(key) * 300
    key[0] *= 1e-3
    slots = torch.randperm(blocks * block_size, device="cuda")[:num_tokens]
    slots[num_tokens // 2] = -1 if num_tokens > 1 else slots[0]
    caches = [torch.zeros(blocks, block_size, heads, dim, dtype=dtype, device="cuda") for _ in range(2)]
    scales = [torch.zeros(blocks, block_size, heads, device="cuda") for _ in range(2)] if token_scales else [None, None]
    per_head = torch.tensor([0.5, 0.25, 2.0], device="cuda")
    write_kv(key, value, slots, KVTarget(*caches, 0.05, per_head, *scales))
    keep = slots >= 0
    where = slots[keep] // block_size, slots[keep] % block_size
    for rows, cache, own, factor in (
        (key, caches[0], scales[0], 0.05),
        (value, caches[1], scales[1], per_head[:, None]),
    ):
        if token_scales:
            factor = token_head_scales(rows[keep], dtype)[..., None]
            torch.testing.assert_close(own[where], factor[..., 0], rtol=1e-6, atol=0)
            factor = own[where][..., None]
        want, have = quantise(rows[keep], dtype, factor), cache[where]
        # A value on the edge between two codes may fall either way: the card divides with another last bit.
        differ = (want.view(torch.uint8) != have.view(torch.uint8)).float().mean()
        assert differ < 2e-3
        assert not torch.isnan(have.float()).any()
    untouched = torch.ones(blocks * block_size, dtype=torch.bool, device="cuda")
    untouched[slots[keep]] = False
    assert not caches[0].view(torch.uint8).flatten(0, 1)[untouched].any()
