"""The planner's buffers of a step against what the GPU executor allocates, kernels not run."""

from __future__ import annotations

import pytest
import torch

from labkit.memory.awq_products import awq_scratch_bytes
from labkit.specs.gpu_spec import GpuSpec

CASES = (
    "widest in attention", "widest in the MLP", "widest in sampling", "norm of heads, long tables", "8-bit KV",
    "plain, widest in the MLP", "plain, widest in attention", "plain, heads with a norm", "plain, soft-capped logits",
    "no gate, a layer without rotation",
)  # fmt: skip
FOUR_BITS = (
    "4-bit words along the inputs", "4-bit words along the inputs, unpacked", "4-bit words along the outputs",
    "4-bit words along the outputs, unpacked",
)  # fmt: skip


@pytest.fixture(scope="module")
def found(interpreted):
    return interpreted("interpreted_memory.py")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("what", ["tables", "prompts", "activation", "mixed", "decode"])
def test_every_byte_is_foretold(found, case, what):
    planned, allocated = found[case][what]
    assert planned == allocated


@pytest.mark.parametrize("case", FOUR_BITS)
@pytest.mark.parametrize("what", ["prompts", "activation"])
def test_what_4_bit_products_take_for_a_moment_is_foretold(found, case, what):
    planned, allocated = found[case][what]
    assert planned == allocated


@pytest.mark.parametrize("rows", [1, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257])
@pytest.mark.parametrize(("inputs", "outputs"), [(256, 512), (3584, 4608), (3584, 37888), (18944, 3584), (8192, 1024)])
def test_4_bit_products_split_and_unpack_as_the_kernels_say(one_thread, rows, inputs, outputs):
    """Against the kernels' own choices for a card of 132 multiprocessors."""
    from labkit_kernels import awq_matmul, awq_words, few_rows

    config = awq_words.words_config(rows, outputs)
    tiles = -(-outputs // config.columns) * -(-rows // config.rows)
    parts = few_rows.even_parts(132 * config.ctas_per_sm, tiles, inputs // awq_words.BLOCK)
    split = 4 * parts * rows * outputs if parts > 1 else 0
    hopper, ada = (GpuSpec("card", 2**34, sm_count=132, compute_capability=name) for name in ("9.0", "8.9"))
    unpacked = 2 * inputs * outputs
    expected = unpacked if rows > awq_words.MAX_ROWS else split
    assert awq_scratch_bytes(hopper, 128, rows, inputs, outputs, 2) == expected

    words, zeros = (torch.empty(count, outputs // 8, dtype=torch.int32) for count in (inputs, inputs // 64))
    weight = awq_matmul.AwqWeight(words, zeros, torch.empty(inputs // 64, outputs, dtype=torch.float16))
    parts = awq_matmul.awq_tiling(132, rows, weight).parts
    expected = unpacked if rows >= awq_matmul.DEQUANTISE_ROWS else (4 * parts * rows * outputs if parts > 1 else 0)
    for gpu in (hopper, ada):
        assert awq_scratch_bytes(gpu, 64, rows, inputs, outputs, 2) == expected
