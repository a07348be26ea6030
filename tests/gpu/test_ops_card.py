"""The kernels around attention on a card: the CPU tests' grids in all dtypes, graphs, swaps beside computation."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from labkit_kernels import block_copy, reference_ops
from labkit_kernels.awq_matmul import awq_matmul
from labkit_kernels.awq_words import AwqWords, turn_words, words_matmul
from labkit_kernels.few_rows import few_rows_matmul
from labkit_kernels.norms import add_rms_norm
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

TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 2e-6}
DTYPES = tuple(TOLERANCE)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(1)


@pytest.mark.parametrize("shape", [(7, 576), (1, 5120), (3000, 4096), (2000, 9, 128), (7, 16384), (5, 1)])
def test_norms(shape):
    for dtype in DTYPES if shape == (7, 576) else DTYPES[:1]:
        for add in (False, True):
            assert norm_error(shape, dtype, "cuda", add=add, offset=add) < TOLERANCE[dtype], (dtype, add)


@pytest.mark.parametrize("size", [(7, 1536), (1, 14336), (3000, 5120), (3, 77)])
def test_activations(size):
    for dtype in DTYPES if size == (7, 1536) else DTYPES[:1]:
        assert activation_error(*size, dtype, "cuda") < TOLERANCE[dtype], dtype


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    "heads_rotary",
    [((32, 8, 128), 128), ((9, 3, 64), 64), ((7, 1, 80), 32), ((4, 4, 256), 64), ((5, 5, 96), 96)],
)
def test_rope(heads_rotary, interleaved):
    heads, rotary = heads_rotary
    for dtype in DTYPES if rotary == 32 else DTYPES[:1]:
        for norm in (False, True):
            error = rope_error(heads, rotary, dtype, "cuda", interleaved=interleaved, norm=norm)
            assert error < TOLERANCE[dtype], (dtype, norm)


@pytest.mark.parametrize("lengths_hidden", [((1, 0, 33, 700), 576), ((8000,), 1024), ((5,) * 300, 5120)])
def test_pooling(lengths_hidden):
    for dtype in DTYPES if lengths_hidden[1] == 576 else DTYPES[:1]:
        assert pool_error(*lengths_hidden, dtype, "cuda") < TOLERANCE[dtype], dtype


@pytest.mark.parametrize("rows", [1, 7, 33, 64, 200, 1100])
def test_awq(rows):
    for inputs, outputs, group in ((4096, 1024, 128), (576, 1536, 64), (5120, 136, 32), (1536, 264, -1)):
        weight = awq_weight(inputs, outputs, group, "cuda", torch.float16)
        for dtype in DTYPES[:2] if group == 128 else DTYPES[1:2]:
            assert awq_error(rows, weight, dtype) < TOLERANCE[dtype], (inputs, outputs, group, dtype)


@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("size", [(4096, 4096, 128), (2048, 20480, 128), (14336, 1032, -1)])
def test_awq_words(size, dtype):
    """At the sizes of models: each choice of tiles, more outputs than the small ones take 16 rows for, odd edges."""
    weight = awq_weight(*size, "cuda", dtype)
    turned = AwqWords(turn_words(weight.qweight), weight.qzeros, weight.scales)
    dense = reference_ops.awq_dequantise(weight.qweight, weight.qzeros, weight.scales).double()
    for rows in (1, 2, 8, 9, 16, 17, 64, 65, 256):
        x = torch.randn(rows, size[0], dtype=dtype, device="cuda")
        out = torch.full((rows, size[1]), float("nan"), dtype=dtype, device="cuda")
        assert relative(words_matmul(x, turned, out=out), x.double() @ dense) < TOLERANCE[dtype], rows
        assert torch.equal(words_matmul(x, turned), out), "sums are in a fixed order"


@pytest.mark.parametrize("columns", [1000, 4096])
def test_repeated_products_of_one_row_use_what_they_are_given(columns):
    """The second call is the first one's launch with other addresses; what looks otherwise is compiled anew."""
    for inputs in (1024, 1001, 4096):
        for _ in range(3):
            x, weight = (torch.randn(*shape, device="cuda").bfloat16() for shape in ((1, inputs), (columns, inputs)))
            for bias in (None, torch.randn(columns, device="cuda").bfloat16()):
                want = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
                out = torch.full((1, columns), float("nan"), device="cuda").bfloat16()
                few_rows_matmul(x, weight, None, bias, out=out)
                assert relative(out, want) < TOLERANCE[torch.bfloat16], (inputs, bias is None)
                assert torch.equal(few_rows_matmul(x, weight, None, bias), out)


