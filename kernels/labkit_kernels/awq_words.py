"""x · Wᵀ with 4-bit AWQ weights kept as words along the inputs, for Hopper's wide matrix instruction; to 256 rows.

AutoAWQ's words lie along the outputs (`awq_matmul`). Here they are turned once, when a model is loaded: of each 128
inputs, word w of an output holds inputs 16 j + w as its columns j = 0 … 7, in AWQ's order of nibbles. So eight tiles of
one output after another meet neighbouring inputs, a group of inputs has one scale for a row of the product, and words
become operands in registers: q - zero by `lop3` and one subtraction. Reference: `reference_ops.awq_dequantise`.
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
from labkit_kernels.few_rows import MANY_COLUMNS, begin_fetching, can_prefetch, even_parts, sum_parts
from labkit_kernels.heuristics import num_slots
from labkit_kernels.nibbles import PER_WORD, SHIFTS, check_groups, unpack_nibbles
from labkit_kernels.ops import interpreting, overlap_options

BLOCK = 128
MAX_ROWS = 256
COLUMNS_AT_ONCE = 4096
# Bytes of a block of 128 inputs, of which each output's first is asked for while the launch before still runs.
PREFETCH_BYTES = 64


@dataclass(frozen=True)
class AwqWords:
    """words int32 `[out, in / 8]` of `turn_words`; qzeros int32 `[groups, out / 8]` and scales fp16 or bf16
    `[groups, out]` as AutoAWQ has them."""

    words: torch.Tensor
    qzeros: torch.Tensor
    scales: torch.Tensor

    def __post_init__(self) -> None:
        """Raises KernelValueError or KernelTypeError naming the bad tensor."""
        check_dtype("words", self.words, (torch.int32,))
        check_shape("words", self.words, (None, None))
        columns, inputs = self.shape
        check_groups("words", self.words, self.qzeros, self.scales, columns)
        groups = self.qzeros.shape[0]
        if not takes_groups(inputs, groups) or columns == 0 or columns % PER_WORD:
            raise KernelValueError(
                f"words has {columns} outputs of {inputs} inputs in {groups} groups; outputs must be a multiple of "
                f"{PER_WORD}, inputs of {BLOCK}, and so the inputs of a group"
            )

    @property
    def shape(self) -> tuple[int, int]:
        """`(out, in)`."""
        return self.words.shape[0], self.words.shape[1] * PER_WORD

    @property
    def group_size(self) -> int:
        """Inputs of a group."""
        return self.shape[1] // self.qzeros.shape[0]


def takes_groups(inputs: int, groups: int) -> bool:
    """Whether so many inputs in so many groups can be kept as words along the inputs."""
    return groups > 0 and inputs > 0 and inputs % groups == 0 and inputs // groups % BLOCK == 0


def turn_words(qweight: torch.Tensor) -> torch.Tensor:
    """AutoAWQ's qweight int32 `[in, out / 8]` as int32 `[out, in / 8]`, of the same memory; a copy.

    Needs some memory beside it, 24 bytes for each word of 4,096 outputs.
    """
    inputs, words = qweight.shape
    out = torch.empty(words * PER_WORD, inputs // PER_WORD, dtype=torch.int32, device=qweight.device)
    for first in range(0, words, COLUMNS_AT_ONCE // PER_WORD):
        part = qweight[:, first : first + COLUMNS_AT_ONCE // PER_WORD]
        nibbles = torch.stack([((part >> shift) & 0xF).to(torch.uint8) for shift in SHIFTS], -1).flatten(1)
        nibbles = nibbles.t().reshape(nibbles.shape[1], -1, PER_WORD, 16)
        turned = torch.zeros(nibbles.shape[0], nibbles.shape[1], 16, dtype=torch.int32, device=qweight.device)
        for j, shift in enumerate(SHIFTS):
            turned |= nibbles[:, :, j].int() << shift
        at = first * PER_WORD
        out[at : at + turned.shape[0]] = turned.flatten(1)
    return out


def turn_back(words: torch.Tensor) -> torch.Tensor:
    """What `turn_words` was given."""
    columns, blocks = words.shape[0], words.shape[1] // 16
    parts = words.reshape(columns, blocks, 1, 16)
    nibbles = torch.cat([(parts >> shift) & 0xF for shift in SHIFTS], 2)
    nibbles = nibbles.reshape(columns, -1).t().reshape(-1, columns // PER_WORD, PER_WORD)
    out = torch.zeros_like(nibbles[:, :, 0])
    for j, shift in enumerate(SHIFTS):
        out |= nibbles[:, :, j] << shift
    return out


@triton.jit
def _in_order(tiles, COLUMNS: tl.constexpr):
    """`[columns, 128]` from the eight tiles of a block, an order of registers: one product instead of eight that wait
    for each other."""
    w0, w1, w2, w3, w4, w5, w6, w7 = tiles
    even, odd = tl.join(tl.join(w0, w4), tl.join(w2, w6)), tl.join(tl.join(w1, w5), tl.join(w3, w7))
    return tl.reshape(tl.permute(tl.join(even, odd), (0, 2, 3, 4, 1)), [COLUMNS, 128])


@triton.jit
def _group(qzeros, scales, g, z_row, s_row, column):
    """Zero point and scale of each column in group g."""
    g = g.to(tl.int64)
    shift = column % 8 // 2 * 4 + column % 2 * 16
    return (tl.load(qzeros + g * z_row + column // 8) >> shift) & 0xF, tl.load(scales + g * s_row + column)


@triton.jit(do_not_specialize=["rows", "blocks", "part_blocks"])
def _words_kernel(
    x, words, qzeros, scales, out, rows, columns, blocks, group_blocks, part_blocks, x_row, w_row, z_row, s_row, o_part,
    o_row, ROWS: tl.constexpr, COLUMNS: tl.constexpr, HALF: tl.constexpr, ASM: tl.constexpr, SCALED: tl.constexpr,
    PREFETCH: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One tile of one part of the inputs: outputs are the rows of the matrix instruction, rows of x its columns.

    SCALED: weights are multiplied by their scale before the product, in 16 bits as `words_dequantise` has them, since
    registers hold one tile of sums but not two.
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    near = tl.minimum(column, columns - 1)
    start = tl.program_id(1) * part_blocks
    last = tl.minimum(start + part_blocks, blocks) - 1
    w = words + near.to(tl.int64) * w_row
    begin_fetching(w + start * 16, PREFETCH, OVERLAP)
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    here = (row < rows)[None, :]
    xs = x + (row * x_row)[None, :] + tl.arange(0, 128)[:, None]
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    zero, scale = _group(qzeros, scales, start // group_blocks, z_row, s_row, near)
    # Blocks of 128 inputs are counted, not inputs: of an input over 8 the compiler does not see that it is a multiple
    # of 16, and copies 8 bytes at a time.
    for block in range(start, last + 1):
        # One step ahead: nothing else waits for the memory here.
        next_zero, next_scale = _group(qzeros, scales, tl.minimum(block + 1, last) // group_blocks, z_row, s_row, near)
        packed = tl.load(w[:, None] + (block * 16 + tl.arange(0, 16))[None, :])
        weights = _in_order(unpack_nibbles(packed, zero[:, None], HALF, ASM), COLUMNS)
        rows_of_x = tl.load(xs + block * 128, mask=here, other=0.0)
        if SCALED:
            total = tl.dot(weights * scale.to(weights.dtype)[:, None], rows_of_x, total)
        else:
            total += tl.dot(weights, rows_of_x, out_dtype=tl.float32) * scale.to(tl.float32)[:, None]
        zero, scale = next_zero, next_scale
    at = out + tl.program_id(1).to(tl.int64) * o_part + (row.to(tl.int64) * o_row)[None, :] + column[:, None]
    tl.store(at, total.to(out.dtype.element_ty), mask=here & (column < columns)[:, None])


@triton.jit
def _undo(out, w, scale, first, J: tl.constexpr):
    """Stores one of the eight tiles of q - zero, times the scale, where its inputs lie."""
    at = first + 16 * J + tl.arange(0, 16)
    tl.store(out + at[None, :], w * scale[:, None])


@triton.jit
def _dequantise_kernel(
    words, qzeros, scales, out, inputs, group, w_row, z_row, s_row, COLUMNS: tl.constexpr, HALF: tl.constexpr
):  # fmt: skip
    first = tl.program_id(0) * 128
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    zero, scale = _group(qzeros, scales, first // group, z_row, s_row, column)
    packed = tl.load(words + (column.to(tl.int64) * w_row)[:, None] + (first // 8 + tl.arange(0, 16))[None, :])
    w0, w1, w2, w3, w4, w5, w6, w7 = unpack_nibbles(packed, zero[:, None], HALF, False)
    scale = scale.to(out.dtype.element_ty)
    rows = out + (column.to(tl.int64) * inputs)[:, None]
    _undo(rows, w0, scale, first, 0)
    _undo(rows, w1, scale, first, 1)
    _undo(rows, w2, scale, first, 2)
    _undo(rows, w3, scale, first, 3)
    _undo(rows, w4, scale, first, 4)
    _undo(rows, w5, scale, first, 5)
    _undo(rows, w6, scale, first, 6)
    _undo(rows, w7, scale, first, 7)


def words_dequantise(weight: AwqWords, dtype: torch.dtype) -> torch.Tensor:
    """The weights `[out, in]` in fp16 or bf16, scale and product rounded to it."""
    check_dtype("out", torch.empty(0, dtype=dtype), (torch.float16, torch.bfloat16))
    columns, inputs = weight.shape
    out = torch.empty(columns, inputs, dtype=dtype, device=weight.words.device)
    _dequantise_kernel[(inputs // BLOCK, columns // PER_WORD)](
        weight.words, weight.qzeros, weight.scales, out, inputs, weight.group_size, weight.words.stride(0),
        weight.qzeros.stride(0), weight.scales.stride(0), COLUMNS=PER_WORD, HALF=dtype is torch.float16,
        num_warps=1,
    )  # fmt: skip
    return out


@dataclass(frozen=True)
class WordsConfig:
    """Outputs and rows of x of a program, and programs of one multiprocessor at once, which the split of the inputs
    aims at; whether weights are multiplied by their scale before the product."""

    columns: int = 128
    rows: int = 16
    warps: int = 4
    stages: int = 3
    ctas_per_sm: int = 3
    is_scaled: bool = False


def words_config(rows: int, columns: int) -> WordsConfig:
    """Settings for `columns` outputs as measured on an H200. Two warps take HMMA, whose product of 8 or 16 rows is
    shorter than WGMMA's."""
    if rows <= 8 or (rows <= 16 and columns > MANY_COLUMNS):
        return WordsConfig(columns=64, rows=8 if rows <= 8 else 16, warps=2, ctas_per_sm=8)
    if rows <= 64:
        return WordsConfig(rows=max(16, triton.next_power_of_2(rows)), ctas_per_sm=3 if rows <= 32 else 2)
    return WordsConfig(columns=256, rows=128, warps=8, ctas_per_sm=1, is_scaled=True)


