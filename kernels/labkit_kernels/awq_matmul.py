"""x · W with 4-bit AWQ weights (W4A16), unpacked inside the product; reference: `reference_ops.awq_dequantise`.

Layout of AutoAWQ's GEMM format: each int32 of qweight `[in, out / 8]` and qzeros `[groups, out / 8]` holds eight
columns, column ORDER[i] in bits 4i to 4i + 3; w = (q - zero) · scale. `nibbles` says how a nibble becomes a float.
"""

from __future__ import annotations

from dataclasses import dataclass

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
from labkit_kernels.heuristics import DecodeConfig, num_slots
from labkit_kernels.nibbles import PER_WORD, check_groups, nibble, unpack_centred
from labkit_kernels.ops import interpreting, overlaps_launches

GROUP_SIZES = (32, 64, 128)
DEQUANTISE_ROWS = 129
TILE_ROWS, TILE_COLUMNS, SUM_TILE = 16, 256, 256
MAX_PARTS = 16


@dataclass(frozen=True)
class AwqWeight:
    """qweight int32 `[in, out / 8]`, qzeros int32 `[groups, out / 8]`, scales fp16 or bf16 `[groups, out]`."""

    qweight: torch.Tensor
    qzeros: torch.Tensor
    scales: torch.Tensor

    def __post_init__(self) -> None:
        """Raises KernelValueError or KernelTypeError naming the bad tensor."""
        check_dtype("qweight", self.qweight, (torch.int32,))
        check_shape("qweight", self.qweight, (None, None))
        inputs, words = self.qweight.shape
        check_groups("qweight", self.qweight, self.qzeros, self.scales, words * PER_WORD)
        groups = self.qzeros.shape[0]
        if words == 0 or inputs % 32 or inputs == 0:
            raise KernelValueError(f"qweight has shape {(inputs, words)}; rows must be a multiple of 32, columns some")
        if groups == 0 or inputs % groups or (groups > 1 and inputs // groups not in GROUP_SIZES):
            raise KernelValueError(
                f"qzeros has {groups} groups for {inputs} inputs; works: groups of "
                f"{', '.join(map(str, GROUP_SIZES))} inputs, or one group of all"
            )

    @property
    def group_size(self) -> int:
        """Inputs of a group."""
        return self.qweight.shape[0] // self.qzeros.shape[0]


@dataclass(frozen=True)
class AwqTiling:
    """Inputs of a step, a whole number of which make a group, and parts of the input dimension (split-K)."""

    inputs: int
    parts: int


def awq_tiling(slots: int, rows: int, weight: AwqWeight) -> AwqTiling:
    """Few tiles split the inputs over programs until a card of `slots` multiprocessors has two for each."""
    inputs, columns = weight.qweight.shape[0], weight.scales.shape[1]
    step = next(size for size in (128, 64, 32) if weight.group_size % size == 0)
    tiles = triton.cdiv(rows, TILE_ROWS) * triton.cdiv(columns, TILE_COLUMNS)
    parts = 1
    while parts < MAX_PARTS and tiles * parts < 2 * slots and inputs // (2 * parts * step) >= 1:
        parts *= 2
    return AwqTiling(step, parts)


@triton.jit
def _add_column(total, a, w, sum_a, zeros, scale, there, J: tl.constexpr):
    """total + (a · (q - 8) - sum of a · (zero - 8)) · scale for column J of each word: no large numbers cancel."""
    zero = (nibble(zeros, J) - 8).to(tl.float32)
    factor = tl.load(scale + J, mask=there, other=0.0).to(tl.float32)
    return total + (tl.dot(a, w, out_dtype=tl.float32) - sum_a[:, None] * zero[None, :]) * factor[None, :]


@triton.jit
def _awq_kernel(
    x, qweight, qzeros, scales, out, rows, words, inputs, group, part_inputs, x_row, w_row, z_row, s_row, o_part,
    o_row, ROWS: tl.constexpr, WORDS: tl.constexpr, INPUTS: tl.constexpr, HALF: tl.constexpr, ASM: tl.constexpr,
    TRIGGER: tl.constexpr,
):  # fmt: skip
    """One tile of one part of the inputs: words are unpacked in registers where the product wants them, as eight tiles
    of every eighth column."""
    if TRIGGER:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    there = word < words
    start = tl.program_id(2) * part_inputs
    c0 = tl.zeros([ROWS, WORDS], tl.float32)
    c1, c2, c3, c4, c5, c6, c7 = c0, c0, c0, c0, c0, c0, c0
    for first in range(start, min(start + part_inputs, inputs), INPUTS):
        g = (first // group).to(tl.int64)
        zeros = tl.load(qzeros + g * z_row + word, mask=there, other=0)
        scale = scales + g * s_row + word * 8
        k = first + tl.arange(0, INPUTS)
        a = tl.load(x + (row.to(tl.int64) * x_row)[:, None] + k[None, :], mask=(row < rows)[:, None], other=0.0)
        packed = tl.load(qweight + (k.to(tl.int64) * w_row)[:, None] + word[None, :], mask=there[None, :], other=0)
        w0, w1, w2, w3, w4, w5, w6, w7 = unpack_centred(packed, HALF, ASM)
        sum_a = tl.sum(a.to(tl.float32), 1)
        c0 = _add_column(c0, a, w0, sum_a, zeros, scale, there, 0)
        c1 = _add_column(c1, a, w1, sum_a, zeros, scale, there, 1)
        c2 = _add_column(c2, a, w2, sum_a, zeros, scale, there, 2)
        c3 = _add_column(c3, a, w3, sum_a, zeros, scale, there, 3)
        c4 = _add_column(c4, a, w4, sum_a, zeros, scale, there, 4)
        c5 = _add_column(c5, a, w5, sum_a, zeros, scale, there, 5)
        c6 = _add_column(c6, a, w6, sum_a, zeros, scale, there, 6)
        c7 = _add_column(c7, a, w7, sum_a, zeros, scale, there, 7)
    even = tl.join(tl.join(c0, c4), tl.join(c2, c6))
    odd = tl.join(tl.join(c1, c5), tl.join(c3, c7))
    total = tl.reshape(tl.join(even, odd), [ROWS, WORDS * 8])
    column = tl.program_id(1) * (WORDS * 8) + tl.arange(0, WORDS * 8)
    at = out + tl.program_id(2).to(tl.int64) * o_part + (row.to(tl.int64) * o_row)[:, None] + column[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (column < words * 8)[None, :])


@triton.jit
def _nibbles(words, HALF: tl.constexpr):
    """`[rows, 8 · words]` of 16-bit floats 2¹⁰ + q (HALF) or 2⁷ + q from `[rows, words]`, columns in order."""
    lane = tl.arange(0, 8)
    shift = (lane // 2 + lane % 2 * 4) * 4
    q = (words[:, :, None] >> shift[None, None, :]) & 0xF
    if HALF:
        y = (q | 0x6400).to(tl.uint16).to(tl.float16, bitcast=True)
    else:
        y = (q | 0x4300).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return tl.reshape(y, (words.shape[0], words.shape[1] * 8))


@triton.jit
def _sum_parts_kernel(
    partial, out, total, columns, o_row, PARTS: tl.constexpr, TILE: tl.constexpr, WAIT: tl.constexpr
):  # fmt: skip
    if WAIT:
        tl.extra.cuda.gdc_wait()
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    part = tl.arange(0, PARTS).to(tl.int64) * total
    y = tl.sum(tl.load(partial + part[:, None] + at[None, :], mask=(at < total)[None, :], other=0.0), 0)
    tl.store(out + at // columns * o_row + at % columns, y.to(out.dtype.element_ty), mask=at < total)


@triton.jit
def _dequantise_kernel(
    qweight, qzeros, scales, out, columns, group, w_row, z_row, s_row, HALF: tl.constexpr, COLUMNS: tl.constexpr,
    INPUTS: tl.constexpr,
):  # fmt: skip
    k = (tl.program_id(0) * INPUTS + tl.arange(0, INPUTS)).to(tl.int64)
    g = tl.program_id(0) * INPUTS // group
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    word = tl.program_id(1) * (COLUMNS // 8) + tl.arange(0, COLUMNS // 8)
    there = word * 8 < columns
    words = tl.load(qweight + (k * w_row)[:, None] + word[None, :], mask=there[None, :], other=0)
    zeros = tl.load(qzeros + g.to(tl.int64) * z_row + word, mask=there, other=0)
    scale = tl.load(scales + g.to(tl.int64) * s_row + column, mask=column < columns, other=0.0)
    w = (_nibbles(words, HALF) - _nibbles(zeros[None, :], HALF)) * scale.to(out.dtype.element_ty)[None, :]
    tl.store(out + (k * columns)[:, None] + column[None, :], w, mask=(column < columns)[None, :])


def awq_dequantise(weight: AwqWeight, dtype: torch.dtype) -> torch.Tensor:
    """The weights `[in, out]` in fp16 or bf16, scale and product rounded to it."""
    check_dtype("out", torch.empty(0, dtype=dtype), (torch.float16, torch.bfloat16))
    inputs, columns = weight.qweight.shape[0], weight.scales.shape[1]
    out = torch.empty(inputs, columns, dtype=dtype, device=weight.qweight.device)
    _dequantise_kernel[(inputs // 32, triton.cdiv(columns, 128))](
        weight.qweight, weight.qzeros, weight.scales, out, columns, weight.group_size, weight.qweight.stride(0),
        weight.qzeros.stride(0), weight.scales.stride(0), HALF=dtype is torch.float16, COLUMNS=128, INPUTS=32,
        num_warps=4,
    )  # fmt: skip
    return out


def awq_matmul(x: torch.Tensor, weight: AwqWeight, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """x `[tokens, in]` in fp16 or bf16 times the 4-bit weights: `[tokens, out]`, summed in float32 in a fixed order.

    From 129 tokens on the weights are unpacked once for torch's own product: 2 · in · out bytes for a moment. Raises
    KernelValueError or KernelTypeError naming the argument.
    """
    check_dtype("x", x, (torch.float16, torch.bfloat16))
    check_shape("x", x, (None, weight.qweight.shape[0]))
    check_device("x", x, weight.qweight.device)
    check_last_stride("x", x)
    rows, columns = x.shape[0], weight.scales.shape[1]
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device) if out is None else out
    check_out("out", out, (rows, columns), x.dtype, x.device)
    if rows >= DEQUANTISE_ROWS:
        return torch.mm(x, awq_dequantise(weight, x.dtype), out=out)
    if rows > 0:
        _launch(x, weight, out)
    return out


def _launch(x: torch.Tensor, weight: AwqWeight, out: torch.Tensor) -> None:
    rows, inputs = x.shape
    columns = out.shape[1]
    tiling = awq_tiling(num_slots(x.device, DecodeConfig(ctas_per_sm=1)), rows, weight)
    target, overlaps = out, False
    if tiling.parts > 1:
        target = torch.empty(tiling.parts, rows, columns, dtype=torch.float32, device=x.device)
        overlaps = overlaps_launches(x.device)
    _awq_kernel[(triton.cdiv(rows, TILE_ROWS), triton.cdiv(columns, TILE_COLUMNS), tiling.parts)](
        x, weight.qweight, weight.qzeros, weight.scales, target, rows, columns // PER_WORD, inputs,
        weight.group_size, triton.cdiv(inputs, tiling.parts * tiling.inputs) * tiling.inputs, x.stride(0),
        weight.qweight.stride(0), weight.qzeros.stride(0), weight.scales.stride(0), rows * columns, target.stride(-2),
        ROWS=TILE_ROWS, WORDS=TILE_COLUMNS // PER_WORD, INPUTS=tiling.inputs, HALF=x.dtype is torch.float16,
        ASM=not interpreting(), TRIGGER=overlaps, num_warps=4, num_stages=3,
    )  # fmt: skip
    if tiling.parts > 1:
        _sum_parts_kernel[(triton.cdiv(rows * columns, SUM_TILE),)](
            target, out, rows * columns, columns, out.stride(0), PARTS=tiling.parts, TILE=SUM_TILE, WAIT=overlaps,
            num_warps=2, **({"launch_pdl": True} if overlaps else {}),
        )  # fmt: skip
