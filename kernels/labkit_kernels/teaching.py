"""The decode kernel with one lever taken away, to show what the lever does to time and L2 hits.

The levers: all query heads of a KV head in one program (without it every KV byte is asked for once for each query head
of the group, and the L2 serves the rest), a tile of tokens larger than a block, and the split of long sequences.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from labkit_kernels.checks import KernelValueError
from labkit_kernels.decode_plan import DecodeWorkspace
from labkit_kernels.heuristics import DecodeConfig
from labkit_kernels.paged_decode import make_workspace
from labkit_kernels.scores import Scores

VARIANTS = ("full", "one program for each query head", "tile = block", "no split")
SMALLEST_TILE, LARGEST_TILE = 16, 128


def variant_workspace(
    variant: str, q: torch.Tensor, k_cache: torch.Tensor, block_tables: torch.Tensor, scores: Scores
) -> DecodeWorkspace:
    """A workspace whose `paged_decode` runs `variant` (one of VARIANTS); results are equal up to rounding.

    "tile = block" reads one block a step, without the prefetch of block ids: blocks from 16 to 128, powers of two.
    Raises KernelValueError for another variant or block size.
    """
    max_seq_len = max(1, block_tables.shape[1] * k_cache.shape[1])
    if variant == "full":
        return make_workspace(q, k_cache, block_tables, scores)
    if variant == "one program for each query head":
        return make_workspace(q, k_cache, block_tables, scores, pack_heads=False)
    if variant == "no split":
        return make_workspace(q, k_cache, block_tables, scores, chunk_tokens=max_seq_len)
    if variant == "tile = block":
        block = k_cache.shape[1]
        if not SMALLEST_TILE <= block <= LARGEST_TILE or block & (block - 1):
            raise KernelValueError(
                f"block size {block} cannot be a tile; works: powers of two from {SMALLEST_TILE} to {LARGEST_TILE}"
            )
        config = replace(DecodeConfig(), tile=block, stages=2, prefetch=False)
        return make_workspace(q, k_cache, block_tables, scores, config=config, chunk_tokens=max_seq_len)
    raise KernelValueError(f"unknown variant {variant!r}; works: {', '.join(VARIANTS)}")
