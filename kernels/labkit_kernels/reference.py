"""Plain torch references of every kernel in this package: slow, readable, computed in the dtype asked for.

Attention: softmax(scale · q kᵀ) v over the keys a token may see, as in Vaswani et al. 2017 (arXiv 1706.03762), with
Gemma 2's soft cap (arXiv 2408.00118, cap · tanh(x / cap)), Mistral's sliding window (arXiv 2310.06825: a token sees
itself and the window - 1 tokens before it) and the attention sink of gpt-oss (one more logit for each head that takes
weight and brings no value).
"""

from __future__ import annotations

import torch


def dequantise(cache: torch.Tensor, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Numbers behind a cache tensor; uint8 is e4m3 kept as bits (for cards without fp8 conversion)."""
    if cache.dtype is torch.uint8:
        cache = cache.view(torch.float8_e4m3fn)
    if cache.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        cache = cache.to(torch.float32)
    return cache.to(dtype)


def gather_sequence(
    cache: torch.Tensor, block_table: torch.Tensor, seq_len: int, token_scales: torch.Tensor | None = None
) -> torch.Tensor:
    """`[seq_len, KV heads, head size]` in float64 of one sequence from a paged cache."""
    block_size = cache.shape[1]
    positions = torch.arange(seq_len, device=cache.device)
    blocks = block_table[positions // block_size].long()
    rows = dequantise(cache[blocks, positions % block_size])
    if token_scales is not None:
        rows = rows * token_scales[blocks, positions % block_size].double()[..., None]
    return rows


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    causal: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output `[tokens, q heads, D]` and natural-log LSE `[tokens, q heads]` of one sequence.

    q `[tokens, q heads, D]` are the last `tokens` positions of k, v `[keys, KV heads, D]`. A row that sees no key gives
    zeros and -inf. The LSE counts the sink.
    """
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q.to(k.dtype), k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    key = torch.arange(k.shape[0], device=q.device)[None, :]
    position = torch.arange(q.shape[0], device=q.device)[:, None] + k.shape[0] - q.shape[0]
    visible = key <= position if causal else torch.ones_like(key <= position)
    if window is not None:
        visible = visible & (key > position - window)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        extra = sinks.to(k.dtype)[:, None, None].expand(-1, q.shape[0], 1)
        scores = torch.cat([scores, extra], dim=-1)
    lse = torch.logsumexp(scores, dim=-1) if scores.shape[-1] else scores.new_full(scores.shape[:2], float("-inf"))
    weights = torch.exp(scores - torch.where(lse.isinf(), 0.0, lse)[..., None])[..., : k.shape[0]]
    return torch.einsum("hqk,khd->qhd", weights, v), lse.transpose(0, 1)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    query_start_loc: torch.Tensor | None = None,
    k_scale: float | torch.Tensor = 1.0,
    v_scale: float | torch.Tensor = 1.0,
    k_token_scales: torch.Tensor | None = None,
    v_token_scales: torch.Tensor | None = None,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Float64 output `[tokens, q heads, D]` and LSE `[tokens, q heads]` of decode, chunks and prefill alike.

    Each sequence's query tokens are its last ones; their K and V are in the cache already.
    """
    batch = seq_lens.shape[0]
    if query_start_loc is None:
        query_start_loc = torch.arange(batch + 1) * (q.shape[0] // max(batch, 1))
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    lse = torch.full(q.shape[:2], float("-inf"), dtype=torch.float64, device=q.device)
    starts = query_start_loc.tolist()
    for i, seq_len in enumerate(seq_lens.tolist()):
        rows = slice(starts[i], starts[i + 1])
        if rows.start == rows.stop:
            continue
        k = gather_sequence(k_cache, block_tables[i], seq_len, k_token_scales) * _by_head(k_scale)
        v = gather_sequence(v_cache, block_tables[i], seq_len, v_token_scales) * _by_head(v_scale)
        out[rows], lse[rows] = attend(q[rows].double(), k, v, scale=scale, window=window, softcap=softcap, sinks=sinks)
    return out, lse


def _by_head(scale: float | torch.Tensor) -> float | torch.Tensor:
    return scale.double().reshape(-1, 1) if isinstance(scale, torch.Tensor) else scale


def merge(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of two disjoint sets of keys, from the results over each (arXiv 2402.05099 §3)."""
    lse = torch.logaddexp(lse_a, lse_b)
    safe = torch.where(lse.isinf(), 0.0, lse)
    weight_a, weight_b = torch.exp(lse_a - safe)[..., None], torch.exp(lse_b - safe)[..., None]
    return out_a * weight_a + out_b * weight_b, lse


def quantise(values: torch.Tensor, dtype: torch.dtype, scale: float | torch.Tensor = 1.0) -> torch.Tensor:
    """Values over `scale` in the cache dtype: fp8 clamped to its largest finite number, int8 rounded half to even."""
    scaled = values.float() / scale
    if dtype is torch.int8:
        return scaled.round().clamp(-127, 127).to(torch.int8)
    if dtype is torch.uint8:
        return scaled.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    if dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        largest = torch.finfo(dtype).max
        return scaled.clamp(-largest, largest).to(dtype)
    return values.to(dtype)


def token_head_scales(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Largest magnitude of each `[..., head]` row over the dtype's largest number (1 for a row of zeros)."""
    largest = {torch.int8: 127.0, torch.uint8: 448.0}.get(dtype) or torch.finfo(dtype).max
    scales = values.float().abs().amax(-1) / largest
    return torch.where(scales == 0, 1.0, scales)


def rope(x: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor, *, interleaved: bool = False) -> torch.Tensor:
    """Rotary embedding (arXiv 2104.09864) of `[tokens, heads, D]`; cos_sin `[positions, rotary dim]` = cos then sin."""
    rotary = cos_sin.shape[-1]
    cos, sin = cos_sin[positions].to(x.dtype)[:, None].chunk(2, -1)
    turned, rest = x[..., :rotary], x[..., rotary:]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    else:
        a, b = turned.chunk(2, -1)
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    return torch.cat([turned, rest], -1)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Root-mean-square norm (arXiv 1910.07467) over the last dimension, times `weight`."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.to(x.dtype)
