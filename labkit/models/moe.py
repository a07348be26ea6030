"""Mixture of experts: routing of tokens and the experts' MLPs (Qwen3-MoE, Mixtral)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from labkit.models.linear import Weight, project

Activation = Callable[[torch.Tensor], torch.Tensor]
# torch's product of groups: bfloat16, rows of whole 16 bytes; before compute capability 9.0 it waits for the card.
GROUPED_FROM = (9, 0)
_GROUPED_MULTIPLE = 8


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """Experts of one layer.

    Attributes:
        router: `[num_experts, hidden]`.
        gate_up: `[num_experts, 2 * intermediate, hidden]`, gate rows first; or a matrix for each expert, where they
            are stored in another form than plain.
        down: `[num_experts, hidden, intermediate]`; the same.
        num_experts_per_tok: experts that each token visits.
    """

    router: torch.Tensor
    gate_up: torch.Tensor | tuple[Weight, ...]
    down: torch.Tensor | tuple[Weight, ...]
    num_experts_per_tok: int

    def tensors(self) -> Iterator[Weight]:
        """Every tensor of the layer's experts."""
        yield self.router
        for stack in (self.gate_up, self.down):
            if isinstance(stack, torch.Tensor):
                yield stack
            else:
                yield from stack


def stacked(experts: Sequence[Weight]) -> torch.Tensor | tuple[Weight, ...]:
    """Plain matrices of equal shape as one tensor, others as they are."""
    plain = [expert for expert in experts if isinstance(expert, torch.Tensor)]
    return torch.stack(plain) if len(plain) == len(experts) else tuple(experts)


def reads_on_host(weights: MoeWeights) -> str:
    """Why routing through these experts needs the host in each step; "" where it stays on the card."""
    gate_up = weights.gate_up
    if not isinstance(gate_up, torch.Tensor):
        return "experts that are not stored in 16 bit are visited one by one, as the host reads from the router"
    if not gate_up.is_cuda:
        return "experts on a CPU are visited one by one"
    if gate_up.dtype != torch.bfloat16:
        return "the product of all experts at once takes bfloat16 only"
    if torch.cuda.get_device_capability(gate_up.device) < GROUPED_FROM:
        return "the product of all experts at once waits for the card before compute capability 9.0"
    if any(width % _GROUPED_MULTIPLE for width in (*gate_up.shape[1:], gate_up.shape[1] // 2)):
        return f"the product of all experts at once takes widths that are multiples of {_GROUPED_MULTIPLE}"
    return ""


def route_tokens(inner: torch.Tensor, weights: MoeWeights, activation: Activation) -> torch.Tensor:
    """Weighted sum of the outputs of each token's experts: `[T, hidden]` → `[T, hidden]`.

    The weights are the softmax over all experts, renormalised over the chosen ones.
    """
    shares = F.linear(inner, weights.router).softmax(dim=-1, dtype=torch.float32)
    shares, chosen = shares.topk(weights.num_experts_per_tok, dim=-1)
    shares = (shares / shares.sum(dim=-1, keepdim=True)).to(inner.dtype)
    visit = visit_one_by_one if reads_on_host(weights) else visit_at_once
    return visit(inner, weights, activation, shares, chosen)


def visit_one_by_one(
    inner: torch.Tensor, weights: MoeWeights, activation: Activation, shares: torch.Tensor, chosen: torch.Tensor
) -> torch.Tensor:
    """Expert by expert, those that were chosen; the host reads which. `shares` and `chosen` are `[T, k]`."""
    out = torch.zeros_like(inner)
    for expert in chosen.unique().tolist():
        tokens, slots = (chosen == expert).nonzero(as_tuple=True)
        gate, up = project(inner[tokens], weights.gate_up[expert]).chunk(2, dim=-1)
        result = project(activation(gate).mul_(up), weights.down[expert])
        out.index_add_(0, tokens, result * shares[tokens, slots].unsqueeze(-1))
    return out


def visit_at_once(
    inner: torch.Tensor, weights: MoeWeights, activation: Activation, shares: torch.Tensor, chosen: torch.Tensor
) -> torch.Tensor:
    """All visits sorted by expert and multiplied as groups: shapes do not depend on what the router chose, nothing is
    read on the host, and sums have a fixed order, so a graph can hold it."""
    num_tokens, visits = chosen.shape
    experts, order = chosen.reshape(-1).sort(stable=True)
    numbers = torch.arange(weights.router.shape[0], device=inner.device)
    ends = torch.searchsorted(experts, numbers, right=True).to(torch.int32)
    rows = inner.index_select(0, order // visits)
    gate, up = F.grouped_mm(rows, weights.gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)  # type: ignore[union-attr]
    results = F.grouped_mm(activation(gate).mul_(up), weights.down.transpose(1, 2), offs=ends)  # type: ignore[union-attr]
    by_token = torch.empty_like(results).index_copy_(0, order, results)
    return torch.einsum("tkh,tk->th", by_token.view(num_tokens, visits, -1), shares)
