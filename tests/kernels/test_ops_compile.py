"""The kernels around attention compiled for three architectures: no spills, wide copies, matrix units."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

SCRIPT = Path(__file__).with_name("ops_launches.py")
ARCHITECTURES = (80, 89, 90)
# 8.9 differs from 8.0 in its shared memory and registers only where these are much used.
OF_89 = ("norm", "rope", "copy", "sample", "awq 1", "few rows, e4m3")
WIDE_LOADS = (
    "norm", "norm 576", "norm 5120", "silu", "gelu", "rope", "pool sum", "copy", "tops", "sample parts", "one row",
    "one row, e4m3",
)  # fmt: skip
FEW_ROWS = ("few rows", "few rows, e4m3", "32 rows, e4m3")
# Weights are turned into these on Hopper alone.
AWQ_WORDS = ("awq words 1", "awq words 16", "awq words 64", "awq words 256")
WIDE_STORES = ("norm", "norm 576", "silu", "rope", "copy", "awq 1", "awq dequantise")


@cache
def reports(arch: int) -> dict[str, dict]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, SCRIPT, str(arch), *(OF_89 if arch == 89 else ())],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_no_spills_and_shared_memory_fits(arch):
    for name, report in reports(arch).items():
        assert report["spill_bytes"] == 0 or (arch < 90 and name in AWQ_WORDS), name
        assert report["shared_bytes"] <= report["shared_limit"], name


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_copies_are_16_bytes_wide(arch):
    found = reports(arch)
    assert {name for name in WIDE_LOADS if name in found and not found[name]["wide_loads"]} == set()
    assert {name for name in WIDE_STORES if name in found and not found[name]["wide_stores"]} == set()
    pipelined = ("awq 1", "awq 64, bf16", *FEW_ROWS, *AWQ_WORDS)
    assert {name for name in pipelined if name in found and not found[name]["wide_async_copies"]} == set()


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_awq_uses_matrix_instructions(arch):
    for name in ("awq 1", "awq 64, bf16"):
        assert reports(arch).get(name, {"mma": 1})["mma"] > 0, name


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_few_rows_use_matrix_instructions(arch):
    found = reports(arch)
    kinds = {name: "wgmma" if arch == 90 and name != "awq words 1" else "mma" for name in (*FEW_ROWS, *AWQ_WORDS)}
    assert {name for name, kind in kinds.items() if name in found and not found[name][kind]} == set()


def test_unpacked_words_stay_in_registers():
    """Shared memory holds at most four stages of words and inputs: an unpacked tile beside them would be 32 KiB."""
    stages = {"awq words 16": 4 * (128 * 64 + 16 * 256), "few rows, e4m3": 4 * (64 * 256 + 16 * 512)}
    for name, num_bytes in stages.items():
        assert reports(90)[name]["shared_bytes"] <= num_bytes + 1024, name


def test_overlapping_launches_wait():
    """A kernel that may begin beside the launch before it must wait for it before it reads or ends."""
    found = 0
    for path in sorted(Path(__file__).parents[2].joinpath("kernels/labkit_kernels").glob("*.py")):
        for block in re.split(r"\n\n\n", path.read_text(encoding="utf-8")):
            kernel = re.search(r"@triton\.jit.*\ndef (\w+_kernel)\([^)]*OVERLAP: tl\.constexpr", block)
            if kernel:
                found += 1
                assert re.search(r"^ +begin(_fetching)?\(", block, re.MULTILINE), (path.name, kernel[1])
    assert found >= 8
