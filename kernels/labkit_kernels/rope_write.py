"""A layer's small steps in one launch: q/k norm (Qwen3), RoPE on q and k, and the quantised write of k and v.

References: `rms_norm`, `rope` and `quantise` in `labkit_kernels.reference`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import triton
import triton.language as tl

from labkit_kernels.checks import (
    KernelValueError,
    check_device,
    check_dtype,
    check_last_stride,
    check_out,
    check_shape,
)
from labkit_kernels.kv_write import KVTarget, store_rows
from labkit_kernels.launches import Launches, addresses_of, looks_of
from labkit_kernels.ops import begin, overlap_options
from labkit_kernels.sizes import cdiv, next_power_of_2

# A program takes one row where there are few, for the shortest time; where launching programs would take longer than
# the copy, several tokens of a head, for loads of 16 bytes a thread.
MANY_ROWS, TOKENS_OF_MANY = 4096, 8
_LAUNCHES = Launches()


@dataclass(frozen=True)
class Rotary:
    """cos_sin float32 `[positions, rotary dim]`, cosines then sines; interleaved pairs (2i, 2i + 1) or split halves.

    q_norm, k_norm `[D]`: weights of the RMS norm of each head before the rotation, both or none.
    """

    cos_sin: torch.Tensor
    interleaved: bool = False
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    eps: float = 1e-6

    @cached_property
    def looks(self) -> tuple:
        """See `labkit_kernels.launches.Fixed`."""
        return (*looks_of(self.cos_sin, self.q_norm, self.k_norm), self.interleaved, self.eps)

    @cached_property
    def addresses(self) -> tuple[int, ...]:
        """Table, q and k norm."""
        return addresses_of(self.cos_sin, self.q_norm, self.k_norm)

    def check(self, q: torch.Tensor, positions: torch.Tensor) -> None:
        """Raises KernelValueError or KernelTypeError naming the bad argument."""
        check_dtype("cos_sin", self.cos_sin, (torch.float32,))
        check_device("cos_sin", self.cos_sin, q.device)
        check_shape("cos_sin", self.cos_sin, (None, None))
        check_last_stride("cos_sin", self.cos_sin)
        rotary = self.cos_sin.shape[1]
        if rotary % 2 or not 2 <= rotary <= q.shape[2]:
            raise KernelValueError(f"cos_sin has rotary dim {rotary}; it must be even and at most {q.shape[2]}")
        check_dtype("positions", positions, (torch.int64,))
        check_device("positions", positions, q.device)
        check_shape("positions", positions, (q.shape[0],))
        if (self.q_norm is None) != (self.k_norm is None):
            raise KernelValueError("q_norm and k_norm must be given together")
        for name, weight in (("q_norm", self.q_norm), ("k_norm", self.k_norm)):
            if weight is not None:
                check_device(name, weight, q.device)
                check_shape(name, weight, (q.shape[2],))
                check_last_stride(name, weight)


@triton.jit
def _rotated(
    x_ptr, weight, cos_sin, position, here, eps,
    NORM: tl.constexpr, INTERLEAVED: tl.constexpr, ROTARY: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
):  # fmt: skip
    """One head's rows after norm and rotation, float32 `[tokens, DP]`: x · cos + partner · ± sin on the rotary
    dimensions. `x_ptr` and `position` hold one entry for each token, `here` says which of them there are."""
    d = tl.arange(0, DP)[None, :]
    half: tl.constexpr = ROTARY // 2
    first = d < half
    partner = tl.where(first, d + half, d - half)
    angle = d % half
    if INTERLEAVED:
        first = d % 2 == 0
        partner = d ^ 1
        angle = d // 2
    inside = here[:, None] & (d < D)
    turned = here[:, None] & (d < ROTARY)
    x = tl.load(x_ptr[:, None] + d, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(x_ptr[:, None] + partner, mask=turned, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        x = x * scale * tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32)
        other = other * scale * tl.load(weight + partner, mask=d < ROTARY, other=0.0).to(tl.float32)
    at = (position * ROTARY)[:, None] + angle
    cos = tl.load(cos_sin + at, mask=turned, other=1.0)
    sin = tl.load(cos_sin + at + half, mask=turned, other=0.0)
    return x * cos + tl.where(first, -other, other) * sin


@triton.jit(do_not_specialize=["num_tokens"])
def _rope_write_kernel(
    q, key, value, positions, slot_mapping, cos_sin, q_weight, k_weight, q_out,
    k_cache, v_cache, k_scale_ptr, v_scale_ptr, k_tokens, v_tokens, eps,
    k_scale, v_scale, ks_stride, vs_stride, ts_stride_block, ts_stride_slot, ts_stride_head,
    k_stride_block, k_stride_slot, k_stride_head, v_stride_block, v_stride_slot, v_stride_head, num_tokens,
    q_stride_token, q_stride_head, key_stride_token, key_stride_head, value_stride_token, value_stride_head,
    out_stride_token, out_stride_head,
    KIND: tl.constexpr, LARGEST: tl.constexpr, K_SCALE_TENSOR: tl.constexpr, V_SCALE_TENSOR: tl.constexpr,
    TOKEN_SCALES: tl.constexpr, BLOCK_SIZE: tl.constexpr, NORM: tl.constexpr, INTERLEAVED: tl.constexpr,
    ROTARY: tl.constexpr, Q_HEADS: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    TOKENS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    # Heads of the same tokens lie side by side in memory, and so do their programs.
    head = tl.program_id(0) % HEADS
    token = (tl.program_id(0) // HEADS * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    here = token < num_tokens
    begin(OVERLAP)
    d = tl.arange(0, DP)
    position = tl.load(positions + token, mask=here, other=0)
    if head < Q_HEADS:
        rows = _rotated(
            q + token * q_stride_token + head * q_stride_head, q_weight, cos_sin, position, here, eps, NORM,
            INTERLEAVED, ROTARY, D, DP,
        )  # fmt: skip
        # `q_out` may be q: nothing is written before all partners have been read, however many warps there are.
        tl.debug_barrier()
        at = (token * out_stride_token + head * out_stride_head)[:, None] + d[None, :]
        tl.store(q_out + at, rows.to(q_out.dtype.element_ty), mask=here[:, None] & (d < D)[None, :])
        return
    head -= Q_HEADS
    slots = tl.load(slot_mapping + token, mask=here, other=-1)
    inside = slots >= 0
    rows = _rotated(
        key + token * key_stride_token + head * key_stride_head, k_weight, cos_sin, position, here, eps, NORM,
        INTERLEAVED, ROTARY, D, DP,
    )  # fmt: skip
    # Rounded to the model's dtype first, as when the steps are separate kernels.
    store_rows(
        rows.to(key.dtype.element_ty), k_cache, k_tokens, slots, head, inside, k_scale_ptr, k_scale, ks_stride,
        ts_stride_block, ts_stride_slot, ts_stride_head, k_stride_block, k_stride_slot, k_stride_head, KIND, LARGEST,
        K_SCALE_TENSOR, TOKEN_SCALES, BLOCK_SIZE, D, DP,
    )  # fmt: skip
    at = (token * value_stride_token + head * value_stride_head)[:, None] + d[None, :]
    rows = tl.load(value + at, mask=here[:, None] & (d < D)[None, :], other=0.0)
    store_rows(
        rows, v_cache, v_tokens, slots, head, inside, v_scale_ptr, v_scale, vs_stride, ts_stride_block,
        ts_stride_slot, ts_stride_head, v_stride_block, v_stride_slot, v_stride_head, KIND, LARGEST, V_SCALE_TENSOR,
        TOKEN_SCALES, BLOCK_SIZE, D, DP,
    )  # fmt: skip


def rope_and_write(
    q: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    rotary: Rotary,
    target: KVTarget,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotated queries `[tokens, q heads, D]`; rotated keys and the values go to `target` at `slot_mapping`.

    q `[tokens, q heads, D]`, key and value `[tokens, KV heads, D]`, positions and slot_mapping int64 `[tokens]`. A
    negative slot writes nothing, but its query is still rotated. Raises KernelValueError or KernelTypeError.
    """
    out = torch.empty_like(q) if out is None else out
    parts = (q, key, value, positions, slot_mapping, rotary, out, target)
    if _LAUNCHES.again(parts):
        return out
    check_shape("q", q, (key.shape[0], None, key.shape[2]))
    check_dtype("q", q, (key.dtype,))
    check_last_stride("q", q)
    target.check(key, value, slot_mapping)
    rotary.check(q, positions)
    check_out("out", out, q.shape, q.dtype, q.device)
    if q.shape[0] == 0:
        return out
    norm = rotary.q_norm is not None
    cos_sin = rotary.cos_sin.contiguous()
    num_tokens, heads = q.shape[0], q.shape[1] + key.shape[1]
    tokens = TOKENS_OF_MANY if num_tokens * heads >= MANY_ROWS else 1
    _LAUNCHES.first(
        parts, (), _rope_write_kernel, (cdiv(num_tokens, tokens) * heads,),
        q, key, value, positions, slot_mapping, cos_sin, rotary.q_norm if norm else q, rotary.k_norm if norm else q,
        out, *target.tensors(key), rotary.eps, *target.numbers(), num_tokens, q.stride(0), q.stride(1), key.stride(0),
        key.stride(1), value.stride(0), value.stride(1), out.stride(0), out.stride(1), **target.switches(), NORM=norm,
        INTERLEAVED=rotary.interleaved, ROTARY=cos_sin.shape[1], Q_HEADS=q.shape[1], HEADS=heads, D=q.shape[2],
        DP=next_power_of_2(q.shape[2]), TOKENS=tokens, num_warps=min(4, tokens),
        **overlap_options(q.device),
    )  # fmt: skip
    return out
