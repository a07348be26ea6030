"""Machine code for several architectures without a card: no spills, shared memory, matrix instructions, wide copies.

Compiled in a process of its own: Triton decides between compiling and interpreting when it is imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

SCRIPT = Path(__file__).with_name("attention_launches.py")
KERNELS = Path(__file__).resolve().parents[2] / "kernels"
SHARED_MEMORY_BYTES = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024}


@cache
def reports() -> dict[str, dict]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(KERNELS)
    done = subprocess.run(
        [sys.executable, SCRIPT], env=environment, capture_output=True, text=True, check=False, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", ["90 bf16", "90 fp8", "90 int8", "80 e4m3 bits", "80 bf16", "89 fp8"])
def test_decode_code(name):
    report = reports()[f"decode {name}"]
    assert report["spill_bytes"] == 0
    assert report["shared_bytes"] <= SHARED_MEMORY_BYTES[report["arch"]]
    assert report["wide_async_copies"] == report["async_copies"] > 0
    assert report["byte_shared_loads"] == 0
    swapped = name == "90 bf16"
    assert (report["wgmma"] > 0) == swapped
    assert (report["mma"] > 0) != swapped


def test_nothing_is_computed_in_float64():
    """A literal below float32's normal numbers makes Triton compute in float64: slow, on most cards 64 times slower."""
    assert {name for name, report in reports().items() if report["double_precision"]} == set()


def test_a_thread_reads_a_block_id_once_for_its_rows():
    """A step over 64 tokens takes at most a tenth more instructions with blocks of 16 than with blocks of 128."""
    small, large = reports()["decode 90 bf16"], reports()["decode 90 bf16, block 128"]
    assert small["longest_loop"] <= 1.1 * large["longest_loop"]


def test_as_many_programs_of_decode_fit_a_hopper_multiprocessor_as_the_plan_counts_on():
    assert 2 * reports()["decode 90 bf16"]["shared_bytes"] <= SHARED_MEMORY_BYTES[90]
    fp8 = reports()["decode 90 fp8"]
    assert 4 * fp8["shared_bytes"] <= SHARED_MEMORY_BYTES[90]
    assert fp8["registers"] <= 128


def test_two_programs_of_a_cascade_fit_a_hopper_multiprocessor():
    """1 KB of a program's shared memory is the system's."""
    report = reports()["cascade 90"]
    assert report["spill_bytes"] == 0
    assert 2 * (report["shared_bytes"] + 1024) <= 228 * 1024
    assert report["wide_async_copies"] == report["async_copies"] > 0
    assert report["wgmma"] > 0
    assert report["mma"] == 0


@pytest.mark.parametrize("arch", [90, 80])
def test_prefill_code(arch):
    report = reports()[f"prefill {arch}"]
    assert report["spill_bytes"] <= 64
    assert report["shared_bytes"] <= SHARED_MEMORY_BYTES[arch]
    assert report["wide_async_copies"] == report["async_copies"] > 0
    assert (report["wgmma"] > 0) == (arch == 90)


def test_write_code_for_a_card_without_fp8():
    assert reports()["write 80 e4m3 bits"]["spill_bytes"] == 0
