"""Both ways through the experts give the same sum; which one is taken, and why."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from labkit.models.moe import MoeWeights, reads_on_host, route_tokens, stacked, visit_at_once, visit_one_by_one
from labkit.models.quantized import quantize_fp8


def weights(num_experts=6, width=24, hidden=16, visits=2, dtype=torch.float32) -> MoeWeights:
    generator = torch.Generator().manual_seed(num_experts)
    shapes = ((num_experts, hidden), (num_experts, 2 * width, hidden), (num_experts, hidden, width))
    return MoeWeights(*(torch.randn(*shape, generator=generator).to(dtype) for shape in shapes), visits)


def by_hand(inner: torch.Tensor, moe: MoeWeights) -> torch.Tensor:
    """Token by token in float64."""
    out = torch.zeros(inner.shape, dtype=torch.float64)
    for row, token in enumerate(inner.double()):
        shares = (moe.router.double() @ token).softmax(0)
        best = shares.argsort(descending=True)[: moe.num_experts_per_tok]
        for expert in best:
            gate, up = (moe.gate_up[expert].double() @ token).chunk(2)
            out[row] += shares[expert] / shares[best].sum() * (moe.down[expert].double() @ (F.silu(gate) * up))
    return out


@pytest.mark.parametrize("visit", [visit_one_by_one, visit_at_once])
@pytest.mark.parametrize(("num_experts", "num_tokens", "visits"), [(6, 1, 2), (6, 40, 2), (3, 7, 3), (16, 5, 1)])
def test_each_way_gives_the_sum_worked_out_by_hand(visit, num_experts, num_tokens, visits, one_thread):
    moe = weights(num_experts, visits=visits)
    inner = torch.randn(num_tokens, 16, generator=torch.Generator().manual_seed(2))
    shares, chosen = F.linear(inner, moe.router).softmax(-1).topk(visits, dim=-1)
    found = visit(inner, moe, F.silu, shares / shares.sum(-1, keepdim=True), chosen)
    torch.testing.assert_close(found.double(), by_hand(inner, moe), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(route_tokens(inner, moe, F.silu).double(), by_hand(inner, moe), atol=1e-4, rtol=1e-4)


def test_all_tokens_at_one_expert_and_experts_without_tokens(one_thread):
    moe = weights(visits=1)
    inner = torch.ones(9, 16)
    chosen, shares = torch.full((9, 1), 5), torch.ones(9, 1)
    both = [visit(inner, moe, F.silu, shares, chosen) for visit in (visit_one_by_one, visit_at_once)]
    torch.testing.assert_close(both[0], both[1], atol=1e-5, rtol=1e-5)
    assert torch.equal(both[1], both[1][:1].expand(9, -1))


def test_experts_in_another_form_stay_apart_and_are_visited_one_by_one(one_thread):
    plain = weights()
    quantized = [
        tuple(quantize_fp8(expert, per_channel=True) for expert in stack) for stack in (plain.gate_up, plain.down)
    ]
    assert stacked(quantized[0]) == quantized[0]
    assert torch.equal(stacked(list(plain.down)), plain.down)
    moe = MoeWeights(plain.router, *quantized, 2)
    rounded = [torch.stack([expert.dequantize(torch.float32) for expert in stack]) for stack in quantized]
    inner = torch.randn(8, 16)
    found = route_tokens(inner, moe, F.silu)
    torch.testing.assert_close(
        found.double(), by_hand(inner, MoeWeights(plain.router, *rounded, 2)), atol=1e-4, rtol=1e-4
    )
    assert "16 bit" in reads_on_host(moe)
    assert sum(tensor.nbytes for tensor in moe.tensors()) == sum(
        tensor.nbytes
        for tensor in (plain.router, *(part for stack in quantized for e in stack for part in (e.weight, e.scale)))
    )


@pytest.mark.parametrize(
    ("dtype", "capability", "width", "reason"),
    [
        (torch.float16, (9, 0), 24, "bfloat16 only"),
        (torch.bfloat16, (8, 9), 24, "before compute capability 9.0"),
        (torch.bfloat16, (9, 0), 12, "multiples of 8"),
        (torch.bfloat16, (9, 0), 24, ""),
        (torch.bfloat16, (10, 0), 24, ""),
    ],
)
def test_the_reason_for_the_host_on_a_card(dtype, capability, width, reason, monkeypatch):
    class OnCard(torch.Tensor):
        is_cuda = True

    moe = weights(width=width, dtype=dtype)
    moe = MoeWeights(moe.router, moe.gate_up.as_subclass(OnCard), moe.down, 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert reason in reads_on_host(moe)
    assert bool(reads_on_host(moe)) is bool(reason)
