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


@pytest.fixture
def summarise(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    from summary import by_name, summarise

    yield lambda rows: by_name(summarise(rows))
    sys.modules.pop("summary")


def decode(shape, us, **others):
    return {"table": "decode", "shape": shape, "kv": "bf16", "block_size": 16, "us": us, **others}


def shared(shape, **times):
    return {"table": "shared_prefix", "shape": shape, **times}


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


def test_rows_that_were_timed_beside_each_other_are_compared_with_each_other(summarise):
    """A read of as many bytes took 95 of 100; the longer prefix is a line of its own, and so is a clean L2."""
    rows = [
        {"table": "ceilings", "read_gb_s": 10.0, "copy_gb_s": 10.0},
        decode("a", 101.0, gb_s=9.0, kv_bytes=10**9, beside_read_us=100.0, read_of_same_bytes_us=95.0),
        shared("a", us=50.0, plain_us=150.0, clean_us=40.0, clean_plain_us=140.0),
        shared("b", us=10.0, plain_us=90.0, clean_us=10.0, clean_plain_us=80.0),
    ]
    found = summarise(rows)
    assert found["decode bf16 at 1 GB of KV or more, against a read of as many bytes"]["value"] == 0.95
    assert found["decode bf16 at 1 GB of KV or more, share of the read ceiling"]["value"] == 0.9
    prefix = "shared prefix against our plain decode"
    assert (found[prefix]["value"], found[prefix]["ok"]) == (3.0, False)
    assert found[f"{prefix}, L2 with nothing to write back"]["value"] == 3.5
    assert found[f"{prefix}, longer or for more sequences, lowest"]["value"] == 9.0
