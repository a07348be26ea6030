"""The references themselves, against torch's own attention and plain formulas."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="Triton is not installed")

from labkit_kernels.heuristics import shared_splits
from labkit_kernels.reference import attend, dequantise, merge, paged_attention, quantise, rope


def test_attend_equals_torch():
    torch.manual_seed(0)
    q, k, v = torch.randn(5, 6, 16).double(), torch.randn(9, 2, 16).double(), torch.randn(9, 2, 16).double()
    out, lse = attend(q, k, v, scale=0.3)
    keys = k.repeat_interleave(3, 1).transpose(0, 1)
    mask = torch.ones(5, 9, dtype=torch.bool).tril(4)
    want = F.scaled_dot_product_attention(
        q.transpose(0, 1), keys, v.repeat_interleave(3, 1).transpose(0, 1), attn_mask=mask, scale=0.3
    )  # fmt: skip
    torch.testing.assert_close(out, want.transpose(0, 1))
    scores = (q.transpose(0, 1) @ keys.transpose(1, 2) * 0.3).masked_fill(~mask, -math.inf)
    torch.testing.assert_close(lse, scores.exp().sum(-1).log().transpose(0, 1))


def test_window_of_one_returns_the_tokens_own_value():
    q, k, v = torch.randn(4, 2, 8).double(), torch.randn(7, 2, 8).double(), torch.randn(7, 2, 8).double()
    out, _ = attend(q, k, v, scale=1.0, window=1)
    torch.testing.assert_close(out, v[-4:])


def test_a_sink_of_the_same_score_halves_the_weight():
    q, k, v = torch.zeros(1, 1, 4).double(), torch.zeros(1, 1, 4).double(), torch.ones(1, 1, 4).double()
    out, lse = attend(q, k, v, scale=1.0, sinks=torch.zeros(1))
    torch.testing.assert_close(out, v / 2)
    assert lse.item() == pytest.approx(math.log(2))


def test_merging_two_parts_equals_the_whole():
    q, k, v = torch.randn(3, 2, 8).double(), torch.randn(10, 2, 8).double(), torch.randn(10, 2, 8).double()
    whole, lse = attend(q, k, v, scale=0.5, causal=False)
    parts = [attend(q, k[part], v[part], scale=0.5, causal=False) for part in (slice(0, 4), slice(4, 10))]
    out, merged = merge(*parts[0], *parts[1])
    torch.testing.assert_close(out, whole)
    torch.testing.assert_close(merged, lse)


def test_paged_attention_of_an_empty_sequence_is_zero():
    cache = torch.full((2, 4, 1, 8), float("nan"))
    table = torch.zeros(1, 1, dtype=torch.int32)
    out, lse = paged_attention(torch.randn(1, 2, 8), cache, cache, table, torch.tensor([0]), scale=1.0)
    assert not out.any()
    assert torch.isinf(lse).all()


def test_quantise_clamps_and_rounds_half_to_even():
    values = torch.tensor([0.5, 1.5, 2.5, 1e9, -1e9])
    assert quantise(values, torch.int8).tolist() == [0, 2, 2, 127, -127]
    assert dequantise(quantise(values, torch.float8_e4m3fn))[-2:].tolist() == [448, -448]
    assert dequantise(quantise(values, torch.uint8))[-2:].tolist() == [448, -448]


def test_rope_turns_by_the_angle():
    x = torch.tensor([[[1.0, 0.0]]]).double()
    cos_sin = torch.tensor([[math.cos(0.7), math.sin(0.7)]]).double()
    turned = rope(x, torch.tensor([0]), cos_sin)
    torch.testing.assert_close(turned, torch.tensor([[[math.cos(0.7), math.sin(0.7)]]]).double())


@pytest.mark.parametrize(
    ("tokens", "row_blocks", "shares"),
    [
        (8192, 2, 8),
        (8192, 4, 4),
        (32768, 2, 12),
        (32768, 8, 4),
        (8192, 1, 16),
        (131072, 1, 32),
        (512, 2, 2),
        (64, 2, 1),
    ],
)
def test_shares_of_a_shared_prefix(tokens, row_blocks, shares):
    """132 multiprocessors, 8 KV heads: a program each, a second where a share were longer than 44 tiles; never none."""
    assert shared_splits(tokens // 64, 8 * row_blocks, 132) == shares
