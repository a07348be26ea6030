"""Plain torch references of the kernels around attention: slow, readable, computed in the dtype asked for."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F

E4M3_MAX = 448.0
# As vLLM: a row of zeros has this scale, not 0.
SMALLEST_SCALE = 1.0 / (E4M3_MAX * 512.0)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_MASK = 0xFFFFFFFF
_PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_PHILOX_STEPS = (0x9E3779B9, 0xBB67AE85)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, offset: bool = False) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) · weight (arXiv 1910.07467), or · (1 + weight) with `offset`, in the dtype of x."""
    weight = weight.to(x.dtype)
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * (weight + 1 if offset else weight)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """SiLU of the left half times the right half (arXiv 2002.05202)."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def gelu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """GELU in its tanh form (arXiv 1606.08415) of the left half times the right half."""
    gate, up = x.chunk(2, -1)
    return F.gelu(gate, approximate="tanh") * up


def pool(hidden_states: torch.Tensor, starts: Sequence[int], kind: str, *, normalise: bool = True) -> torch.Tensor:
    """Last token or mean of the rows starts[i] to starts[i + 1] - 1, divided by its Euclidean length; zeros if none."""
    rows = []
    for begin, end in pairwise(starts):
        tokens = hidden_states[begin:end]
        if begin == end:
            rows.append(hidden_states.new_zeros(hidden_states.shape[1]))
        else:
            rows.append(tokens[-1] if kind == "last" else tokens.mean(0))
    pooled = torch.stack(rows)
    return F.normalize(pooled, dim=-1) if normalise else pooled


def copy_blocks(caches: Sequence[torch.Tensor], pairs: Sequence[tuple[int, int]]) -> None:
    """Copies block `from` to block `to` in every cache."""
    for cache in caches:
        for source, target in pairs:
            cache[target] = cache[source]


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row of x `[rows, columns]` as float8_e4m3fn, and its scale max |x| / 448, float32 `[rows, 1]`."""
    scales = (x.abs().amax(1, keepdim=True).float() / E4M3_MAX).clamp_(min=SMALLEST_SCALE)
    return (x.float() / scales).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scales


def awq_pack(values: torch.Tensor) -> torch.Tensor:
    """Numbers 0 to 15 `[rows, columns]` as int32 `[rows, columns / 8]` in AutoAWQ's order."""
    lanes = values.to(torch.int64).reshape(values.shape[0], -1, 8)
    words = sum(lanes[..., column] << (4 * i) for i, column in enumerate(AWQ_ORDER))
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def awq_unpack(words: torch.Tensor) -> torch.Tensor:
    """Numbers 0 to 15 `[rows, columns]` of int32 `[rows, columns / 8]`."""
    values = torch.empty(*words.shape, 8, dtype=torch.int64, device=words.device)
    for i, column in enumerate(AWQ_ORDER):
        values[..., column] = (words.to(torch.int64) >> (4 * i)) & 0xF
    return values.flatten(-2)


def awq_dequantise(
    qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """Weights `[in, out]`: (q - zero) · scale of each group of inputs."""
    group = qweight.shape[0] // qzeros.shape[0]
    zeros = awq_unpack(qzeros).repeat_interleave(group, 0)
    return (awq_unpack(qweight) - zeros).to(dtype) * scales.to(dtype).repeat_interleave(group, 0)


def support(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Bool `[vocab]`: tokens that temperature, top-k, top-p and min-p let through, in this order, by a full sort.

    Tokens of the same logit as the last one kept are kept too. top-p counts mass among what top-k kept.
    """
    order = logits.double().argsort(descending=True)
    probabilities = (logits.double()[order] / temperature).softmax(-1)
    keep = logits.shape[0]
    if 0 < top_k < keep:
        keep = int((logits >= logits[order[top_k - 1]]).sum())
        probabilities = probabilities[:keep] / probabilities[:keep].sum()
    if top_p < 1.0:
        before = probabilities.cumsum(0) - probabilities
        keep = max(1, int((before < top_p).sum()))
    kept = logits >= logits[order[keep - 1]]
    relative = ((logits.double() - logits.double().max()) / temperature).exp()
    return kept & (relative >= min_p)


def _multiply_high_low(a: int, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    product = a * b
    return (product >> 32) & _MASK, product & _MASK


def random_words(seed: int, position: int, vocab: int) -> torch.Tensor:
    """The uint32 (as int64) of each token id: Philox-4x32-7, counter (id // 4, position, 0, 0), word id % 4."""
    c0 = torch.arange(-(-vocab // 4), dtype=torch.int64)
    c1, c2, c3 = torch.full_like(c0, position & _MASK), torch.zeros_like(c0), torch.zeros_like(c0)
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(7):
        high_a, low_a = _multiply_high_low(_PHILOX_MULTIPLIERS[0], c0)
        high_b, low_b = _multiply_high_low(_PHILOX_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high_b ^ c1 ^ k0, low_b, high_a ^ c3 ^ k1, low_a
        k0, k1 = (k0 + _PHILOX_STEPS[0]) & _MASK, (k1 + _PHILOX_STEPS[1]) & _MASK
    return torch.stack([c0, c1, c2, c3], -1).flatten()[:vocab]


def sample(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float, seed: int, position: int
) -> int:
    """The token drawn from one row: argmax over the support of logit / temperature - ln E, E = -ln(1 - u)."""
    if temperature == 0 or top_k == 1:
        return int(logits.argmax())
    u = (random_words(seed, position, logits.shape[0]).double() + 0.5) / 2**32
    noisy = logits.double() / temperature - (-torch.log1p(-u)).log()
    return int(noisy.masked_fill(~support(logits, temperature, top_k, top_p, min_p), float("-inf")).argmax())
