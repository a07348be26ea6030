"""Merging attention over disjoint sets of keys by log-sum-exp (arXiv 2402.05099), in a fixed order.

Reference: `labkit_kernels.reference.merge`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from labkit_kernels.launches import Launches
from labkit_kernels.scores import Scores, finish_heads
from labkit_kernels.sizes import cdiv, next_power_of_2

MERGE_STEP = 8
_LAUNCHES = Launches()


@dataclass(frozen=True)
class Partials:
    """Results over each share of the keys, float32: out `[splits, tokens, q heads, D]`, base-2 LSE without D."""

    out: torch.Tensor
    lse: torch.Tensor


@triton.jit
def store_partial(acc, m, total, outs, lses, row, valid, D: tl.constexpr, DP: tl.constexpr):
    """Writes divided results and base-2 LSE (-inf for a row without keys) at rows `row` of `outs` and `lses`."""
    d = tl.arange(0, DP)
    some = total > 0
    divisor = tl.where(some, total, 1.0)
    divided = acc * (1.0 / divisor)[:, None]
    tl.store(outs + row[:, None] * D + d[None, :], divided, mask=valid[:, None] & (d < D)[None, :])
    tl.store(lses + row, tl.where(some, m + tl.log2(divisor), float("-inf")), mask=valid)


@triton.jit
def fold_partials(
    acc, m, total, outs, lses, row, valid, stride, count,
    D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Adds to (acc, m, total) the `count` results that lie `stride` rows apart from row `row` on, in their order.

    STEP results are read at once. Rows and head dimension fill the threads, so a thread holds all results of its
    elements and nothing is exchanged.
    """
    j = tl.arange(0, STEP)
    d = tl.arange(0, DP)
    at = row[:, None] + j[None, :] * stride
    outs += at[:, :, None] * D + d[None, None, :]
    lses += at
    for start in tl.range(0, count, STEP, num_stages=1):
        ok = valid[:, None] & (j < count - start)[None, :]
        part_m = tl.load(lses, mask=ok, other=float("-inf"), cache_modifier=".cg")
        inside = ok[:, :, None] & (d < D)[None, None, :]
        part = tl.load(outs, mask=inside, other=0.0, cache_modifier=".cg")
        m_new = tl.maximum(m, tl.max(part_m, 1))
        safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        weight = tl.exp2(part_m - safe[:, None])
        alpha = tl.exp2(m - safe)
        acc = acc * alpha[:, None] + tl.sum(part * weight[:, :, None], 1)
        total = total * alpha + tl.sum(weight, 1)
        m = m_new
        outs += STEP * stride * D
        lses += STEP * stride
    return acc, m, total


@triton.jit(do_not_specialize=["num_rows", "num_seqs"])
def _merge_kernel(
    partial_out, partial_lse, out, lse, sinks, bounds, v_scale_ptr, v_scale, v_scale_stride, num_rows, num_seqs,
    out_stride_token, out_stride_head, lse_stride_token,
    SPLITS: tl.constexpr, BOUNDS: tl.constexpr, SINKS: tl.constexpr, SCALE_TENSOR: tl.constexpr, LSE: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * ROWS
    r = tl.arange(0, ROWS)
    row = first + r
    valid = row < num_rows
    token, head = row // HEADS, row % HEADS
    if BOUNDS:
        valid = valid & (token >= tl.load(bounds)) & (token < tl.load(bounds + num_seqs))
    m = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DP], tl.float32)
    acc, m, total = fold_partials(
        acc, m, total, partial_out + first * D, partial_lse + first, r, valid, num_rows.to(tl.int64), SPLITS, D, DP,
        ROWS, STEP,
    )  # fmt: skip
    if SCALE_TENSOR:
        v_scale *= tl.load(v_scale_ptr + head // GROUP * v_scale_stride, mask=valid, other=1.0)
    else:
        v_scale = m * 0.0 + v_scale
    finish_heads(
        acc * v_scale[:, None], m, total, out, lse, sinks, token, head, valid, 1.0, out_stride_token, out_stride_head,
        lse_stride_token, D, DP, SINKS, LSE,
    )  # fmt: skip


def merge_splits(
    partials: Partials,
    scores: Scores,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    bounds: torch.Tensor | None = None,
) -> None:
    """Writes the merged result to `out [tokens, q heads, D]` and `lse`; counts the sinks of `scores` once.

    bounds: int32; only tokens from its first entry up to its last are written.
    """
    v_scale = scores.v_scale
    tensor = isinstance(v_scale, torch.Tensor)
    parts = (partials.out, partials.lse, out, lse, scores.sinks, bounds, v_scale if tensor else None)
    settings = (None if tensor else v_scale, scores.v_token_scales is not None)
    if _LAUNCHES.again(parts, *settings):
        return
    splits, tokens, heads, head_dim = partials.out.shape
    number = (1.0 if tensor else v_scale) / (256.0 if scores.v_token_scales is not None else 1.0)
    kv_heads = v_scale.numel() if tensor and v_scale.numel() > 1 else heads
    rows = 2
    num_seqs = 0 if bounds is None else bounds.shape[0] - 1
    _LAUNCHES.first(
        parts, settings, _merge_kernel, (cdiv(tokens * heads, rows),),
        partials.out, partials.lse, out, out if lse is None else lse, out if scores.sinks is None else scores.sinks,
        out if bounds is None else bounds, v_scale if tensor else out, number, int(tensor and v_scale.numel() > 1),
        tokens * heads, num_seqs, out.stride(0), out.stride(1), 0 if lse is None else lse.stride(0), SPLITS=splits,
        BOUNDS=bounds is not None, SINKS=scores.sinks is not None, SCALE_TENSOR=tensor, LSE=lse is not None,
        HEADS=heads, GROUP=heads // kv_heads, D=head_dim, DP=next_power_of_2(head_dim), ROWS=rows,
        STEP=min(MERGE_STEP, next_power_of_2(splits)), num_warps=2,
    )  # fmt: skip
