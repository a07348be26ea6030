"""The planner's buffers of a step against what the GPU executor allocates, kernels not run."""

from __future__ import annotations

import pytest

CASES = (
    "widest in attention", "widest in the MLP", "widest in sampling", "norm of heads, long tables", "8-bit KV",
    "plain, widest in the MLP", "plain, widest in attention", "plain, heads with a norm", "plain, soft-capped logits",
    "no gate, a layer without rotation",
)  # fmt: skip


@pytest.fixture(scope="module")
def found(interpreted):
    return interpreted("interpreted_memory.py")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("what", ["tables", "prompts", "activation", "mixed", "decode"])
def test_every_byte_is_foretold(found, case, what):
    planned, allocated = found[case][what]
    assert planned == allocated
