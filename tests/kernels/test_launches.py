"""Launches that are repeated are those that Triton would launch: same variant, grid and numbers, the new addresses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="needs Triton: pip install 'labkit[triton]'")
SCRIPT = Path(__file__).with_name("repeated_launches.py")
SCORES = ["sinks", "k_scale_ptr", "v_scale_ptr", "k_tokens", "v_tokens"]
# Pointers that a kernel does not read under its compile-time switches, 16-bit cache without scales.
UNREAD = {
    "norm": ["residual"],
    "sum and norm": [],
    "in place": [],
    "silu": [],
    "write": SCORES[1:],
    "rope and write": SCORES[1:],
    "plan": ["query_start_loc"],
    "one row": ["scale", "bias"],
    "one row, bias": ["scale"],
    "one row, e4m3": ["bias"],
    "decode": ["lse", "shared_out", "shared_lse", *SCORES],
    "decode, uneven": ["shared_out", "shared_lse", *SCORES],
    "prefill": ["lse", "partial_out", "partial_lse", *SCORES],
    # The launch over shares of the keys, then their merge.
    "prefill, split": ["out", "lse", *SCORES, "lse", "sinks", "v_scale_ptr"],
}


@pytest.fixture(scope="module")
def notes():
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, SCRIPT], env=plain, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize(("cache", "read"), [("16 bit", ()), ("int8", ("k_tokens", "v_tokens"))])
@pytest.mark.parametrize("name", UNREAD)
def test_what_is_repeated_is_what_triton_would_launch(notes, cache, read, name):
    row = dict(notes[cache][name])
    assert row.pop("unread") == [pointer for pointer in UNREAD[name] if pointer not in read]
    assert row == {"variant": True, "grid": True, "stream": True, "numbers": True, "pointers": True}


def test_a_call_that_looks_otherwise_goes_through_triton(notes):
    counts = notes["differences"]
    assert counts.pop("the same") == 0
    assert counts == dict.fromkeys(("eps", "offset", "address", "stride", "rows", "dtype", "residual"), 1)


@pytest.mark.parametrize("name", ["weight", "x", "slot_mapping", "positions", "softcap"])
def test_bad_arguments_are_refused_after_good_ones(notes, name):
    assert name in notes["refusals"][name]


def test_what_is_kept_is_bounded_and_holds_no_pointer_of_its_own(notes):
    assert notes["kept"] == {"one more than there is room for": 1, "a pointer of its own": 0}
