"""Everything between a decode step's QKV projection and its attention, in one launch: q/k norm, RoPE, KV write.

References: `labkit_kernels.reference.rope`, `reference.quantise`, `reference_ops.rms_norm`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from labkit_kernels.checks import check_last_stride, check_shape
from labkit_kernels.kv_write import KVTarget, _store_rows
from labkit_kernels.rope import Rotation, turned_rows


@triton.jit(do_not_specialize=["num_tokens"])
def _rope_write_kernel(
    q, key, value, positions, slot_mapping, cos_sin, q_weight, k_weight, k_cache, v_cache, k_scale_ptr, v_scale_ptr,
    k_tokens, v_tokens, k_scale, v_scale, ks_stride, vs_stride, ts_stride_block, ts_stride_slot, ts_stride_head,
    k_stride_block, k_stride_slot, k_stride_head, v_stride_block, v_stride_slot, v_stride_head,
    num_tokens, cs_stride, eps, q_token, q_head, key_token, key_head, value_token, value_head,
    KIND: tl.constexpr, LARGEST: tl.constexpr, K_SCALE_TENSOR: tl.constexpr, V_SCALE_TENSOR: tl.constexpr,
    TOKEN_SCALES: tl.constexpr, BLOCK_SIZE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr, NORM: tl.constexpr, OFFSET: tl.constexpr, Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) % (Q_HEADS + 2 * KV_HEADS)
    token = (tl.program_id(0) // (Q_HEADS + 2 * KV_HEADS) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    there = token < num_tokens
    slots = tl.load(slot_mapping + token, mask=there, other=-1)
    inside = slots >= 0
    position = tl.load(positions + token, mask=inside, other=0)
    d = tl.arange(0, DP)
    if row < Q_HEADS:
        starts = token * q_token + row.to(tl.int64) * q_head
        y = turned_rows(
            q, starts, inside, cos_sin, position, cs_stride, q_weight, eps, D, DP, ROTARY, INTERLEAVED, NORM, OFFSET
        )
        tl.store(q + starts[:, None] + d[None, :], y.to(q.dtype.element_ty), mask=inside[:, None] & (d < D)[None, :])
    elif row < Q_HEADS + KV_HEADS:
        head = row - Q_HEADS
        starts = token * key_token + head.to(tl.int64) * key_head
        y = turned_rows(
            key, starts, inside, cos_sin, position, cs_stride, k_weight, eps, D, DP, ROTARY, INTERLEAVED, NORM, OFFSET
        )
        _store_rows(
            y.to(key.dtype.element_ty), k_cache, k_tokens, slots, head, inside, k_scale_ptr, k_scale, ks_stride,
            ts_stride_block, ts_stride_slot, ts_stride_head, k_stride_block, k_stride_slot, k_stride_head, KIND,
            LARGEST, K_SCALE_TENSOR, TOKEN_SCALES, BLOCK_SIZE, D, DP,
        )  # fmt: skip
    else:
        head = row - Q_HEADS - KV_HEADS
        starts = token * value_token + head.to(tl.int64) * value_head
        v = tl.load(value + starts[:, None] + d[None, :], mask=inside[:, None] & (d < D)[None, :], other=0.0)
        _store_rows(
            v, v_cache, v_tokens, slots, head, inside, v_scale_ptr, v_scale, vs_stride, ts_stride_block,
            ts_stride_slot, ts_stride_head, v_stride_block, v_stride_slot, v_stride_head, KIND, LARGEST,
            V_SCALE_TENSOR, TOKEN_SCALES, BLOCK_SIZE, D, DP,
        )  # fmt: skip


def rope_and_write_kv(
    q: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    rotation: Rotation,
    target: KVTarget,
) -> None:
    """Turns q `[tokens, q heads, D]` in place, and writes turned keys and values `[tokens, KV heads, D]` to the cache.

    key itself is not changed: decode reads keys from the cache. positions int32 or int64 `[tokens]`; slot_mapping int64
    `[tokens]` as in `write_kv`; a token with a negative slot is left alone, its query too. Raises KernelValueError or
    KernelTypeError naming the argument.
    """
    rotation.check(q, key, positions)
    target.check(key, value, slot_mapping)
    check_shape("slot_mapping", slot_mapping, (q.shape[0],))
    check_last_stride("slot_mapping", slot_mapping)
    check_last_stride("positions", positions)
    num_tokens, kv_heads, head_dim = key.shape
    if num_tokens == 0:
        return
    tokens = 1 if num_tokens <= 256 else 4
    programs = triton.cdiv(num_tokens, tokens) * (q.shape[1] + 2 * kv_heads)
    _rope_write_kernel[(programs,)](
        q, key, value, positions, slot_mapping, *rotation.tensors(), *target.tensors(key), *target.numbers(),
        num_tokens, rotation.cos_sin.stride(0), rotation.eps, *q.stride()[:2], *key.stride()[:2], *value.stride()[:2],
        **target.switches(), **rotation.switches(head_dim), Q_HEADS=q.shape[1], KV_HEADS=kv_heads, TOKENS=tokens,
        num_warps=1,
    )  # fmt: skip