def words_matmul(
    x: torch.Tensor, weight: AwqWords, *, out: torch.Tensor | None = None, config: WordsConfig | None = None
) -> torch.Tensor:
    """x `[tokens, in]` in fp16 or bf16 times the 4-bit weights: `[tokens, out]`, summed in float32 in a fixed order.

    From 257 tokens on the weights are unpacked once for torch's own product: 2 · in · out bytes for a moment. Raises
    KernelValueError or KernelTypeError naming the argument.
    """
    check_dtype("x", x, (torch.float16, torch.bfloat16))
    check_shape("x", x, (None, weight.shape[1]))
    check_device("x", x, weight.words.device)
    check_last_stride("x", x)
    rows, columns = x.shape[0], weight.shape[0]
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device) if out is None else out
    check_out("out", out, (rows, columns), x.dtype, x.device)
    if rows > MAX_ROWS:
        return torch.mm(x, words_dequantise(weight, x.dtype).t(), out=out)
    if rows > 0:
        _launch(x, weight, out, words_config(rows, columns) if config is None else config)
    return out


def _launch(x: torch.Tensor, weight: AwqWords, out: torch.Tensor, config: WordsConfig) -> None:
    rows, (columns, inputs) = x.shape[0], weight.shape
    tiles, row_tiles, blocks = triton.cdiv(columns, config.columns), triton.cdiv(rows, config.rows), inputs // BLOCK
    parts = even_parts(num_slots(x.device, config), tiles * row_tiles, blocks)
    target = torch.empty(parts, rows, columns, dtype=torch.float32, device=x.device) if parts > 1 else out[None]
    _words_kernel[(tiles, parts, row_tiles)](
        x, weight.words, weight.qzeros, weight.scales, target, rows, columns, blocks, weight.group_size // BLOCK,
        triton.cdiv(blocks, parts), x.stride(0), weight.words.stride(0), weight.qzeros.stride(0),
        weight.scales.stride(0), target.stride(0), target.stride(1), ROWS=config.rows, COLUMNS=config.columns,
        HALF=x.dtype is torch.float16, ASM=not interpreting(), SCALED=config.is_scaled,
        PREFETCH=PREFETCH_BYTES if can_prefetch(weight.words) else 0, num_warps=config.warps, num_stages=config.stages,
        **overlap_options(x.device),
    )  # fmt: skip
    if parts > 1:
        sum_parts(target, out)