def test_repeated_products_of_one_row_in_a_graph_and_on_another_stream():
    x, weight = torch.randn(1, 1024, device="cuda").bfloat16(), torch.randn(512, 1024, device="cuda").bfloat16()
    out, graph, side = torch.empty(1, 512, device="cuda").bfloat16(), torch.cuda.CUDAGraph(), torch.cuda.Stream()
    few_rows_matmul(x, weight, out=out)
    with torch.cuda.graph(graph):
        few_rows_matmul(x, weight, out=out)
    for _ in range(2):
        x.copy_(torch.randn(1, 1024, device="cuda"))
        graph.replay()
        assert relative(out, x.double() @ weight.double().t()) < TOLERANCE[torch.bfloat16]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(2_000_000)
        x.normal_()
        few_rows_matmul(x, weight, out=out)
    side.synchronize()
    assert relative(out, x.double() @ weight.double().t()) < TOLERANCE[torch.bfloat16]


CASES = ((1.0, 0, 1.0, 0.0), (0.7, 50, 1.0, 0.0), (1.3, 0, 0.9, 0.0), (1.0, 1000, 0.95, 0.0), (0.6, 20, 0.8, 0.05),
         (1.0, 0, 1.0, 0.1), (0.05, 0, 0.999, 0.0), (3.0, 20000, 0.5, 0.0))  # fmt: skip


@pytest.mark.parametrize("scale", [1.0, 5.0])
@pytest.mark.parametrize("case", CASES)
def test_sampling_equals_reference(case, scale):
    temperature, k, p, m = case
    logits = torch.randn(3, 151936, device="cuda") * scale
    parameters = sampling_tensors(
        3, "cuda", temperature=temperature, top_k=k, top_p=p, min_p=m, seeds=[5, -(2**62), 2**63 - 1], positions=9
    )
    thresholds = torch.empty(3, device="cuda")
    tokens = sample(logits, parameters, thresholds=thresholds)
    for row in range(3):
        kept = logits[row] >= thresholds[row]
        want = reference_ops.support(logits[row], temperature, k, p, 0.0)
        # Over 100,000 tokens a float32 sum may end top-p one or two tokens off.
        assert int((kept != want).sum()) <= (2 if p < 1 and int(want.sum()) > 1000 else 0)
        draw = reference_ops.sample(logits[row].cpu(), temperature, k, p, m, int(parameters.seeds[row]), 9)
        assert int(tokens[row]) == draw


@pytest.mark.parametrize("case", [(1.0, 0, 1.0), (0.8, 7, 1.0), (1.0, 0, 0.9)])
def test_sampled_frequencies(case):
    temperature, k, p = case
    draws = 8000
    row = torch.randn(300, device="cuda") * 2
    logits = row.expand(draws, -1)
    tokens = sample(logits, sampling_tensors(draws, "cuda", temperature=temperature, top_k=k, top_p=p, positions=3))
    kept = reference_ops.support(row, temperature, k, p, 0.0)
    probabilities = (row.double() / temperature).masked_fill(~kept, float("-inf")).softmax(-1)
    counts = torch.bincount(tokens, minlength=300).double()
    assert not counts[~kept].any()
    likely = probabilities * draws >= 10
    terms = ((counts - probabilities * draws).square() / (probabilities * draws))[likely]
    freedom = int(likely.sum())
    assert float(terms.sum()) < freedom + 5 * (2 * freedom) ** 0.5


def test_greedy_takes_the_first_of_equals():
    for dtype in DTYPES:
        logits = torch.randn(5, 151936, device="cuda").to(dtype)
        logits[2, [70000, 9, 151935]] = 50.0
        assert torch.equal(greedy(logits), logits.float().argmax(-1))
        assert int(greedy(logits)[2]) == 9


