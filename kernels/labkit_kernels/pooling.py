"""Embedding pooling: the last token's or the mean hidden state of each sequence; reference: `reference_ops.pool`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from labkit_kernels.checks import QUERY_DTYPES, KernelValueError, check_device, check_dtype, check_out, check_shape
from labkit_kernels.norms import check_rows

KINDS = ("last", "mean")
TOKENS_OF_STEP = 8
SUM_COLUMNS = 256
MAX_PARTS = 64


@triton.jit
def _sum_kernel(
    hidden_states, query_start_loc, partial, hidden, parts, x_token, tiles, COLUMNS: tl.constexpr, STEP: tl.constexpr
):
    """Float32 sums of a part of a sequence's tokens: part p takes the groups of STEP tokens p, p + parts, …"""
    tile = tl.program_id(0) % tiles
    part = tl.program_id(0) // tiles % parts
    seq = tl.program_id(0) // tiles // parts
    start = tl.load(query_start_loc + seq)
    end = tl.load(query_start_loc + seq + 1)
    d = tile * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([STEP, COLUMNS], tl.float32)
    for first in range(start + part * STEP, end, parts * STEP):
        token = first + tl.arange(0, STEP)
        mask = (token < end)[:, None] & (d < hidden)[None, :]
        total += tl.load(hidden_states + (token.to(tl.int64) * x_token)[:, None] + d[None, :], mask=mask, other=0.0).to(
            tl.float32
        )
    row = (seq * parts + part).to(tl.int64) * hidden
    tl.store(partial + row + d, tl.sum(total, 0), mask=d < hidden)


@triton.jit
def _finish_kernel(
    hidden_states, query_start_loc, partial, out, hidden, parts, x_token, o_token,
    MEAN: tl.constexpr, NORMALISE: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0)
    start = tl.load(query_start_loc + seq)
    end = tl.load(query_start_loc + seq + 1)
    d = tl.arange(0, PADDED)
    if MEAN:
        y = tl.zeros([PADDED], tl.float32)
        for part in range(parts):
            y += tl.load(partial + (seq * parts + part).to(tl.int64) * hidden + d, mask=d < hidden, other=0.0)
        y = y / tl.maximum(end - start, 1).to(tl.float32)
    else:
        mask = (d < hidden) & (end > start)
        y = tl.load(hidden_states + (end - 1).to(tl.int64) * x_token + d, mask=mask, other=0.0).to(tl.float32)
    if NORMALISE:
        y = y / tl.maximum(tl.sqrt(tl.sum(y * y, 0)), 1e-12)
    tl.store(out + seq.to(tl.int64) * o_token + d, y.to(out.dtype.element_ty), mask=d < hidden)


def pool(
    hidden_states: torch.Tensor,
    query_start_loc: torch.Tensor,
    kind: str,
    *,
    normalise: bool = True,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`[sequences, hidden]` float32: the last token's state or the mean over tokens, divided by its Euclidean length.

    hidden_states `[tokens, hidden]`; query_start_loc int32 `[sequences + 1]`; kind "last" or "mean". A sequence without
    tokens gives zeros; a length below 1e-12 divides by 1e-12, as torch's normalize. Sums are in a fixed order. Raises
    KernelValueError or KernelTypeError naming the argument.
    """
    check_dtype("hidden_states", hidden_states, QUERY_DTYPES)
    check_shape("hidden_states", hidden_states, (None, None))
    check_rows("hidden_states", hidden_states)
    check_dtype("query_start_loc", query_start_loc, (torch.int32,))
    check_device("query_start_loc", query_start_loc, hidden_states.device)
    check_shape("query_start_loc", query_start_loc, (None,))
    if kind not in KINDS:
        raise KernelValueError(f"kind is {kind!r}; works: {', '.join(KINDS)}")
    sequences, hidden = query_start_loc.shape[0] - 1, hidden_states.shape[1]
    out = torch.empty(max(sequences, 0), hidden, device=hidden_states.device) if out is None else out
    check_out("out", out, (max(sequences, 0), hidden), out.dtype, hidden_states.device)
    if sequences < 1:
        return out
    partial, parts = _sums(hidden_states, query_start_loc, sequences) if kind == "mean" else (out, 1)
    padded = triton.next_power_of_2(hidden)
    _finish_kernel[(sequences,)](
        hidden_states, query_start_loc, partial, out, hidden, parts, hidden_states.stride(0), out.stride(0),
        MEAN=kind == "mean", NORMALISE=normalise, PADDED=padded, num_warps=max(1, min(16, padded // 512)),
    )  # fmt: skip
    return out


def _sums(hidden_states, query_start_loc, sequences) -> tuple[torch.Tensor, int]:
    num_tokens, hidden = hidden_states.shape
    parts = max(1, min(MAX_PARTS, num_tokens // (sequences * 4 * TOKENS_OF_STEP)))
    tiles = triton.cdiv(hidden, SUM_COLUMNS)
    partial = torch.empty(sequences, parts, hidden, dtype=torch.float32, device=hidden_states.device)
    _sum_kernel[(sequences * parts * tiles,)](
        hidden_states, query_start_loc, partial, hidden, parts, hidden_states.stride(0), tiles, COLUMNS=SUM_COLUMNS,
        STEP=TOKENS_OF_STEP, num_warps=4,
    )  # fmt: skip
    return partial, parts
