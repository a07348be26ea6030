"""Rows in e4m3: exact where e4m3 holds the row, close elsewhere, and compiled for the cards that have fp8 units."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from labkit_kernels.checks import KernelTypeError, KernelValueError
from labkit_kernels.ops import interpreting
from labkit_kernels.quantise import MAX_TILE, quantise_rows
from labkit_kernels.reference_ops import SMALLEST_SCALE
from labkit_kernels.reference_ops import quantise_rows as reference

DEVICE = "cpu" if interpreting() else "cuda"
FINITE = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("columns", [127, 700, MAX_TILE + 5])
def test_rows_that_e4m3_holds_come_back(columns, dtype, one_thread):
    """Every finite number, signs alternating, times a power of two: the scale is that power."""
    numbers = FINITE.repeat(columns // 127 + 1)[:columns] * torch.tensor([1.0, -1.0]).repeat(columns)[:columns]
    numbers[-1] = 448
    powers = torch.tensor([[1.0], [0.25], [8.0]])
    x = (numbers * powers).to(dtype).to(DEVICE)
    found, scales = quantise_rows(x)
    assert torch.equal(scales.cpu(), powers)
    assert torch.equal(found.float().cpu(), numbers.expand(3, -1))


def test_scales_and_values_are_the_references(one_thread):
    x = torch.randn(9, 300, device=DEVICE)
    x[4] = 0
    x[5, 7] = 1e6
    found, scales = quantise_rows(x)
    wanted, wanted_scales = reference(x)
    torch.testing.assert_close(scales, wanted_scales, rtol=1e-6, atol=0)
    assert float(scales[4]) == pytest.approx(SMALLEST_SCALE)
    assert not found[4].float().any()
    # Triton's interpreter rounds fp8 wrongly next to a power of two; on a card the values are tested too.
    near = (found.float() - wanted.float()).abs() <= 0.13 * wanted.float().abs() + 0.01
    assert float(near.float().mean()) > 0.95


def test_strided_rows_empty_input_and_refusals():
    wide = torch.randn(5, 64, device=DEVICE)
    assert torch.equal(quantise_rows(wide[:, :32])[1], quantise_rows(wide[:, :32].contiguous())[1])
    assert [part.shape for part in quantise_rows(wide[:0])] == [(0, 64), (0, 1)]
    with pytest.raises(KernelTypeError, match="x has dtype"):
        quantise_rows(wide.int())
    with pytest.raises(KernelValueError, match="x"):
        quantise_rows(wide[0])
    with pytest.raises(KernelValueError, match="x"):
        quantise_rows(wide.t())


COMPILE = """
import json, torch
from labkit_kernels import quantise
from labkit_kernels.compile_check import compile_report, record_launch
x = torch.empty(64, 4096, dtype=torch.bfloat16)
launch = record_launch(quantise, "_quantise_kernel", lambda: quantise.quantise_rows(x))
found = [compile_report(launch, arch) for arch in (89, 90)]
print(json.dumps([[report.spill_bytes, report.wide_loads > 0] for report in found]))
"""


def test_compiled_for_cards_with_fp8_units():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [[0, True]] * 2
