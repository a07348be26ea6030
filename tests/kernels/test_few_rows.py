"""Products of few rows in Triton's interpreter (on a card where there is one) against float64."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from labkit_kernels.checks import KernelTypeError, KernelValueError
from labkit_kernels.few_rows import deinterleave, even_parts, few_rows_matmul, interleave
from labkit_kernels.ops import interpreting
from labkit_kernels.quantise import quantise_rows
from labkit_kernels.testing_ops import relative

DEVICE = "cpu" if interpreting() else "cuda"
E4M3 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def _seed(one_thread):
    one_thread.manual_seed(5)


def stored(weight: torch.Tensor) -> torch.Tensor:
    return interleave(weight.view(torch.uint8)).view(E4M3)


def every_number(columns: int, inputs: int) -> torch.Tensor:
    """All finite e4m3 numbers, each row turned by one against the row before."""
    numbers = torch.tensor([b for b in range(256) if b & 0x7F != 0x7F], dtype=torch.uint8, device=DEVICE)
    at = torch.arange(columns)[:, None] + torch.arange(inputs)[None, :]
    return numbers[at.to(DEVICE) % len(numbers)].view(E4M3)


@pytest.mark.parametrize("rows", [1, 2, 17, 64])
@pytest.mark.parametrize("size", [(64, 256), (72, 384), (3, 128)])
def test_16_bit_product(rows, size):
    columns, inputs = size
    x, weight, bias = (torch.randn(*s, device=DEVICE).half() for s in ((rows, inputs), size, (columns,)))
    want = x.double() @ weight.double().t()
    assert relative(few_rows_matmul(x, weight), want) < 5e-4
    assert relative(few_rows_matmul(x, weight, None, bias), want + bias.double()) < 5e-4


@pytest.mark.parametrize("inputs", [1, 100, 1000])
def test_one_row_of_any_length(inputs):
    x, weight = torch.randn(1, inputs, device=DEVICE).half(), torch.randn(7, inputs + 3, device=DEVICE).half()
    weight = weight[:, 3:]
    assert relative(few_rows_matmul(x, weight), x.double() @ weight.double().t()) < 5e-4


@pytest.mark.parametrize("rows", [1, 2, 17, 64])
@pytest.mark.parametrize("size", [(64, 256), (72, 384), (3, 128)])
def test_e4m3_product(rows, size):
    columns, inputs = size
    x, bias, weight = torch.randn(rows, inputs).half(), torch.randn(columns).half(), every_number(*size)
    x, bias = x.to(DEVICE), bias.to(DEVICE)
    for scale in (torch.rand(columns, 1, device=DEVICE) + 0.1, torch.full((1, 1), 0.25, device=DEVICE)):
        want = x.double() @ (weight.double() * scale.double()).t() + bias.double()
        assert relative(few_rows_matmul(x, stored(weight), scale, bias), want) < 5e-4


def test_e4m3_numbers_are_exact():
    """A row of x that is 1 at one input and 0 elsewhere gives a column of the weight, in every bit."""
    weight, one = every_number(260, 256), torch.ones(1, 1, device=DEVICE)
    for rows in (1, 16):
        x = torch.eye(256, device=DEVICE).half()[37 : 37 + rows]
        assert torch.equal(few_rows_matmul(x, stored(weight), one).float(), weight.float().t()[37 : 37 + rows])


def test_rows_and_outputs_may_be_parts_of_wider_ones():
    wide, weight = torch.randn(5, 300, device=DEVICE).half(), torch.randn(40, 256, device=DEVICE).half()
    out = torch.full((5, 64), float("nan"), device=DEVICE).half()
    few_rows_matmul(wide[:, :256], weight, out=out[:, 8:48])
    assert relative(out[:, 8:48], wide[:, :256].double() @ weight.double().t()) < 5e-4
    assert out[:, :8].isnan().all()
    assert out[:, 48:].isnan().all()


def test_the_order_of_interleaved_inputs():
    numbers = torch.arange(256, dtype=torch.uint8).reshape(2, 128)
    assert interleave(numbers)[0, :8].tolist() == [0, 32, 64, 96, 1, 33, 65, 97]
    assert torch.equal(deinterleave(interleave(numbers)), numbers)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_rows_are_quantised_in_that_order(dtype):
    x = torch.randn(3, 384, device=DEVICE).to(dtype)
    (plain, scales), (found, found_scales) = quantise_rows(x), quantise_rows(x, interleaved=True)
    assert torch.equal(found_scales, scales)
    assert torch.equal(found.view(torch.uint8), interleave(plain.view(torch.uint8)))
    with pytest.raises(KernelValueError, match="multiple of 128"):
        quantise_rows(x[:, :200], interleaved=True)


def test_parts_are_even_and_run_at_once():
    assert even_parts(396, 56, 32) == 7
    assert even_parts(396, 400, 32) == 1
    assert even_parts(396, 1, 5) == 5
    for slots, tiles, steps in ((396, 64, 32), (264, 17, 112), (396, 48, 33)):
        parts = even_parts(slots, tiles, steps)
        assert parts * tiles <= slots
        longest = -(-steps // parts)
        assert (parts - 1) * longest < steps, "no part is empty"


def test_what_does_not_fit_is_refused():
    with torch.device(DEVICE):
        x, weight = torch.zeros(2, 256).half(), torch.zeros(8, 256).half()
        many, odd, odd_weight = torch.zeros(65, 256).half(), torch.zeros(2, 100).half(), torch.zeros(8, 100).half()
    with pytest.raises(KernelValueError, match="1 to 64"):
        few_rows_matmul(many, weight)
    with pytest.raises(KernelValueError, match="multiple of 128"):
        few_rows_matmul(odd, odd_weight)
    with pytest.raises(KernelValueError, match="scale"):
        few_rows_matmul(x, weight.to(E4M3))
    with pytest.raises(KernelTypeError, match="weight"):
        few_rows_matmul(x, weight.bfloat16())
    with pytest.raises(KernelTypeError, match="x has"):
        few_rows_matmul(x.float(), weight)
    with pytest.raises(KernelValueError, match="weight has shape"):
        few_rows_matmul(x[:1], weight[0])
