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


def test_an_earlier_vllm_stays_when_other_tables_are_measured_anew(summarise):
    """220 µs of vLLM beside 110 of FA3 then, FA3 takes 1.1 of ours now."""
    row = decode("a", 100.0, gb_s=9.0, kv_bytes=10, fa3_us=110.0)
    ceilings = {"table": "ceilings", "read_gb_s": 10.0, "copy_gb_s": 10.0}
    found = summarise([ceilings, row | {"earlier": {"vllm_triton_us": 220.0, "fa3_us": 110.0}}])
    assert found[f"{DECODE}, through FA3 in both runs"]["value"] == pytest.approx(2.2)
    assert DECODE not in found
    assert summarise([ceilings, row])[DECODE]["value"] is None


def test_a_write_alone_is_held_against_the_ceiling_only_where_it_is_long(summarise):
    """Of 4,096 tokens a replay is half: they are held against a copy of as many bytes, and by layers in one graph."""
    rows = [
        {"table": "ceilings", "read_gb_s": 10.0, "copy_gb_s": 10.0},
        {
            "table": "kv_write", "tokens": 4096, "kv": "int8", "us": 10.0, "gb_s": 5.0, "copy_of_same_bytes_us": 9.0,
            "layer_us": 6.0, "layer_gb_s": 7.5, "layer_copy_us": 6.3,
        },
        {
            "table": "kv_write", "tokens": 32768, "kv": "int8", "us": 50.0, "gb_s": 8.4, "copy_of_same_bytes_us": 48.0,
        },
        {"table": "kv_write", "tokens": 64, "kv": "int8", "us": 6.0, "gb_s": 0.1, "copy_of_same_bytes_us": 3.0},
    ]  # fmt: skip
    found = summarise(rows)
    values = {name: entry["value"] for name, entry in found.items() if name.startswith("KV write")}
    assert values == {
        "KV write of 32768 tokens alone, share of the copy ceiling": 0.84,
        "KV write of 4096 tokens or more, against a copy of as many bytes": 0.9,
        "KV write, 28 layers in a graph, share of the copy ceiling": 0.75,
        "KV write, 28 layers in a graph, against as many copies": 1.05,
    }
