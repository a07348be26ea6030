"""The benchmark of weight formats: its summary by hand, and its refusal without a card."""

from __future__ import annotations

import pytest

from labkit.engine.bench_weights import bench_weights, summarize
from labkit.errors import UnsupportedError


def row(quantization, weights, planned, alone, together):
    return {
        "quantization": quantization, "weights_bytes": weights, "planned_weights_bytes": planned,
        "alone_tokens_per_s": alone, "together_tokens_per_s": together,
    }  # fmt: skip


def test_gains_are_over_16_bit_and_the_worst_byte_count_stands():
    found = summarize([row(None, 100, 101, 200, 8000), row("fp8", 50, 50, 300, 8400), row("awq", 26, 25, 250, 6000)])
    assert found["planned_weights_off"]["value"] == pytest.approx(0.04)
    assert not found["planned_weights_off"]["ok"]
    assert found["fp8_alone_vs_16_bit"] == {"value": 1.5, "at_least": 1.3, "aim": 1.5, "ok": True}
    assert found["fp8_together_vs_16_bit"]["value"] == pytest.approx(1.05)
    assert not found["fp8_together_vs_16_bit"]["ok"]
    assert found["awq_alone_vs_16_bit"]["value"] == 1.25
    assert found["awq_together_vs_16_bit"]["value"] == 0.75


def test_what_was_not_measured_is_a_miss():
    half = row("fp8", 50, 50, 300, 8000)
    del half["alone_tokens_per_s"], half["together_tokens_per_s"]
    for rows in ([], [row(None, 100, 100, 200, 8000)], [row(None, 100, 100, 200, 8000), half]):
        assert not any(entry["ok"] for entry in summarize(rows).values())


def test_without_a_card_it_says_so(tmp_path):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a card")
    with pytest.raises(UnsupportedError, match="needs an NVIDIA card"):
        bench_weights(tmp_path / "weights.json")
