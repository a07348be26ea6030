"""Mixture of experts: routing of tokens and the experts' MLPs (Qwen3-MoE, Mixtral)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """Experts of one layer.

    Attributes:
        router: `[num_experts, hidden]`.
        gate_up: `[num_experts, 2 * intermediate, hidden]`, gate rows first.
        down: `[num_experts, hidden, intermediate]`.
        num_experts_per_tok: experts that each token visits.
    """

    router: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    num_experts_per_tok: int

    def tensors(self) -> Iterator[torch.Tensor]:
        """Every tensor of the layer's experts."""
        yield from (self.router, self.gate_up, self.down)


def route_tokens(
    inner: torch.Tensor, weights: MoeWeights, activation: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Weighted sum of the outputs of each token's experts: `[T, hidden]` → `[T, hidden]`.

    The weights are the softmax over all experts, renormalised over the chosen ones.
    """
    shares = F.linear(inner, weights.router).softmax(dim=-1, dtype=torch.float32)
    shares, chosen = shares.topk(weights.num_experts_per_tok, dim=-1)
    shares = (shares / shares.sum(dim=-1, keepdim=True)).to(inner.dtype)
    out = torch.zeros_like(inner)
    for expert in chosen.unique().tolist():
        tokens, slots = (chosen == expert).nonzero(as_tuple=True)
        gate, up = F.linear(inner[tokens], weights.gate_up[expert]).chunk(2, dim=-1)
        result = F.linear(activation(gate).mul_(up), weights.down[expert])
        out.index_add_(0, tokens, result * shares[tokens, slots].unsqueeze(-1))
    return out
