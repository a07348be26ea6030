"""Ranks that share one card, for machines with a single one: gloo in NCCL's place, which wants a card for each rank.

gloo's calls are made by the host, so that steps run eagerly.
"""

from __future__ import annotations

from typing import Any

import torch

from labkit.experiments import rank_backend, rank_group
from labkit.models import ranks


def first_card(kind: str, rank: int) -> torch.device:
    """In place of `rank_device`."""
    return torch.device(kind, 0)


# Module, name and what to put there, in every rank's process.
PATCHES: tuple[tuple[Any, str, Any], ...] = (
    (ranks, "_nccl_group", ranks._gloo_group),
    (rank_backend, "rank_device", first_card),
    (rank_group, "rank_device", first_card),
)


class Backend(rank_backend.RankBackend):
    """A rank on the first card."""

    def __init__(self) -> None:
        for patch in PATCHES:
            setattr(*patch)
        super().__init__()
