"""Ratios of the kernel bench by hand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

BENCH = Path(__file__).resolve().parents[2] / "kernels" / "bench"
DECODE = "decode against vLLM's Triton kernel, every row"


@pytest.fixture
def add_earlier(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    from earlier_vllm import add_earlier

    yield add_earlier
    sys.modules.pop("earlier_vllm")


def decode(shape, us, **others):
    return {"table": "decode", "shape": shape, "kv": "bf16", "block_size": 16, "us": us, **others}


def test_an_earlier_time_goes_through_the_peer_that_ran_in_both(add_earlier):
    """vLLM took twice FA3's time then; FA3 takes 1.1 of ours now: 2.2. The row without FA3 then says nothing."""
    run = {
        "command": "run_all.py",
        "summary": {DECODE: {"value": None}, "kept": {"value": 1.0}},
        "rows": [decode("a", 100.0, fa3_us=110.0), decode("b", 10.0, fa3_us=1.0), decode("c", 10.0)],
    }
    earlier = {
        "made": "then",
        "rows": [decode("a", 130.0, fa3_us=100.0, vllm_triton_us=200.0), decode("b", 1.0, vllm_triton_us=1.0)],
    }
    found = add_earlier(run, earlier)
    assert DECODE not in found["summary"]
    line = found["summary"][f"{DECODE}, through FA3 in both runs"]
    assert line["value"] == pytest.approx(2.2)
    assert line["ok"]
    assert found["summary"]["kept"] == {"value": 1.0}
    assert found["vllm_triton_from"] == "then"
    assert found["rows"][0]["earlier"] == {"vllm_triton_us": 200.0, "fa3_us": 100.0}
    assert "earlier" not in found["rows"][1]
