"""What every attention call shares: the `Scores` record, its kernel arguments, and the last steps of a row."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
import triton
import triton.language as tl

from labkit_kernels.checks import (
    KernelValueError,
    check_device,
    check_dtype,
    check_scale,
    check_shape,
    check_token_scales,
)
from labkit_kernels.launches import addresses_of, looks_of
from labkit_kernels.ops import interpreting


@dataclass(frozen=True)
class Scores:
    """How scores are formed: softmax over cap(scale · q·k) with a window, a soft cap, sinks and KV scales.

    window counts keys, the token itself included. sinks: float32 `[q heads]`, natural-log units. k_scale and v_scale:
    a float, or a float32 device tensor of one value or one for each KV head; token scales float32
    `[blocks, block size, KV heads]` for caches quantised per token and head.
    """

    scale: float
    window: int | None = None
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    k_scale: float | torch.Tensor = 1.0
    v_scale: float | torch.Tensor = 1.0
    k_token_scales: torch.Tensor | None = None
    v_token_scales: torch.Tensor | None = None

    @cached_property
    def looks(self) -> tuple:
        """See `labkit_kernels.launches.Fixed`."""
        return (self.scale, self.window, self.softcap, *looks_of(*self._tensors))

    @cached_property
    def addresses(self) -> tuple[int, ...]:
        """Those of `score_arguments`, in its order."""
        return addresses_of(*self._tensors)

    @property
    def _tensors(self) -> tuple[torch.Tensor | float | None, ...]:
        return self.sinks, self.k_scale, self.v_scale, self.k_token_scales, self.v_token_scales

    def check(self, q: torch.Tensor, k_cache: torch.Tensor) -> None:
        """Raises KernelValueError or KernelTypeError naming the bad argument."""
        num_kv_heads = k_cache.shape[2]
        check_scale("k_scale", self.k_scale, num_kv_heads, q.device)
        check_scale("v_scale", self.v_scale, num_kv_heads, q.device)
        if self.softcap < 0:
            raise KernelValueError(f"softcap is {self.softcap}; it must be positive, or 0 for none")
        if self.window is not None and self.window < 1:
            raise KernelValueError(f"window is {self.window}; it must be at least 1 token, or None")
        if self.sinks is not None:
            check_dtype("sinks", self.sinks, (torch.float32,))
            check_device("sinks", self.sinks, q.device)
            check_shape("sinks", self.sinks, (q.shape[1],))
        if (self.k_token_scales is None) != (self.v_token_scales is None):
            raise KernelValueError("k_token_scales and v_token_scales must be given together")
        if self.k_token_scales is not None and self.v_token_scales is not None:
            check_token_scales("k_token_scales", self.k_token_scales, k_cache)
            check_token_scales("v_token_scales", self.v_token_scales, k_cache)
            if self.k_token_scales.stride() != self.v_token_scales.stride():
                raise KernelValueError("k_token_scales and v_token_scales must have the same strides")

    def with_scales_alike(self, device: torch.device) -> Scores:
        """The same with k_scale and v_scale both floats or both tensors on `device`."""
        scales = (self.k_scale, self.v_scale)
        if len({isinstance(scale, torch.Tensor) for scale in scales}) == 1:
            return self
        k_scale, v_scale = (
            scale if isinstance(scale, torch.Tensor) else torch.full((1,), scale, dtype=torch.float32, device=device)
            for scale in scales
        )
        return replace(self, k_scale=k_scale, v_scale=v_scale)


@dataclass(frozen=True)
class ScoreArguments:
    """`Scores` as kernel arguments: tensors or placeholders, floats, and compile-time switches."""

    tensors: tuple[torch.Tensor, ...]
    numbers: tuple[float | int, ...]
    switches: dict[str, object] = field(default_factory=dict)

    def with_scale_factor(self, factor: float) -> ScoreArguments:
        """The same with both KV scales times `factor` (numbers 3 and 4)."""
        scales = tuple(scale * factor for scale in self.numbers[3:5])
        return replace(self, numbers=(*self.numbers[:3], *scales, *self.numbers[5:]))


def score_arguments(scores: Scores, q: torch.Tensor, kind: str) -> ScoreArguments:
    """Arguments in the kernels' order: tensors (sinks, k_scale, v_scale, k and v token scales), numbers, switches."""
    scores = scores.with_scales_alike(q.device)
    k_scale, v_scale = scores.k_scale, scores.v_scale
    scale_tensors = isinstance(k_scale, torch.Tensor)
    token_scales = scores.k_token_scales is not None
    k_tokens = scores.k_token_scales if token_scales else q
    strides = tuple(k_tokens.stride()) if token_scales else (0, 0, 0)
    tensors = (
        q if scores.sinks is None else scores.sinks,
        k_scale if scale_tensors else q,
        v_scale if scale_tensors else q,
        k_tokens,
        scores.v_token_scales if token_scales else q,
    )
    numbers = (
        scores.scale,
        scores.softcap,
        scores.window or 0,
        1.0 if scale_tensors else k_scale,
        1.0 if scale_tensors else v_scale,
        256.0 if kind == "e4m3_bits" else 1.0,
        int(scale_tensors and k_scale.numel() > 1),
        int(scale_tensors and v_scale.numel() > 1),
        *strides,
    )
    switches = {
        "WINDOW": scores.window is not None,
        "SOFTCAP": scores.softcap > 0,
        "SINKS": scores.sinks is not None,
        "SCALE_TENSORS": scale_tensors,
        "TOKEN_SCALES": token_scales,
        "KIND": kind,
        "ASM": not interpreting(),
    }
    return ScoreArguments(tensors, numbers, switches)


