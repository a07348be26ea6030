"""Checks of the kernels around attention against float64 references, for any device and dtype."""

from __future__ import annotations

from itertools import product

import torch

from labkit_kernels import reference, reference_ops
from labkit_kernels.activations import gelu_and_mul, silu_and_mul
from labkit_kernels.awq_matmul import AwqWeight, awq_matmul
from labkit_kernels.norms import add_rms_norm, rms_norm
from labkit_kernels.pooling import pool
from labkit_kernels.rope import apply_rope
from labkit_kernels.rope_write import Rotary
from labkit_kernels.sampling import PARAMETER_DTYPES, SamplingTensors

EPS = 1e-6


def relative(have: torch.Tensor, want: torch.Tensor) -> float:
    """‖have - want‖ / ‖want‖ in float64; NaN stays NaN."""
    return float((have.double() - want.double()).norm() / want.double().norm().clamp_min(1e-300))


def poisoned(*shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """A result tensor full of NaN."""
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


def norm_error(shape: tuple[int, ...], dtype: torch.dtype, device: str, *, add: bool, offset: bool) -> float:
    """Error of the RMS norm of rows that are parts of wider ones; checks the residual too."""
    wide = torch.randn(*shape[:-1], shape[-1] + 8, dtype=dtype, device=device) * 3
    x, weight = wide[..., : shape[-1]], torch.randn(shape[-1], dtype=dtype, device=device)
    out = poisoned(*shape, dtype=dtype, device=device)
    if not add:
        rms_norm(x, weight, EPS, offset=offset, out=out)
        return relative(out, reference_ops.rms_norm(x.double(), weight, EPS, offset=offset))
    residual = torch.randn(shape, dtype=dtype, device=device)
    total = x + residual
    add_rms_norm(x, residual, weight, EPS, offset=offset, out=out)
    error = relative(out, reference_ops.rms_norm(residual.double(), weight, EPS, offset=offset))
    return max(error, relative(residual, total))


def activation_error(tokens: int, inner: int, dtype: torch.dtype, device: str) -> float:
    """Larger error of the two gated activations."""
    x = torch.randn(tokens, 2 * inner, dtype=dtype, device=device) * 4
    errors = []
    for kernel, plain in ((silu_and_mul, reference_ops.silu_and_mul), (gelu_and_mul, reference_ops.gelu_and_mul)):
        out = poisoned(tokens, inner, dtype=dtype, device=device)
        errors.append(relative(kernel(x, out=out), plain(x.double())))
    return max(errors)


def rope_error(
    heads: tuple[int, int, int], rotary_dim: int, dtype: torch.dtype, device: str, *, interleaved: bool, norm: bool
) -> float:
    """Larger error of q and k, both parts of one QKV tensor whose V must stay as it was; heads = (q, KV, D)."""
    q_heads, kv_heads, dim = heads
    qkv = torch.randn(7, q_heads + 2 * kv_heads, dim, dtype=dtype, device=device)
    before = qkv.double()
    angle = torch.randn(50, rotary_dim // 2, device=device)
    table = torch.cat([angle.cos(), angle.sin()], -1)
    positions = torch.tensor([0, 49, 3, 3, 17, 1, 30], device=device)
    weights = [torch.randn(dim, dtype=dtype, device=device) if norm else None for _ in range(2)]
    q, k, v = qkv.split([q_heads, kv_heads, kv_heads], 1)
    apply_rope(q, k, positions, Rotary(table, interleaved, *weights, EPS))
    errors = [relative(v, before[:, q_heads + kv_heads :])]
    for turned, old, weight in zip((q, k), before.split([q_heads, kv_heads, kv_heads], 1), weights, strict=False):
        old = old if weight is None else reference_ops.rms_norm(old, weight, EPS)
        want = reference.rope(old, positions, table.double(), interleaved=interleaved)
        errors.append(relative(turned, want))
    return max(errors)


def pool_error(lengths: tuple[int, ...], hidden: int, dtype: torch.dtype, device: str) -> float:
    """Largest error over kinds, normalised and not; sequences of length 0 must give zeros."""
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    states = torch.randn(starts[-1], hidden, dtype=dtype, device=device)
    device_starts = torch.tensor(starts, dtype=torch.int32, device=device)
    errors = []
    for kind, normalise in product(("last", "mean"), (True, False)):
        out = poisoned(len(lengths), hidden, dtype=torch.float32, device=device)
        pool(states, device_starts, kind, normalise=normalise, out=out)
        errors.append(relative(out, reference_ops.pool(states.double(), starts, kind, normalise=normalise)))
    return max(errors)


def awq_weight(inputs: int, outputs: int, group: int, device: str, dtype: torch.dtype = torch.float16) -> AwqWeight:
    """Random 4-bit weights, both ends of the range among them."""
    groups = 1 if group == -1 else inputs // group
    values, zeros = torch.randint(0, 16, (inputs, outputs)), torch.randint(0, 16, (groups, outputs))
    values[0, 0], values[0, 1], zeros[0, 0], zeros[0, 1] = 15, 0, 0, 15
    scales = (torch.rand(groups, outputs) * 0.1 + 0.01).to(dtype)
    packed = (reference_ops.awq_pack(values), reference_ops.awq_pack(zeros), scales)
    return AwqWeight(*(tensor.to(device) for tensor in packed))


def awq_error(rows: int, weight: AwqWeight, dtype: torch.dtype) -> float:
    """Error of the product against float64 weights."""
    x = torch.randn(rows, weight.qweight.shape[0], dtype=dtype, device=weight.qweight.device)
    out = poisoned(rows, weight.scales.shape[1], dtype=dtype, device=str(x.device))
    awq_matmul(x, weight, out=out)
    return relative(out, x.double() @ reference_ops.awq_dequantise(weight.qweight, weight.qzeros, weight.scales))


def sampling_tensors(rows: int, device: str, **values: float | list) -> SamplingTensors:
    """Parameters of `rows` rows: one number for all, or a list; what is not given keeps everything, seeds count up."""
    chosen = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "positions": 0, "seeds": list(range(rows))}
    tensors = {}
    for name, value in (chosen | values).items():
        filled = value if isinstance(value, list) else [value] * rows
        tensors[name] = torch.tensor(filled, dtype=PARAMETER_DTYPES[name], device=device)
    return SamplingTensors(**tensors)
