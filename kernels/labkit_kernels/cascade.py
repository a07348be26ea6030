"""Decode over a prefix that all sequences share: its keys are read once for the whole batch (cascade attention).

All queries of the batch, as rows of one matrix, attend the shared blocks; each sequence attends its own blocks; the
results are added by log-sum-exp. One launch does both for 16-bit caches on Hopper (`cascade_launch`). Elsewhere the
second of two launches adds the results of the first, and on Hopper begins beside it.
References: `reference.paged_attention`, `reference.merge`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton

from labkit_kernels.cascade_launch import launch_cascade
from labkit_kernels.checks import (
    KernelValueError,
    check_cache,
    check_device,
    check_dtype,
    check_last_stride,
    check_lengths,
    check_out,
    check_shape,
)
from labkit_kernels.decode_plan import DecodeWorkspace
from labkit_kernels.heuristics import DecodeConfig, PrefillConfig, num_slots, shared_config, shared_splits
from labkit_kernels.ops import cache_kind, capability, overlaps_launches
from labkit_kernels.paged_decode import check_workspace, make_workspace, paged_decode
from labkit_kernels.paged_prefill import launch_prefill
from labkit_kernels.scores import Scores


@dataclass(frozen=True)
class SharedPrefix:
    """Blocks int32 `[blocks]` of a prefix of `length` tokens shared by the `num_tokens` queries of a step.

    Made once for a prefix and a batch size, outside a graph: `bounds` is [0, num_tokens, length] on the device.
    """

    blocks: torch.Tensor
    length: int
    num_tokens: int
    bounds: torch.Tensor

    @classmethod
    def make(cls, blocks: torch.Tensor, length: int, num_tokens: int) -> SharedPrefix:
        """Raises KernelTypeError or KernelValueError for blocks that cannot hold the prefix."""
        check_dtype("blocks", blocks, (torch.int32,))
        check_shape("blocks", blocks, (None,))
        check_last_stride("blocks", blocks)
        bounds = torch.tensor([0, num_tokens, length], dtype=torch.int32, device=blocks.device)
        return cls(blocks, length, num_tokens, bounds)

    def check(self, q: torch.Tensor, block_size: int) -> None:
        """Raises KernelValueError unless the prefix fits its blocks and the query."""
        check_device("blocks", self.blocks, q.device)
        capacity = self.blocks.shape[0] * block_size
        if not 1 <= self.length <= capacity:
            raise KernelValueError(
                f"the shared prefix has {self.length} tokens; its {self.blocks.shape[0]} blocks hold 1 to {capacity}"
            )
        if self.num_tokens != q.shape[0]:
            raise KernelValueError(f"the shared prefix was made for {self.num_tokens} queries; q has {q.shape[0]}")


def cascade_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    prefix: SharedPrefix,
    block_tables: torch.Tensor,
    own_lens: torch.Tensor,
    scores: Scores,
    *,
    workspace: DecodeWorkspace | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    config: PrefillConfig | None = None,
) -> torch.Tensor:
    """`out [tokens, q heads, D]` of each sequence over the shared keys of `prefix` and its own keys after them.

    block_tables int32 `[sequences, blocks]` and own_lens int32 `[sequences]` hold only what comes after the prefix (the
    query tokens counted). A workspace was planned with `own_lens`. config: launch settings of the shared part, else
    those recorded. Other arguments as in `paged_decode`; a window is not supported. The result equals `paged_decode`
    over the whole tables up to rounding. Raises KernelValueError or KernelTypeError naming the argument.
    """
    check_cache(q, k_cache, v_cache, block_tables)
    check_lengths(q, block_tables, own_lens, None)
    prefix.check(q, k_cache.shape[1])
    if scores.window is not None:
        raise KernelValueError("window is not supported with a shared prefix: call paged_decode on the whole tables")
    out = torch.empty_like(q) if out is None else out
    check_out("out", out, q.shape, q.dtype, q.device)
    if q.shape[0] == 0:
        return out
    if workspace is None:
        workspace = make_workspace(q, k_cache, block_tables, scores)
        workspace.plan(own_lens)
    if _fits_one_launch(q, k_cache, workspace, scores):
        _one_launch(q, k_cache, v_cache, prefix, block_tables, scores, workspace, config, out, lse)
        return out
    # All that the second launch reads before it waits for the first is made before both.
    scores = scores.with_scales_alike(q.device)
    shared = _attend_shared(q, k_cache, v_cache, prefix, replace(scores, sinks=None), config)
    return paged_decode(
        q, k_cache, v_cache, block_tables, own_lens, scores, workspace=workspace, out=out, lse=lse, shared=shared
    )


def _fits_one_launch(q: torch.Tensor, k_cache: torch.Tensor, workspace: DecodeWorkspace, scores: Scores) -> bool:
    """Whether both parts run as one launch: what has been measured, 16-bit caches on Hopper, heads packed."""
    native = cache_kind(k_cache) == "native" and k_cache.element_size() == 2 and scores.k_token_scales is None
    fits = workspace.programs == k_cache.shape[2] and workspace.config.warps == 4 and q.shape[2] <= 128
    return native and fits and capability(q.device) // 10 == 9


def _shared_settings(q: torch.Tensor, k_cache: torch.Tensor, prefix: SharedPrefix, config: PrefillConfig | None):
    """Settings of the shared part, and into how many shares its keys are cut."""
    rows = q.shape[0] * (q.shape[1] // k_cache.shape[2])
    config = config or shared_config(capability(q.device), cache_kind(k_cache), q.shape[2], rows)
    programs = triton.cdiv(rows, config.rows) * k_cache.shape[2]
    slots = num_slots(q.device, DecodeConfig(ctas_per_sm=1))
    return config, shared_splits(triton.cdiv(prefix.length, config.tile), programs, slots)


def _one_launch(q, k_cache, v_cache, prefix, block_tables, scores, workspace, config, out, lse) -> None:
    check_workspace(workspace, q, k_cache, scores, block_tables.shape[0])
    scores.check(q, k_cache)
    if lse is not None:
        check_out("lse", lse, q.shape[:2], torch.float32, q.device)
    config, splits = _shared_settings(q, k_cache, prefix, config)
    launch_cascade(
        q, k_cache, v_cache, prefix.blocks, prefix.length, block_tables, scores, workspace, config, splits, out, lse
    )  # fmt: skip


def _attend_shared(q, k_cache, v_cache, prefix, scores, config):
    """Partial results of all queries over the shared keys: one sequence whose rows all see every key."""
    config, splits = _shared_settings(q, k_cache, prefix, config)
    return launch_prefill(
        q,
        k_cache,
        v_cache,
        prefix.blocks[None],
        prefix.bounds[2:],
        prefix.bounds[:2],
        scores,
        config,
        splits=max(2, splits),
        causal=False,
        trigger=overlaps_launches(q.device),
    )
