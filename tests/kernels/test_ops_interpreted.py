"""The kernels around attention in Triton's interpreter (on a card where there is one) against float64 references."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from labkit_kernels import block_copy, reference_ops, sampling
from labkit_kernels.activations import silu_and_mul
from labkit_kernels.awq_matmul import AwqWeight, awq_dequantise, awq_matmul
from labkit_kernels.checks import KernelTypeError, KernelValueError
from labkit_kernels.norms import add_rms_norm, rms_norm
from labkit_kernels.ops import interpreting
from labkit_kernels.pooling import pool
from labkit_kernels.rope import apply_rope
from labkit_kernels.rope_write import Rotary
from labkit_kernels.sampling import greedy, sample
from labkit_kernels.testing_ops import (
    activation_error,
    awq_error,
    awq_weight,
    norm_error,
    pool_error,
    relative,
    rope_error,
    sampling_tensors,
)

DEVICE = "cpu" if interpreting() else "cuda"
TOLERANCE = {torch.float16: 5e-4, torch.float32: 2e-6}
DTYPES = tuple(TOLERANCE)
# exp2 of a large number is meant to be infinite; numpy, which the interpreter uses, says so.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


@pytest.fixture(autouse=True)
def _seed(one_thread):
    one_thread.manual_seed(3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7, 576), (2, 5120), (1030, 64), (3, 5, 80), (2, 1)])
def test_norms(shape, dtype):
    for add in (False, True):
        assert norm_error(shape, dtype, DEVICE, add=add, offset=not add) < TOLERANCE[dtype]


def test_norm_may_overwrite_its_input():
    x, weight = torch.randn(4, 96, device=DEVICE), torch.randn(96, device=DEVICE)
    want = reference_ops.rms_norm(x.double(), weight, 1e-6)
    assert relative(rms_norm(x, weight, 1e-6, out=x), want) < 1e-6


def test_offset_is_gemmas_one_plus_weight():
    x, weight = torch.randn(3, 64, device=DEVICE), torch.randn(64, device=DEVICE)
    assert torch.equal(rms_norm(x, weight, 1e-6, offset=True), rms_norm(x, weight + 1, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [(7, 1536), (1, 77), (2, 4096)])
def test_activations(size, dtype):
    assert activation_error(*size, dtype, DEVICE) < TOLERANCE[dtype]


def test_activations_at_both_ends():
    gate = torch.tensor([[-1e4, -30.0, 0.0, 30.0, 1e4]], device=DEVICE)
    out = silu_and_mul(torch.cat([gate, torch.ones_like(gate)], 1))
    assert torch.allclose(out, torch.tensor([[0.0, 0.0, 0.0, 30.0, 1e4]], device=DEVICE), atol=1e-10)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("heads_rotary", [((9, 3, 64), 64), ((7, 1, 80), 32), ((4, 4, 96), 96)])
def test_rope(heads_rotary, interleaved):
    heads, rotary = heads_rotary
    for dtype, norm in ((torch.float16, True), (torch.float32, True), (torch.float32, False)):
        assert rope_error(heads, rotary, dtype, DEVICE, interleaved=interleaved, norm=norm) < TOLERANCE[dtype]


def test_rope_keeps_lengths_and_turns_by_differences():
    angle = torch.outer(torch.arange(20.0), 10000.0 ** (-torch.arange(0, 1, 1 / 32)))
    rotary = Rotary(torch.cat([angle.cos(), angle.sin()], -1).to(DEVICE))
    row = torch.randn(1, 1, 64, device=DEVICE)
    dots = []
    for q_at, k_at in ((5, 2), (19, 16)):
        q, k = row.clone().repeat(2, 1, 1), row.clone().repeat(2, 1, 1)
        apply_rope(q, k, torch.tensor([q_at, k_at], device=DEVICE), rotary)
        assert torch.allclose(q.norm(dim=-1), row.norm(dim=-1).expand(2, 1), rtol=1e-5)
        dots.append(float((q[0] * k[1]).sum()))
    assert dots[0] == pytest.approx(dots[1], rel=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_pooling(dtype):
    assert pool_error((1, 0, 33, 100), 80, dtype, DEVICE) < TOLERANCE[dtype]
    assert pool_error((200,), 300, dtype, DEVICE) < TOLERANCE[dtype]


@pytest.mark.parametrize("group", [32, 64, 128, -1])
@pytest.mark.parametrize("rows", [1, 7, 40])
def test_awq(rows, group):
    assert awq_error(rows, awq_weight(384, 72, group, DEVICE), torch.float16) < 6e-4


def test_awq_dequantised_weights_are_right_to_the_last_place():
    weight = awq_weight(64, 136, 32, DEVICE)
    want = reference_ops.awq_dequantise(weight.qweight, weight.qzeros, weight.scales)
    assert torch.equal(awq_dequantise(weight, torch.float16), want.half())


def test_awq_layout_is_autoawqs():
    # AutoAWQ's packing loop: qweight[:, col] |= intweight[:, col * 8 + order[i]] << (i * 4)
    values = torch.arange(8).reshape(1, 8)
    word = int(reference_ops.awq_pack(values)[0, 0]) & 0xFFFFFFFF
    assert f"{word:08x}" == "75316420"
    assert torch.equal(reference_ops.awq_unpack(reference_ops.awq_pack(values)), values)


def test_blocks_are_copied_in_every_cache():
    wide = torch.randn(2, 9, 4, 2, 16, device=DEVICE)
    caches = [wide[0], wide[1]]
    interleaved = torch.randn(9, 2, 4, 2, 16, device=DEVICE)
    for group in (caches, [interleaved[:, 0], interleaved[:, 1]], [wide.transpose(2, 3)[0]]):
        want = [cache.clone() for cache in group]
        reference_ops.copy_blocks(want, [(1, 3), (8, 0)])
        pairs = torch.tensor([[1, 3], [-1, 4], [8, 0]], device=DEVICE)
        block_copy.copy_blocks(block_copy.block_caches(group), pairs)
        assert all(torch.equal(have, cache) for have, cache in zip(group, want, strict=True))


@pytest.mark.skipif(DEVICE != "cpu", reason="tests/gpu has it with pinned memory")
def test_swap_without_a_card_is_a_copy():
    device, host = [torch.randn(5, 4, 2, 8) for _ in range(3)], [torch.zeros(7, 4, 2, 8) for _ in range(3)]
    swapper = block_copy.BlockSwapper(device, host)
    swapper.wait(swapper.swap_out([(4, 0), (1, 6)]))
    swapper.wait(swapper.swap_in([(6, 2)]))
    for cache, saved in zip(device, host, strict=True):
        assert torch.equal(saved[[0, 6]], cache[[4, 1]])
        assert torch.equal(cache[2], cache[1])
        assert not saved[1:6].any()


def test_swap_refuses_bad_pairs():
    swapper = block_copy.BlockSwapper([torch.zeros(5, 4, 8)], [torch.zeros(7, 4, 8)])
    with pytest.raises(KernelValueError, match=r"\(5, 0\).*0 to 4 from"):
        swapper.swap_out([(5, 0)])
    with pytest.raises(KernelValueError, match="twice"):
        swapper.swap_out([(1, 0), (2, 0)])
    assert swapper.swap_out([]) is None


CASES = {
    "all": (1.0, 0, 1.0, 0.0),
    "top-k": (0.7, 5, 1.0, 0.0),
    "top-k above the vocabulary": (1.0, 10**6, 1.0, 0.0),
    "top-p": (1.3, 0, 0.9, 0.0),
    "top-p tiny": (1.0, 0, 1e-6, 0.0),
    "top-p near one": (1.0, 0, 0.9999, 0.0),
    "min-p": (1.0, 0, 1.0, 0.2),
    "together": (2.0, 40, 0.8, 0.05),
    "cold": (0.05, 0, 0.95, 0.0),
    "hot": (50.0, 300, 0.5, 0.0),
}


@pytest.mark.parametrize("vocab", [50, 400])
@pytest.mark.parametrize("name", CASES)
def test_support_and_draw_equal_the_sorted_reference(name, vocab):
    temperature, k, p, m = CASES[name]
    logits = torch.randn(2, vocab + 3, device=DEVICE)[:, :vocab] * 3
    thresholds = torch.full((2,), float("nan"), device=DEVICE)
    seeds = [-(2**62) + vocab, 2**63 - 1]
    parameters = sampling_tensors(
        2, DEVICE, temperature=temperature, top_k=k, top_p=p, min_p=m, seeds=seeds, positions=7
    )
    tokens = sample(logits, parameters, thresholds=thresholds)
    for i, seed in enumerate(seeds):
        assert torch.equal(logits[i] >= thresholds[i], reference_ops.support(logits[i], temperature, k, p, 0.0))
        assert int(tokens[i]) == reference_ops.sample(logits[i].cpu(), temperature, k, p, m, seed, 7)


@pytest.mark.parametrize(("scratch", "k", "p"), [(16, 0, 0.9), (128, 90, 0.8), (16, 299, 1.0)])
def test_thresholds_among_more_logits_than_registers_hold(monkeypatch, scratch, k, p):
    """Rows of many values, of few and of far ones: guesses between both ends must end at the same logit."""
    for name, value in (("SCRATCH", scratch), ("FEW", 8), ("ROW_TILE", 256)):
        monkeypatch.setattr(sampling, name, value)
    logits = torch.randn(3, 300, device=DEVICE)
    logits[1] = logits[1].mul(2).round()
    logits[2] = -torch.exp(logits[2] * 12)
    thresholds = torch.full((3,), float("nan"), device=DEVICE)
    sample(logits, sampling_tensors(3, DEVICE, top_k=k, top_p=p, temperature=0.7), thresholds=thresholds)
    for row, threshold in zip(logits, thresholds, strict=True):
        assert torch.equal(row >= threshold, reference_ops.support(row, 0.7, k, p, 0.0))


def test_rows_with_other_parameters_side_by_side():
    logits = torch.randn(4, 64, device=DEVICE)
    logits[3] = logits[0]
    parameters = sampling_tensors(
        4, DEVICE, temperature=[0.0, 1.0, 0.5, 1.0], top_k=[0, 1, 3, 0], seeds=[1, 2, 3, 1], positions=[0, 5, 5, 9]
    )
    tokens = sample(logits, parameters)
    assert torch.equal(tokens[:2], logits[:2].argmax(-1))
    assert bool(torch.isin(tokens[2], logits[2].topk(3).indices))
    alone = sampling_tensors(1, DEVICE, seeds=[1], positions=9)
    assert int(sample(logits[3:], alone)) == int(tokens[3])


def test_equal_logits_are_kept_together():
    logits = torch.zeros(1, 40, device=DEVICE)
    logits[0, 7], logits[0, 9] = 2.0, 1.0
    thresholds = torch.empty(1, device=DEVICE)
    for k, kept in ((1, None), (2, 2), (3, 40)):
        sample(logits, sampling_tensors(1, DEVICE, top_k=k), thresholds=thresholds)
        if kept is not None:
            assert int((logits[0] >= thresholds[0]).sum()) == kept


@pytest.mark.parametrize("filtered", [False, True])
def test_minus_infinity_and_nan_are_never_drawn(filtered):
    logits = torch.full((8, 20), float("-inf"), device=DEVICE)
    logits[:, 4], logits[:, 11], logits[:, 15] = 0.0, float("nan"), -1.0
    tokens = sample(logits, sampling_tensors(8, DEVICE, top_p=0.99 if filtered else 1.0))
    assert set(tokens.tolist()) <= {4, 15}
    assert int(greedy(logits)[0]) == 4
    assert int(sample(torch.full((1, 20), float("-inf"), device=DEVICE), sampling_tensors(1, DEVICE))[0]) == 0


def test_noise_is_philox():
    # Known answer of Random123's kat_vectors: philox4x32 with 7 rounds, counter and key of zeros.
    words = reference_ops.random_words(0, 0, 4).tolist()
    assert words == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]


def test_reference_draws_have_the_right_frequencies():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 1.5])
    draws = torch.tensor([reference_ops.sample(logits, 0.9, 0, 1.0, 0.0, seed, 3) for seed in range(1500)])
    expected = (logits.double() / 0.9).softmax(-1) * 1500
    counts = torch.bincount(draws, minlength=5).double()
    # 99.99 % point of chi-square with 4 degrees of freedom.
    assert float(((counts - expected).square() / expected).sum()) < 23.5


def test_greedy_takes_the_first_of_equals():
    logits = torch.randn(7, 333, device=DEVICE)
    logits[2, [300, 9, 200]] = 50.0
    assert torch.equal(greedy(logits), logits.argmax(-1))
    assert int(greedy(logits)[2]) == 9


def test_empty_batches():
    none = torch.empty(0, 64, device=DEVICE)
    assert rms_norm(none, torch.ones(64, device=DEVICE), 1e-6).shape == (0, 64)
    assert silu_and_mul(none).shape == (0, 32)
    assert greedy(none).shape == (0,)
    assert pool(none, torch.zeros(1, dtype=torch.int32, device=DEVICE), "mean").shape == (0, 64)
    weight = awq_weight(64, 16, 32, DEVICE)
    assert awq_matmul(torch.empty(0, 64, dtype=torch.float16, device=DEVICE), weight).shape == (0, 16)


def _bad_weight(**changed):
    weight = awq_weight(128, 16, 64, DEVICE)
    parts = {"qweight": weight.qweight, "qzeros": weight.qzeros, "scales": weight.scales}
    return AwqWeight(**(parts | changed))


# Each makes its tensors on the card where there is one, as x is: only what the message names is wrong.
BAD = {
    "x has dtype": lambda x: rms_norm(x.int(), torch.ones(64), 1e-6),
    "weight has shape": lambda x: rms_norm(x, torch.ones(63), 1e-6),
    "eps is 0": lambda x: rms_norm(x, torch.ones(64), 0),
    "x has stride 4": lambda x: rms_norm(torch.zeros(64, 4).t(), torch.ones(64), 1e-6),
    "residual has shape": lambda x: add_rms_norm(x, x[:2], torch.ones(64), 1e-6),
    "out has dtype": lambda x: rms_norm(x, torch.ones(64), 1e-6, out=x.half()),
    "x has 63 columns": lambda x: silu_and_mul(x[:, :63]),
    "cos_sin has rotary dim 7": lambda x: apply_rope(
        x[:, None], x[:, None], torch.zeros(4, dtype=torch.int64), Rotary(x[:, :7])
    ),
    "k has dtype": lambda x: apply_rope(x[:, None], x[:, None].half(), torch.zeros(4, dtype=torch.int64), Rotary(x)),
    "positions has dtype": lambda x: apply_rope(x[:, None], x[:, None], torch.zeros(4), Rotary(x)),
    "kind is 'cls'": lambda x: pool(x, torch.zeros(2, dtype=torch.int32), "cls"),
    "query_start_loc has dtype": lambda x: pool(x, torch.zeros(2, dtype=torch.int64), "mean"),
    "qzeros has 3 groups": lambda _: _bad_weight(
        qzeros=torch.zeros(3, 2, dtype=torch.int32), scales=torch.zeros(3, 16).half()
    ),
    "scales has shape": lambda _: _bad_weight(scales=torch.zeros(2, 8).half()),
    "qweight has dtype": lambda _: _bad_weight(qweight=torch.zeros(128, 2)),
    "x has shape": lambda x: awq_matmul(x.half(), awq_weight(128, 16, 64, DEVICE)),
    "caches is empty": lambda _: block_copy.block_caches([]),
    r"caches\[1\] has shape": lambda x: block_copy.block_caches([x, x[:2]]),
    r"caches\[0\] has strides": lambda _: block_copy.block_caches([torch.zeros(4, 8, 8)[:, :, :4]]),
    "pairs has dtype": lambda x: block_copy.copy_blocks(block_copy.block_caches([x]), torch.zeros(1, 2).int()),
    "logits has dtype": lambda x: greedy(x.double()),
    "top_k has dtype": lambda x: sample(
        x, sampling_tensors(4, DEVICE).__class__(*(t.long() if t.dtype == torch.int32 else t for _, t in
                                                  sampling_tensors(4, DEVICE).named()))
    ),
    "temperature has shape": lambda x: sample(x, sampling_tensors(3, DEVICE)),
}  # fmt: skip


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_are_named(message):
    with torch.device(DEVICE), pytest.raises((KernelValueError, KernelTypeError), match=message):
        BAD[message](torch.zeros(4, 64))
