"""Rotary embedding of queries and keys in place, optionally after Qwen3's norm of each head.

References: `labkit_kernels.reference.rope`, `reference_ops.rms_norm`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from labkit_kernels.checks import (
    QUERY_DTYPES,
    KernelValueError,
    check_device,
    check_dtype,
    check_last_stride,
    check_shape,
)

ELEMENTS_OF_PROGRAM = 1024


@dataclass(frozen=True)
class Rotation:
    """How heads are turned: the table, the pairing, and the norm before it.

    cos_sin `[positions, rotary dim]`: cosines of the rotary dim / 2 frequencies, then their sines. interleaved: pairs
    are neighbours (2i, 2i + 1), as GPT-J; else (i, i + rotary dim / 2), as GPT-NeoX. q_weight, k_weight `[D]`, both or
    none: RMS norm of each head first; offset: with 1 + weight.
    """

    cos_sin: torch.Tensor
    interleaved: bool = False
    q_weight: torch.Tensor | None = None
    k_weight: torch.Tensor | None = None
    eps: float = 1e-6
    offset: bool = False

    def check(self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor) -> None:
        """Raises KernelValueError or KernelTypeError naming the bad argument."""
        check_dtype("q", q, QUERY_DTYPES)
        check_shape("q", q, (None, None, None))
        check_dtype("k", k, (q.dtype,))
        check_shape("k", k, (q.shape[0], None, q.shape[2]))
        for name, tensor in (("q", q), ("k", k), ("cos_sin", self.cos_sin)):
            check_device(name, tensor, q.device)
            check_last_stride(name, tensor)
        check_dtype("positions", positions, (torch.int64, torch.int32))
        check_device("positions", positions, q.device)
        check_shape("positions", positions, (q.shape[0],))
        check_dtype("cos_sin", self.cos_sin, QUERY_DTYPES)
        check_shape("cos_sin", self.cos_sin, (None, None))
        rotary = self.cos_sin.shape[1]
        if rotary % 2 or not 2 <= rotary <= q.shape[2]:
            raise KernelValueError(f"cos_sin has {rotary} columns; works: an even number from 2 to {q.shape[2]}")
        self._check_weights(q)

    def _check_weights(self, q: torch.Tensor) -> None:
        if (self.q_weight is None) != (self.k_weight is None):
            raise KernelValueError("q_weight and k_weight must be given together")
        for name, weight in (("q_weight", self.q_weight), ("k_weight", self.k_weight)):
            if weight is None:
                continue
            check_dtype(name, weight, QUERY_DTYPES)
            check_device(name, weight, q.device)
            check_shape(name, weight, (q.shape[2],))
            check_last_stride(name, weight)
        if not self.eps > 0:
            raise KernelValueError(f"eps is {self.eps}; it must be positive")

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Table and norm weights (the table stands in where there are none)."""
        weights = [self.cos_sin if w is None else w for w in (self.q_weight, self.k_weight)]
        return (self.cos_sin, *weights)

    def switches(self, head_dim: int) -> dict[str, object]:
        """Compile-time facts of the rotation."""
        return {
            "D": head_dim,
            "DP": triton.next_power_of_2(head_dim),
            "ROTARY": self.cos_sin.shape[1],
            "INTERLEAVED": self.interleaved,
            "NORM": self.q_weight is not None,
            "OFFSET": self.offset,
        }


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
    OFFSET: tl.constexpr,
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
        if OFFSET:
            w += 1.0
            w_other += 1.0
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
    NORM: tl.constexpr, OFFSET: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    position = tl.load(positions + token + tl.arange(0, 1))
    d = tl.arange(0, DP)
    if tile < q_tiles:
        head = tile * HEADS + tl.arange(0, HEADS)
        starts = token * q_token + head.to(tl.int64) * q_head
        y = turned_rows(
            q, starts, head < q_heads, cos_sin, position, cs_stride, q_weight, eps, D, DP, ROTARY, INTERLEAVED, NORM,
            OFFSET,
        )  # fmt: skip
        mask = (head < q_heads)[:, None] & (d < D)[None, :]
        tl.store(q + starts[:, None] + d[None, :], y.to(q.dtype.element_ty), mask=mask)
    else:
        head = (tile - q_tiles) * HEADS + tl.arange(0, HEADS)
        starts = token * k_token + head.to(tl.int64) * k_head
        y = turned_rows(
            k, starts, head < k_heads, cos_sin, position, cs_stride, k_weight, eps, D, DP, ROTARY, INTERLEAVED, NORM,
            OFFSET,
        )  # fmt: skip
        mask = (head < k_heads)[:, None] & (d < D)[None, :]
        tl.store(k + starts[:, None] + d[None, :], y.to(k.dtype.element_ty), mask=mask)


def apply_rope(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, rotation: Rotation) -> None:
    """Turns q `[tokens, q heads, D]` and k `[tokens, KV heads, D]` in place (arXiv 2104.09864), in float32.

    positions int32 or int64 `[tokens]`, each below the rows of the table (not read on the host, so not checked).
    Raises KernelValueError or KernelTypeError naming the argument.
    """
    rotation.check(q, k, positions)
    if q.shape[0] == 0:
        return
    switches = rotation.switches(q.shape[2])
    heads = min(max(1, ELEMENTS_OF_PROGRAM // int(switches["DP"])), triton.next_power_of_2(max(q.shape[1], k.shape[1])))
    q_tiles, k_tiles = triton.cdiv(q.shape[1], heads), triton.cdiv(k.shape[1], heads)
    _rope_kernel[(q.shape[0] * (q_tiles + k_tiles),)](
        q, k, positions, *rotation.tensors(), rotation.cos_sin.stride(0), rotation.eps, *q.stride()[:2],
        *k.stride()[:2], q.shape[1], k.shape[1], q_tiles, q_tiles + k_tiles, **switches, HEADS=heads, num_warps=2,
    )  # fmt: skip