def test_graph_replays_with_fresh_parameters():
    logits = torch.randn(4, 32000, device="cuda")
    parameters = sampling_tensors(4, "cuda", top_p=0.9)
    x, residual = torch.randn(4, 4096, device="cuda").half(), torch.randn(4, 4096, device="cuda").half()
    weight, projection = torch.randn(4096, device="cuda").half(), awq_weight(4096, 512, 128, "cuda")
    tokens, normed = torch.empty(4, dtype=torch.int64, device="cuda"), torch.empty_like(x)
    product = torch.empty(4, 512, dtype=torch.float16, device="cuda")

    def step():
        sample(logits, parameters, out=tokens)
        add_rms_norm(x, residual, weight, 1e-6, out=normed)
        awq_matmul(normed, projection, out=product)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for temperature, k in ((1.0, 0), (0.5, 40), (0.0, 0)):
        logits.normal_()
        parameters.temperature.fill_(temperature)
        parameters.top_k.fill_(k)
        parameters.positions.add_(1)
        before = residual.clone()
        graph.replay()
        assert torch.equal(tokens, sample(logits, parameters))
        assert torch.equal(residual, before + x)
        assert torch.equal(product, awq_matmul(normed, projection))


@pytest.fixture
def pools():
    shape = (64, 16, 8, 128)
    device = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(8)]
    return device, [torch.zeros(shape, dtype=torch.bfloat16).pin_memory() for _ in range(8)]


def test_swap_out_and_in_again(pools):
    device, host = pools
    swapper = block_copy.BlockSwapper(device, host)
    before = [cache.clone() for cache in device]
    out = swapper.swap_out([(3, 10), (60, 0), (7, 63)])
    out.synchronize()
    for cache, saved in zip(before, host, strict=True):
        assert torch.equal(cache[[3, 60, 7]].cpu(), saved[[10, 0, 63]])
        assert not saved[1].any()
    swapper.wait(out)
    for cache in device:
        cache.zero_()
    swapper.wait(swapper.swap_in([(10, 5), (0, 6), (63, 3)]))
    for cache, old in zip(device, before, strict=True):
        assert torch.equal(cache[[5, 6, 3]], old[[3, 60, 7]])
        assert not cache[7].any()


def test_computation_goes_on_beside_a_swap(pools):
    swapper = block_copy.BlockSwapper(*pools)
    a = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16)
    pairs = [(i, i) for i in range(64)]
    swapper.swap_out(pairs).synchronize()
    a @ a
    torch.cuda.synchronize()
    computed, swapped = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(20):
        swapper.swap_out(pairs)
    swapped.record(swapper.stream)
    a @ a
    computed.record()
    torch.cuda.synchronize()
    assert computed.elapsed_time(swapped) > 0, "a product started after the swaps must end before them"


def test_copy_inside_a_graph(pools):
    device, _ = pools
    pool, pairs = block_copy.block_caches(device), torch.tensor([[0, 1], [5, 9], [-1, 3]], device="cuda")
    block_copy.copy_blocks(pool, pairs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        block_copy.copy_blocks(pool, pairs)
    pairs.copy_(torch.tensor([[2, 30], [31, 4], [8, -1]]))
    want = [cache.clone() for cache in device]
    reference_ops.copy_blocks(want, [(2, 30), (31, 4)])
    graph.replay()
    assert all(torch.equal(have, cache) for have, cache in zip(device, want, strict=True))


def test_copy_beyond_32_bit_offsets():
    blocks = 2**31 // (16 * 8 * 128) + 10
    cache = torch.empty(blocks, 16, 8, 128, dtype=torch.bfloat16, device="cuda")
    cache[blocks - 1] = 3.0
    cache[0] = 0.0
    block_copy.copy_blocks(block_copy.block_caches([cache]), torch.tensor([[blocks - 1, 0]], device="cuda"))
    assert bool((cache[0] == 3.0).all())


def test_pageable_host_memory_is_refused(pools):
    device, host = pools
    with pytest.raises(block_copy.KernelTypeError, match="pageable"):
        block_copy.BlockSwapper(device, [cache.clone() for cache in host])
