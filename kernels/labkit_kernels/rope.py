"""Rotary embedding of queries and keys in place, optionally after Qwen3's norm of each head, for prefill.

Decode has it fused with the cache write in `rope_write`. References: `reference.rope`, `reference_ops.rms_norm`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from labkit_kernels.checks import QUERY_DTYPES, check_device, check_dtype, check_last_stride, check_shape
from labkit_kernels.rope_write import Rotary

ELEMENTS_OF_PROGRAM = 1024


@triton.jit
def _pairs(d, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr):
    """For each dimension its partner, its frequency, and the sign of the partner's sine; unturned ones are alone."""
    half: tl.constexpr = ROTARY // 2
    if INTERLEAVED:
        partner = d ^ 1
        frequency = d // 2
        sign = tl.where(d % 2 == 0, -1.0, 1.0)
    else:
        partner = tl.where(d < half, d + half, d - half)
        frequency = tl.where(d < half, d, d - half)
        sign = tl.where(d < half, -1.0, 1.0)
    return tl.where(d < ROTARY, partner, d), frequency, sign


@triton.jit
def turned_rows(
    x, starts, inside, cos_sin, position, cs_stride, weight, eps,
    D: tl.constexpr, DP: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Float32 rows `[rows, DP]` of x at element offsets `starts`, normed and turned to `position` (one, or one a row).

    Each row is read twice (the second time with partners in place), so all reads are waited for before it returns:
    the caller may write over x.
    """
    d = tl.arange(0, DP)
    partner, frequency, sign = _pairs(d, ROTARY, INTERLEAVED)
    mask = inside[:, None] & (d < D)[None, :]
    own = tl.load(x + starts[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
    other = tl.load(x + starts[:, None] + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(own * own, 1) / D + eps)[:, None]
        w = tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)
        w_other = tl.load(weight + partner, mask=d < D, other=0.0).to(tl.float32)
        own = own * scale * w[None, :]
        other = other * scale * w_other[None, :]
    at = (position.to(tl.int64) * cs_stride)[:, None] + frequency[None, :]
    turned = (d < ROTARY)[None, :]
    cos = tl.load(cos_sin + at, mask=turned, other=1.0).to(tl.float32)
    sin = tl.load(cos_sin + at + ROTARY // 2, mask=turned, other=0.0).to(tl.float32)
    result = own * cos + other * sin * sign[None, :]
    tl.debug_barrier()
    return result


@triton.jit
def _rope_kernel(
    q, k, positions, cos_sin, q_weight, k_weight, cs_stride, eps, q_token, q_head, k_token, k_head, q_heads, k_heads,
    q_tiles, tiles, D: tl.constexpr, DP: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr,
    NORM: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    position = tl.load(positions + token + tl.arange(0, 1))
    d = tl.arange(0, DP)
    if tile < q_tiles:
        head = tile * HEADS + tl.arange(0, HEADS)
        starts = token * q_token + head.to(tl.int64) * q_head
        y = turned_rows(
            q, starts, head < q_heads, cos_sin, position, cs_stride, q_weight, eps, D, DP, ROTARY, INTERLEAVED, NORM
        )  # fmt: skip
        mask = (head < q_heads)[:, None] & (d < D)[None, :]
        tl.store(q + starts[:, None] + d[None, :], y.to(q.dtype.element_ty), mask=mask)
    else:
        head = (tile - q_tiles) * HEADS + tl.arange(0, HEADS)
        starts = token * k_token + head.to(tl.int64) * k_head
        y = turned_rows(
            k, starts, head < k_heads, cos_sin, position, cs_stride, k_weight, eps, D, DP, ROTARY, INTERLEAVED, NORM
        )  # fmt: skip
        mask = (head < k_heads)[:, None] & (d < D)[None, :]
        tl.store(k + starts[:, None] + d[None, :], y.to(k.dtype.element_ty), mask=mask)


def apply_rope(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, rotary: Rotary) -> None:
    """Turns q `[tokens, q heads, D]` and k `[tokens, KV heads, D]` in place (arXiv 2104.09864), in float32.

    positions int64 `[tokens]`, each below the rows of the table (not read on the host, so not checked). Any strides but
    the last, so q and k may be parts of one QKV tensor. Raises KernelValueError or KernelTypeError naming the argument.
    """
    check_dtype("q", q, QUERY_DTYPES)
    check_shape("q", q, (None, None, None))
    check_last_stride("q", q)
    check_dtype("k", k, (q.dtype,))
    check_shape("k", k, (q.shape[0], None, q.shape[2]))
    check_device("k", k, q.device)
    check_last_stride("k", k)
    rotary.check(q, positions)
    check_last_stride("positions", positions)
    if q.shape[0] == 0:
        return
    padded = triton.next_power_of_2(q.shape[2])
    heads = min(max(1, ELEMENTS_OF_PROGRAM // padded), triton.next_power_of_2(max(q.shape[1], k.shape[1])))
    q_tiles, k_tiles = triton.cdiv(q.shape[1], heads), triton.cdiv(k.shape[1], heads)
    table, normed = rotary.cos_sin, rotary.q_norm is not None
    _rope_kernel[(q.shape[0] * (q_tiles + k_tiles),)](
        q, k, positions, table, rotary.q_norm if normed else table, rotary.k_norm if normed else table, table.stride(0),
        rotary.eps, *q.stride()[:2], *k.stride()[:2], q.shape[1], k.shape[1], q_tiles, q_tiles + k_tiles,
        D=q.shape[2], DP=padded, ROTARY=table.shape[1], INTERLEAVED=rotary.interleaved, NORM=normed, HEADS=heads,
        num_warps=2,
    )  # fmt: skip
