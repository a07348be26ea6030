"""x · W with 4-bit AWQ weights (W4A16), unpacked inside the product; reference: `reference_ops.awq_dequantise`.

Layout of AutoAWQ's GEMM format: each int32 of qweight `[in, out / 8]` and qzeros `[groups, out / 8]` holds eight
columns, column ORDER[i] in bits 4i to 4i + 3; w = (q - zero) · scale. A nibble becomes a 16-bit float without
conversion: put into the mantissa of 2¹⁰ (fp16) or 2⁷ (bf16), whose sum with it is exact.
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
from labkit_kernels.heuristics import INTERPRETER_SLOTS
from labkit_kernels.ops import capability

COLUMNS_OF_WORD = 8
GROUP_SIZES = (32, 64, 128)
DEQUANTISE_ROWS = 1024


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
        check_dtype("qzeros", self.qzeros, (torch.int32,))
        check_shape("qzeros", self.qzeros, (None, words))
        groups = self.qzeros.shape[0]
        check_dtype("scales", self.scales, (torch.float16, torch.bfloat16))
        check_shape("scales", self.scales, (groups, words * COLUMNS_OF_WORD))
        for name, tensor in (("qweight", self.qweight), ("qzeros", self.qzeros), ("scales", self.scales)):
            check_device(name, tensor, self.qweight.device)
            check_last_stride(name, tensor)
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
    """Rows, columns and inputs of a tile, parts of the input dimension (split-K), warps and stages."""

    rows: int
    columns: int
    inputs: int
    parts: int
    warps: int
    stages: int


def awq_tiling(arch: int, slots: int, rows: int, weight: AwqWeight) -> AwqTiling:
    """Small row counts split the inputs over programs until a card of `slots` multiprocessors is full."""
    inputs, columns = weight.qweight.shape[0], weight.scales.shape[1]
    step = next(size for size in (64, 32) if weight.group_size % size == 0)
    if rows <= 32:
        tile_rows, tile_columns, warps = max(16, triton.next_power_of_2(rows)), 64, 4
    elif rows <= 64:
        tile_rows, tile_columns, warps = 64, 128, 4
    else:
        tile_rows, tile_columns, warps = 128, 128, 8
    step = min(step, 32) if rows > 32 and arch < 90 else step
    tiles = triton.cdiv(rows, tile_rows) * triton.cdiv(columns, tile_columns)
    parts = 1
    while parts < 16 and tiles * parts < 3 * slots and inputs // (2 * parts * step) >= 4:
        parts *= 2
    return AwqTiling(tile_rows, tile_columns, step, parts, warps, 4 if rows <= 32 else 3)


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
def _awq_kernel(
    x, qweight, qzeros, scales, out, rows, columns, inputs, group, part_inputs, x_row, w_row, z_row, s_row, o_part,
    o_row, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INPUTS: tl.constexpr, HALF: tl.constexpr,
    SCALE_AFTER: tl.constexpr,
):  # fmt: skip
    """One tile of one part of the inputs; SCALE_AFTER: the group's scale multiplies the float32 product instead."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    word = tl.program_id(1) * (COLUMNS // 8) + tl.arange(0, COLUMNS // 8)
    there = word * 8 < columns
    start = tl.program_id(2) * part_inputs
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(start, min(start + part_inputs, inputs), INPUTS):
        k = first + tl.arange(0, INPUTS)
        x_at = (row.to(tl.int64) * x_row)[:, None] + k[None, :]
        a = tl.load(x + x_at, mask=(row < rows)[:, None], other=0.0)
        words = tl.load(qweight + (k.to(tl.int64) * w_row)[:, None] + word[None, :], mask=there[None, :], other=0)
        g = first // group + tl.arange(0, 1).to(tl.int64)
        zero_words = tl.load(qzeros + g * z_row + word, mask=there, other=0)
        scale = tl.load(scales + g * s_row + column, mask=column < columns, other=0.0)
        w = _nibbles(words, HALF) - _nibbles(zero_words[None, :], HALF)
        if SCALE_AFTER:
            total += tl.dot(a, w, out_dtype=tl.float32) * scale.to(tl.float32)[None, :]
        else:
            total = tl.dot(a, w * scale.to(w.dtype)[None, :], total, out_dtype=tl.float32)
    at = out + tl.program_id(2).to(tl.int64) * o_part + (row.to(tl.int64) * o_row)[:, None] + column[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (column < columns)[None, :])


@triton.jit
def _sum_parts_kernel(partial, out, total, columns, parts, o_row, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    y = tl.zeros([TILE], tl.float32)
    source = partial + at
    for _ in range(parts):
        y += tl.load(source, mask=at < total, other=0.0)
        source += total
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

    From 1024 tokens on the weights are unpacked once for torch's own product: 2 · in · out bytes for a moment. Raises
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


def _slots(device: torch.device) -> int:
    if device.type != "cuda":
        return INTERPRETER_SLOTS
    return torch.cuda.get_device_properties(device).multi_processor_count


def _launch(x: torch.Tensor, weight: AwqWeight, out: torch.Tensor) -> None:
    rows, inputs = x.shape
    columns = out.shape[1]
    tiling = awq_tiling(capability(x.device), _slots(x.device), rows, weight)
    part_inputs = triton.cdiv(inputs, tiling.parts * tiling.inputs) * tiling.inputs
    target = out
    if tiling.parts > 1:
        target = torch.empty(tiling.parts, rows, columns, dtype=torch.float32, device=x.device)
    _awq_kernel[(triton.cdiv(rows, tiling.rows), triton.cdiv(columns, tiling.columns), tiling.parts)](
        x, weight.qweight, weight.qzeros, weight.scales, target, rows, columns, inputs, weight.group_size, part_inputs,
        x.stride(0), weight.qweight.stride(0), weight.qzeros.stride(0), weight.scales.stride(0), rows * columns,
        target.stride(-2), ROWS=tiling.rows, COLUMNS=tiling.columns, INPUTS=tiling.inputs,
        HALF=x.dtype is torch.float16, SCALE_AFTER=tiling.rows <= 32, num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip
    if tiling.parts > 1:
        _sum_parts_kernel[(triton.cdiv(rows * columns, 512),)](
            target, out, rows * columns, columns, tiling.parts, out.stride(0), TILE=512, num_warps=2
        )
