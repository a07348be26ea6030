"""x · Wᵀ for few rows of x, bound by reading W once: 16-bit weights, or e4m3 weights beside 16-bit activations.

One row: each warp walks along rows of W and adds products in float32. More rows: rows of W are the rows of the matrix
instruction and x its columns, the inputs split over programs until the card is full. Programs begin while the launch
before still runs, and ask the L2 for their first weights before they wait for x.

e4m3 weights are stored `interleaved`: of each 128 inputs, byte j of 32-bit word w is input 32 j + w, so that unpacking
words gives four tiles, each over neighbouring inputs. References: torch's product in float64, `interleave`.
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
from labkit_kernels.heuristics import num_slots
from labkit_kernels.launches import Launches
from labkit_kernels.ops import begin, capability, interpreting, overlap_options
from labkit_kernels.words import unpack, word_factor

BLOCK = 128
BLOCK_WORDS = tl.constexpr(32)
MAX_ROWS = 64
MAX_PARTS = 16
SUM_TILE = 256
MANY_COLUMNS = 16384
# Bytes of each row of W that a program asks the L2 for while the launch before still runs; more got in its way.
PREFETCH_BYTES = 128
ACTIVATIONS = (torch.float16, torch.bfloat16)
_LAUNCHES = Launches()


def interleave(weight: torch.Tensor) -> torch.Tensor:
    """`[out, in]` of one byte a number in the order of inputs above; `in` must be a multiple of 128. A copy."""
    return weight.reshape(weight.shape[0], -1, 4, 32).transpose(2, 3).reshape(weight.shape).contiguous()


def deinterleave(weight: torch.Tensor) -> torch.Tensor:
    """What `interleave` was given."""
    return weight.reshape(weight.shape[0], -1, 32, 4).transpose(2, 3).reshape(weight.shape).contiguous()


@triton.jit
def _prefetch(pointers, BYTES: tl.constexpr):
    """Asks the L2 for BYTES (a multiple of 16) at each pointer."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r",
        [pointers.to(tl.int64), tl.full(pointers.shape, BYTES, tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def begin_fetching(pointers, PREFETCH: tl.constexpr, OVERLAP: tl.constexpr):
    """Lets the next launch begin, asks for the first weights, then waits until x has been written."""
    if OVERLAP and PREFETCH > 0:
        tl.extra.cuda.gdc_launch_dependents()
        _prefetch(pointers, PREFETCH)
    begin(OVERLAP)


@triton.jit
def _unpack_bfloat(x):
    """Four bf16 tiles from e4m3 words, exactly: exponent and mantissa moved into place are the value · 2⁻¹²⁰."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b, s, t, f, z;
        mov.b32 f, 0x7b807b80;
        mov.b32 z, 0x80008000;
        prmt.b32 a, $4, $5, 0x5140;
        prmt.b32 b, $4, $5, 0x7362;
        prmt.b32 s, a, 0, 0x1404;
        shr.u32 t, s, 4;
        and.b32 s, s, z;
        lop3.b32 t, t, 0x07f007f0, s, 0xea;
        fma.rn.bf16x2 $0, t, f, z;
        prmt.b32 s, a, 0, 0x3424;
        shr.u32 t, s, 4;
        and.b32 s, s, z;
        lop3.b32 t, t, 0x07f007f0, s, 0xea;
        fma.rn.bf16x2 $1, t, f, z;
        prmt.b32 s, b, 0, 0x1404;
        shr.u32 t, s, 4;
        and.b32 s, s, z;
        lop3.b32 t, t, 0x07f007f0, s, 0xea;
        fma.rn.bf16x2 $2, t, f, z;
        prmt.b32 s, b, 0, 0x3424;
        shr.u32 t, s, 4;
        and.b32 s, s, z;
        lop3.b32 t, t, 0x07f007f0, s, 0xea;
        fma.rn.bf16x2 $3, t, f, z;
        }
        """,
        "=&r,=&r,=&r,=&r,r,r",
        [x],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def _inputs_of_words(first, j, WORDS: tl.constexpr):
    """Input that byte j of each of the WORDS words from input `first` on stands for."""
    w = tl.arange(0, WORDS)
    return first + w // BLOCK_WORDS * 128 + w % BLOCK_WORDS + 32 * j


@triton.jit
def _in_order(w0, w1, w2, w3, COLUMNS: tl.constexpr, INPUTS: tl.constexpr):
    """`[columns, inputs]` from the four tiles of words, an order of registers: one product instead of four that wait
    for each other."""
    tiles = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [COLUMNS, INPUTS // 128, 32, 2, 2])
    return tl.reshape(tl.permute(tiles, (0, 1, 3, 4, 2)), [COLUMNS, INPUTS])


@triton.jit
def _one_row_kernel(
    x, weight, scale, bias, out, columns, inputs, w_row, s_column, factor,
    KIND: tl.constexpr, COLUMNS: tl.constexpr, INPUTS: tl.constexpr, BIAS: tl.constexpr, PREFETCH: tl.constexpr,
    OVERLAP: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    w = weight + tl.minimum(column, columns - 1).to(tl.int64) * w_row
    begin_fetching(w, PREFETCH, OVERLAP)
    if KIND == "native":
        total = tl.zeros([COLUMNS, INPUTS], tl.float32)
        for first in range(0, inputs, INPUTS):
            k = first + tl.arange(0, INPUTS)
            there = k < inputs
            a = tl.load(w[:, None] + k[None, :], mask=there[None, :], other=0.0, eviction_policy="evict_first")
            total += a.to(tl.float32) * tl.load(x + k, mask=there, other=0.0).to(tl.float32)[None, :]
    else:
        total = tl.zeros([COLUMNS, INPUTS // 4], tl.float32)
        for first in range(0, inputs, INPUTS):
            at = first // 4 + tl.arange(0, INPUTS // 4)
            there = at < inputs // 4
            words = tl.load(w[:, None] + at[None, :], mask=there[None, :], other=0, eviction_policy="evict_first")
            w0, w1, w2, w3 = unpack(words, KIND, ASM)
            x0 = tl.load(x + _inputs_of_words(first, 0, INPUTS // 4), mask=there, other=0.0).to(tl.float32)
            x1 = tl.load(x + _inputs_of_words(first, 1, INPUTS // 4), mask=there, other=0.0).to(tl.float32)
            x2 = tl.load(x + _inputs_of_words(first, 2, INPUTS // 4), mask=there, other=0.0).to(tl.float32)
            x3 = tl.load(x + _inputs_of_words(first, 3, INPUTS // 4), mask=there, other=0.0).to(tl.float32)
            total += w0.to(tl.float32) * x0[None, :]
            total += w1.to(tl.float32) * x1[None, :]
            total += w2.to(tl.float32) * x2[None, :]
            total += w3.to(tl.float32) * x3[None, :]
    y = tl.sum(total, 1)
    there = column < columns
    if KIND != "native":
        y *= tl.load(scale + column * s_column, mask=there, other=0.0) * factor
    if BIAS:
        y += tl.load(bias + column, mask=there, other=0.0).to(tl.float32)
    tl.store(out + column, y.to(out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["rows"])
def _few_rows_kernel(
    x, weight, scale, bias, out, rows, columns, inputs, part_inputs, x_row, w_row, s_column, o_part, o_row, factor,
    KIND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INPUTS: tl.constexpr, BIAS: tl.constexpr,
    PREFETCH: tl.constexpr, OVERLAP: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """One tile of one part of the inputs; `inputs` is a multiple of INPUTS."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    start = tl.program_id(1) * part_inputs
    end = tl.minimum(start + part_inputs, inputs)
    w = weight + tl.minimum(column, columns - 1).to(tl.int64) * w_row
    row = tl.arange(0, ROWS)
    here = (row < rows)[None, :]
    xs = x + (row * x_row)[None, :]
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    if KIND == "native":
        begin_fetching(w + start, PREFETCH, OVERLAP)
        for first in range(start, end, INPUTS):
            k = first + tl.arange(0, INPUTS)
            a = tl.load(w[:, None] + k[None, :], eviction_policy="evict_first")
            total = tl.dot(a, tl.load(xs + k[:, None], mask=here, other=0.0), total)
    else:
        begin_fetching(w + start // 4, PREFETCH, OVERLAP)
        for first in range(start, end, INPUTS):
            at = first // 4 + tl.arange(0, INPUTS // 4)
            words = tl.load(w[:, None] + at[None, :], eviction_policy="evict_first")
            if ASM and x.dtype.element_ty == tl.bfloat16:
                w0, w1, w2, w3 = _unpack_bfloat(words)
            else:
                w0, w1, w2, w3 = unpack(words, KIND, ASM)
            k = first + tl.arange(0, INPUTS)
            a = _in_order(w0, w1, w2, w3, COLUMNS, INPUTS)
            total = tl.dot(a, tl.load(xs + k[:, None], mask=here, other=0.0), total)
    there = column < columns
    if KIND != "native":
        total *= (tl.load(scale + column * s_column, mask=there, other=0.0) * factor)[:, None]
    if BIAS:
        total += tl.load(bias + column, mask=there, other=0.0).to(tl.float32)[:, None]
    at = out + tl.program_id(1).to(tl.int64) * o_part + (row * o_row)[None, :] + column[:, None]
    tl.store(at, total.to(out.dtype.element_ty), mask=here & there[:, None])


@triton.jit
def _sum_parts_kernel(
    partial, bias, out, total, columns, o_row,
    PARTS: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr, BIAS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    begin(OVERLAP)
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    part = tl.arange(0, PADDED).to(tl.int64)
    there = (part < PARTS)[:, None] & (at < total)[None, :]
    y = tl.sum(tl.load(partial + (part * total)[:, None] + at[None, :], mask=there, other=0.0), 0)
    column = at % columns
    if BIAS:
        y += tl.load(bias + column, mask=at < total, other=0.0).to(tl.float32)
    tl.store(out + at // columns * o_row + column, y.to(out.dtype.element_ty), mask=at < total)


def sum_parts(partial: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """Sum over the first axis of float32 `[parts, rows, columns]`, plus a bias `[columns]`, in a fixed order."""
    parts, rows, columns = partial.shape
    _sum_parts_kernel[(triton.cdiv(rows * columns, SUM_TILE),)](
        partial, out if bias is None else bias, out, rows * columns, columns, out.stride(0), PARTS=parts,
        PADDED=triton.next_power_of_2(parts), TILE=SUM_TILE, BIAS=bias is not None, num_warps=2,
        **overlap_options(out.device),
    )  # fmt: skip


@dataclass(frozen=True)
class FewRowsConfig:
    """Settings of the product: columns of out and inputs of a step of a program; programs of one multiprocessor at
    once, which the split of the inputs aims at."""

    columns: int
    inputs: int
    warps: int = 4
    stages: int = 4
    ctas_per_sm: int = 2


def few_rows_config(rows: int, columns: int, inputs: int, itemsize: int) -> FewRowsConfig:
    """Settings for W `[columns, inputs]` of `itemsize` bytes a number, as measured on an H200."""
    if rows == 1:
        # Each warp reads 1 KiB of a row of W at a time.
        num_bytes, warps = (1024, 2) if inputs <= 1024 else (2048, 4)
        return FewRowsConfig(4, num_bytes // itemsize, warps, 1)
    if itemsize == 2:
        return FewRowsConfig(64, 128)
    return FewRowsConfig(128, 128) if rows > 16 or columns > MANY_COLUMNS else FewRowsConfig(64, 256)


def even_parts(slots: int, tiles: int, steps: int) -> int:
    """Parts of the inputs such that all programs run at once and the longest is as short as that allows."""
    most = max(1, min(MAX_PARTS, steps, slots // tiles))
    return triton.cdiv(steps, triton.cdiv(steps, most))


def can_prefetch(weight: torch.Tensor) -> bool:
    """Whether rows are long enough and begin where the L2 takes requests, at whole 16 bytes."""
    row_bytes = weight.stride(0) * weight.element_size()
    return row_bytes % 16 == 0 and row_bytes >= PREFETCH_BYTES and weight.data_ptr() % 16 == 0


def _check(x, weight, scale, bias, out) -> torch.Tensor:
    check_dtype("x", x, ACTIVATIONS)
    check_dtype("weight", weight, (x.dtype, torch.float8_e4m3fn, torch.uint8))
    check_shape("weight", weight, (None, None))
    columns, inputs = weight.shape
    check_shape("x", x, (None, inputs))
    check_device("weight", weight, x.device)
    check_last_stride("x", x)
    check_last_stride("weight", weight)
    if not 1 <= x.shape[0] <= MAX_ROWS:
        raise KernelValueError(f"x has {x.shape[0]} rows; works: 1 to {MAX_ROWS}")
    if columns == 0 or inputs == 0 or (inputs % BLOCK and (scale is not None or x.shape[0] > 1)):
        raise KernelValueError(
            f"weight has shape {(columns, inputs)}; inputs must be a multiple of {BLOCK}, but for one row of 16 bits"
        )
    if (weight.element_size() == 1) != (scale is not None):
        raise KernelValueError(f"scale must be given with 8-bit weights and only with them; weight is {weight.dtype}")
    if scale is not None:
        check_dtype("scale", scale, (torch.float32,))
        check_device("scale", scale, x.device)
        check_shape("scale", scale, (columns if scale.shape[0] != 1 else 1, 1))
    if bias is not None:
        check_dtype("bias", bias, (x.dtype,))
        check_device("bias", bias, x.device)
        check_shape("bias", bias, (columns,))
    out = torch.empty(x.shape[0], columns, dtype=x.dtype, device=x.device) if out is None else out
    check_out("out", out, (x.shape[0], columns), x.dtype, x.device)
    return out


def few_rows_matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    config: FewRowsConfig | None = None,
) -> torch.Tensor:
    """x `[rows, in]` (1 to 64 rows) · weightᵀ + bias `[out]`: `[rows, out]`, summed in float32 in a fixed order.

    weight `[out, in]`: in the dtype of x, or e4m3 `interleave`d with `scale` float32 `[out, 1]` or `[1, 1]`; `in` is a
    multiple of 128, but for one row and 16 bits. Raises KernelValueError or KernelTypeError naming the argument.
    """
    if x.ndim == weight.ndim == 2 and x.shape[0] == 1:
        out = torch.empty(1, weight.shape[0], dtype=x.dtype, device=x.device) if out is None else out
        if _LAUNCHES.again((x, weight, scale, bias, out), config):
            return out
    out = _check(x, weight, scale, bias, out)
    pointers, settings = (x, weight, scale, bias, out), (config,)
    (rows, inputs), columns = x.shape, weight.shape[0]
    config = few_rows_config(rows, columns, inputs, weight.element_size()) if config is None else config
    kind, asm = "native", not interpreting()
    if scale is not None:
        kind = "e4m3" if capability(x.device) >= 89 else "e4m3_bits"
        weight = weight.view(torch.int32)
    facts = (x, weight, weight if scale is None else scale, x if bias is None else bias)
    options = {"ASM": asm, "KIND": kind, "num_warps": config.warps, "num_stages": config.stages}
    options |= overlap_options(x.device)
    s_column = int(scale is not None and scale.shape[0] > 1)
    options["PREFETCH"] = PREFETCH_BYTES if can_prefetch(weight) else 0
    if rows == 1:
        _LAUNCHES.first(
            pointers, settings, _one_row_kernel, (triton.cdiv(columns, config.columns),),
            *facts, out, columns, inputs, weight.stride(0), s_column, word_factor(kind, asm), COLUMNS=config.columns,
            INPUTS=config.inputs, BIAS=bias is not None, **options,
        )  # fmt: skip
        return out
    step = config.inputs if inputs % config.inputs == 0 else BLOCK
    tiles = triton.cdiv(columns, config.columns)
    parts = even_parts(num_slots(x.device, config), tiles, inputs // step)
    part_inputs = triton.cdiv(inputs // step, parts) * step
    target = torch.empty(parts, rows, columns, dtype=torch.float32, device=x.device) if parts > 1 else out[None]
    # bf16 words are unpacked to the value itself, others as `unpack` says.
    factor = 1.0 if asm and x.dtype is torch.bfloat16 else word_factor(kind, asm)
    _few_rows_kernel[(tiles, parts)](
        *facts, target, rows, columns, inputs, part_inputs, x.stride(0), weight.stride(0), s_column, target.stride(0),
        target.stride(1), factor, ROWS=max(16, triton.next_power_of_2(rows)), COLUMNS=config.columns, INPUTS=step,
        BIAS=bias is not None and parts == 1, **options,
    )  # fmt: skip
    if parts > 1:
        sum_parts(target, out, bias)
    return out
