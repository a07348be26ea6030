"""4-bit weights as words along the inputs, in Triton's interpreter (on a card where there is one), against float64."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from labkit_kernels import awq_words, reference_ops
from labkit_kernels.awq_words import AwqWords, takes_groups, turn_back, turn_words, words_dequantise, words_matmul
from labkit_kernels.checks import KernelTypeError, KernelValueError
from labkit_kernels.ops import interpreting
from labkit_kernels.testing_ops import awq_weight, relative

DEVICE = "cpu" if interpreting() else "cuda"


@pytest.fixture(autouse=True)
def _seed(one_thread):
    one_thread.manual_seed(7)


def both(inputs: int, outputs: int, group: int) -> tuple[AwqWords, torch.Tensor]:
    """Turned weights, and the same in float64 `[in, out]`."""
    weight = awq_weight(inputs, outputs, group, DEVICE)
    turned = AwqWords(turn_words(weight.qweight), weight.qzeros, weight.scales)
    return turned, reference_ops.awq_dequantise(weight.qweight, weight.qzeros, weight.scales).double()


@pytest.mark.parametrize("rows", [1, 8, 9, 17, 70])
@pytest.mark.parametrize("size", [(384, 72, 128), (256, 136, -1), (128, 8, 128)])
def test_product(rows, size):
    turned, dense = both(*size)
    x = torch.randn(rows, size[0], device=DEVICE).half()
    out = torch.full((rows, size[1]), float("nan"), device=DEVICE).half()
    assert relative(words_matmul(x, turned, out=out), x.double() @ dense) < 5e-4


def test_tiles_are_small_for_few_rows_and_for_16_of_many_outputs(monkeypatch):
    monkeypatch.setattr(awq_words, "MANY_COLUMNS", 64)
    chosen = [awq_words.words_config(*facts) for facts in ((8, 64), (9, 64), (16, 72), (17, 72))]
    assert [(config.columns, config.rows, config.warps) for config in chosen] == [
        (64, 8, 2), (128, 16, 4), (64, 16, 2), (128, 32, 4)
    ]  # fmt: skip
    turned, dense = both(384, 72, 128)
    x = torch.randn(16, 384, device=DEVICE).half()
    assert relative(words_matmul(x, turned), x.double() @ dense) < 5e-4


def test_many_rows_are_multiplied_with_unpacked_weights():
    turned, dense = both(256, 64, 128)
    for rows in (130, 257):
        x = torch.randn(rows, 256, device=DEVICE).half()
        assert relative(words_matmul(x, turned), x.double() @ dense) < 6e-4
    assert words_matmul(x[:0], turned).shape == (0, 64)


def test_unpacked_weights_are_right_to_the_last_place():
    for group in (128, -1):
        turned, dense = both(256, 136, group)
        assert torch.equal(words_dequantise(turned, torch.float16), dense.half().t())


def test_where_each_number_lies():
    """Output 0 counts its inputs modulo 16: word w holds inputs w, 16 + w, 32 + w, …, all with the number w."""
    numbers = torch.zeros(128, 8, dtype=torch.int64)
    numbers[:, 0] = torch.arange(128) % 16
    turned = turn_words(reference_ops.awq_pack(numbers))
    assert [int(word) & 0xFFFFFFFF for word in turned[0]] == [w * 0x11111111 for w in range(16)]
    numbers[:, 0] = torch.arange(128) // 16
    # Columns 0 to 7 of a word in AWQ's order of nibbles.
    assert f"{int(turn_words(reference_ops.awq_pack(numbers))[0, 5]):08x}" == "75316420"


def test_turning_back():
    words = torch.randint(-(2**31), 2**31, (256, 9), dtype=torch.int64).int()
    turned = turn_words(words)
    assert turned.shape == (72, 32)
    assert torch.equal(turn_back(turned), words)


def test_what_does_not_fit_is_refused():
    assert takes_groups(256, 1)
    assert takes_groups(256, 2)
    assert not takes_groups(256, 4)
    assert not takes_groups(192, 1)
    assert not takes_groups(256, 0)
    turned, _ = both(256, 64, 128)
    with pytest.raises(KernelValueError, match="multiple of 8, inputs of 128"):
        AwqWords(turned.words, turned.qzeros.repeat(2, 1), turned.scales.repeat(2, 1))
    with pytest.raises(KernelTypeError, match="words"):
        AwqWords(turned.words.float(), turned.qzeros, turned.scales)
    with pytest.raises(KernelValueError, match="x has shape"):
        words_matmul(torch.zeros(2, 128, device=DEVICE).half(), turned)
