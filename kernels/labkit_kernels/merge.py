"""Merging attention over disjoint sets of keys by log-sum-exp (arXiv 2402.05099), in a fixed order.

Reference: `labkit_kernels.reference.merge`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from labkit_kernels.scores import Scores, finish_rows


@dataclass(frozen=True)
class Partials:
    """Undivided results of each share of the keys.

    out float32 `[splits, tokens, q heads, D]`; stats float32 `[2, splits, tokens, q heads]`: row maxima (base 2), sums.
    """

    out: torch.Tensor
    stats: torch.Tensor


@triton.jit
def _add_part(acc, m, total, part, m_part, total_part):
    """Folds one partial result into the running one."""
    m_new = tl.maximum(m, m_part)
    safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    weight = tl.exp2(m_part - safe)
    alpha = tl.exp2(m - safe)
    return acc * alpha[:, None] + part * weight[:, None], m_new, total * alpha + total_part * weight


@triton.jit(do_not_specialize=["num_rows", "num_seqs"])
def _merge_kernel(
    partial_out, partial_stats, other_out, other_lse, out, lse, sinks, bounds, v_scale_ptr, v_scale, v_scale_stride,
    num_rows, num_seqs, other_stride_token, other_stride_head, out_stride_token, out_stride_head, lse_stride_token,
    SPLITS: tl.constexpr, OTHER: tl.constexpr, BOUNDS: tl.constexpr, SINKS: tl.constexpr, SCALE_TENSOR: tl.constexpr,
    LSE: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, DP)
    valid = row < num_rows
    token, head = row // HEADS, row % HEADS
    if BOUNDS:
        valid = valid & (token >= tl.load(bounds)) & (token < tl.load(bounds + num_seqs))
    inside = valid[:, None] & (d < D)[None, :]
    m = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DP], tl.float32)
    for split in tl.static_range(SPLITS):
        at = split * num_rows.to(tl.int64) + row
        part = tl.load(partial_out + at[:, None] * D + d[None, :], mask=inside, other=0.0)
        m_part = tl.load(partial_stats + at, mask=valid, other=float("-inf"))
        total_part = tl.load(partial_stats + SPLITS * num_rows.to(tl.int64) + at, mask=valid, other=0.0)
        acc, m, total = _add_part(acc, m, total, part, m_part, total_part)
    acc = acc * v_scale
    if SCALE_TENSOR:
        acc = acc * tl.load(v_scale_ptr + head // GROUP * v_scale_stride, mask=valid, other=1.0)[:, None]
    if OTHER:
        at = token * other_stride_token + head * other_stride_head
        part = tl.load(other_out + at[:, None] + d[None, :], mask=inside, other=0.0).to(tl.float32)
        m_part = tl.load(other_lse + row, mask=valid, other=float("-inf")) * 1.4426950408889634
        acc, m, total = _add_part(acc, m, total, part, m_part, tl.where(m_part == float("-inf"), 0.0, 1.0))
    sink = m
    if SINKS:
        sink = tl.load(sinks + head, mask=valid, other=0.0) * 1.4426950408889634
    finish_rows(
        acc, m, total, out, lse, token * out_stride_token + head * out_stride_head, token * lse_stride_token + head,
        valid, sink, 1.0, D, DP, SINKS, LSE,
    )  # fmt: skip


def merge_splits(
    partials: Partials,
    scores: Scores,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    other: tuple[torch.Tensor, torch.Tensor] | None = None,
    bounds: torch.Tensor | None = None,
) -> None:
    """Writes the merged result to `out [tokens, q heads, D]` and `lse`; counts the sinks of `scores` once.

    other: finished output `[tokens, q heads, D]` and contiguous natural-log LSE `[tokens, q heads]` over further keys.
    bounds: int32; only tokens from its first entry up to its last are written.
    """
    splits, tokens, heads, head_dim = partials.out.shape
    other_out, other_lse = other or (out, out)
    v_scale = scores.v_scale
    tensor = isinstance(v_scale, torch.Tensor)
    number = (1.0 if tensor else v_scale) / (256.0 if scores.v_token_scales is not None else 1.0)
    kv_heads = v_scale.numel() if tensor and v_scale.numel() > 1 else heads
    rows = 2
    num_seqs = 0 if bounds is None else bounds.shape[0] - 1
    _merge_kernel[(triton.cdiv(tokens * heads, rows),)](
        partials.out, partials.stats, other_out, other_lse, out, out if lse is None else lse,
        out if scores.sinks is None else scores.sinks, out if bounds is None else bounds, v_scale if tensor else out,
        number, int(tensor and v_scale.numel() > 1), tokens * heads, num_seqs, other_out.stride(0),
        other_out.stride(1), out.stride(0), out.stride(1), 0 if lse is None else lse.stride(0), SPLITS=splits,
        OTHER=other is not None, BOUNDS=bounds is not None, SINKS=scores.sinks is not None, SCALE_TENSOR=tensor,
        LSE=lse is not None, HEADS=heads, GROUP=heads // kv_heads, D=head_dim, DP=triton.next_power_of_2(head_dim),
        ROWS=rows, num_warps=2,
    )  # fmt: skip