@triton.jit
def by_row(x, SWAP: tl.constexpr):
    """A value of each query row, broadcast over tokens."""
    y = x[:, None]
    if SWAP:
        y = x[None, :]
    return y


@triton.jit
def by_token(x, SWAP: tl.constexpr):
    """A value of each KV token, broadcast over query rows."""
    y = x[None, :]
    if SWAP:
        y = x[:, None]
    return y


@triton.jit
def finish_rows(
    acc, m, total, out, lse, out_at, lse_at, valid, sink, value_scale,
    D: tl.constexpr, DP: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """Divides, counts the sink, and writes output rows and their natural-log LSE; a row without keys gives 0, -inf."""
    if SINKS:
        top = tl.maximum(m, sink)
        shrink = tl.exp2(m - top)
        total = total * shrink + tl.exp2(sink - top)
        acc = acc * shrink[:, None]
        m = top
    some = total > 0
    divisor = tl.where(some, total, 1.0)
    acc = acc * (value_scale / divisor)[:, None]
    d = tl.arange(0, DP)
    tl.store(out + out_at[:, None] + d[None, :], acc.to(out.dtype.element_ty), mask=valid[:, None] & (d < D)[None, :])
    if LSE:
        value = tl.where(some, (m + tl.log2(divisor)) * 0.6931471805599453, float("-inf"))
        tl.store(lse + lse_at, value, mask=valid)


@triton.jit
def finish_heads(
    acc, m, total, out, lse, sinks, token, head, valid, value_scale, out_stride_token, out_stride_head,
    lse_stride_token, D: tl.constexpr, DP: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """`finish_rows` of query heads `head` of tokens `token`, one for each row."""
    sink = m
    if SINKS:
        sink = tl.load(sinks + head, mask=valid, other=0.0) * 1.4426950408889634
    finish_rows(
        acc, m, total, out, lse, token * out_stride_token + head * out_stride_head, token * lse_stride_token + head,
        valid, sink, value_scale, D, DP, SINKS, LSE,
    )  # fmt: skip


@triton.jit
def sequence_rows(query_start_loc, seq, QUERY_LEN: tl.constexpr, RAGGED: tl.constexpr):
    """First query token of a sequence and how many it has."""
    q_start = seq * QUERY_LEN
    query_len = QUERY_LEN
    if RAGGED:
        q_start = tl.load(query_start_loc + seq)
        query_len = tl.load(query_start_loc + seq + 1) - q_start
    return q_start, query_len
