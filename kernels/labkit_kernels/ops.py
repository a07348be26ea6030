"""Pieces that several kernels share: reading 8-bit caches, soft cap, block addresses, reading runtime facts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LOG2E = 1.4426950408889634


def interpreting() -> bool:
    """Whether kernels run in Triton's interpreter (inline assembly does not exist there)."""
    return bool(triton.knobs.runtime.interpret)


def capability(device: torch.device) -> int:
    """Compute capability as 90 for 9.0; 90 in the interpreter so that the same code is exercised."""
    if device.type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def overlaps_launches(device: torch.device) -> bool:
    """Whether a kernel can begin while the one before it still runs (programmatic dependent launch)."""
    return device.type == "cuda" and capability(device) >= 90


def overlap_options(device: torch.device) -> dict[str, bool]:
    """Compile-time switch and launch option of a kernel that calls `begin`."""
    return {"OVERLAP": True, "launch_pdl": True} if overlaps_launches(device) else {"OVERLAP": False}


@triton.jit
def begin(OVERLAP: tl.constexpr):
    """Lets the next launch begin and waits for the one before; nothing may be read or written earlier.

    Every program must call it: the end of a launch then stands for the end of all before it.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


def cache_kind(cache: torch.Tensor) -> str:
    """How the kernels read the cache: "native", "fp8", "int8" or "e4m3_bits"."""
    if cache.dtype is torch.int8:
        return "int8"
    if cache.dtype is torch.uint8:
        return "e4m3_bits"
    if cache.dtype is torch.float8_e4m3fn:
        return "fp8" if capability(cache.device) >= 89 else "e4m3_bits"
    return "fp8" if cache.dtype is torch.float8_e5m2 else "native"


def readable(cache: torch.Tensor, kind: str) -> torch.Tensor:
    """The cache as the kernel must see it: e4m3 as bytes where the card cannot convert it."""
    return cache.view(torch.uint8) if kind == "e4m3_bits" else cache


@triton.jit
def load_rows(ptr, offsets, mask, MASKED: tl.constexpr, EVICT: tl.constexpr):
    """A tile of the cache; a masked-out element is 0, since 0 times the NaN of an unwritten slot would be NaN."""
    if MASKED:
        return tl.load(ptr + offsets, mask=mask, other=0.0, eviction_policy=EVICT)
    return tl.load(ptr + offsets, eviction_policy=EVICT)


@triton.jit
def int8_to_fp16_asm(x):
    """Four int8 to four fp16 exactly: 0x6400 | (x ^ 0x80) is 1024 + (x + 128), then minus 1152."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 t, c;
        xor.b32 t, $2, 0x80808080;
        mov.b32 c, 0x64806480;
        prmt.b32 $0, t, 0x64646464, 0x4140;
        prmt.b32 $1, t, 0x64646464, 0x4342;
        sub.f16x2 $0, $0, c;
        sub.f16x2 $1, $1, c;
        }
        """,
        "=&r,=&r,r",
        [x],
        dtype=tl.float16,
        is_pure=True,
        pack=4,
    )


@triton.jit
def e4m3_to_fp16_asm(x):
    """Four e4m3 bytes to four fp16 of value · 2⁻⁸ exactly: sign kept, exponent and mantissa moved into place."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b, s, m;
        prmt.b32 a, $2, 0, 0x1404;
        prmt.b32 b, $2, 0, 0x3424;
        and.b32 s, a, 0x80008000;
        and.b32 m, a, 0x7f007f00;
        shr.u32 m, m, 1;
        or.b32 $0, s, m;
        and.b32 s, b, 0x80008000;
        and.b32 m, b, 0x7f007f00;
        shr.u32 m, m, 1;
        or.b32 $1, s, m;
        }
        """,
        "=&r,=&r,r",
        [x],
        dtype=tl.float16,
        is_pure=True,
        pack=4,
    )


@triton.jit
def e4m3_to_fp16_plain(x):
    """The same as `e4m3_to_fp16_asm` where there is no assembly."""
    bits = x.to(tl.uint16)
    return (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)


@triton.jit
def to_compute(x, fence, KIND: tl.constexpr, ASM: tl.constexpr):
    """A cache tile in the dtype of the matrix instruction: fp16 for 8-bit caches, unchanged otherwise.

    `fence` is a run-time fp16 factor. Without an operation between cast and dot, Triton carries the operand layout of
    the dot back to the load: 8-byte copies and byte-wide shared loads. It is 1, and for e4m3 kept as bits 2⁸.
    """
    y = x
    if KIND == "fp8" or (KIND == "int8" and not ASM):
        y = x.to(tl.float16) * fence
    elif KIND == "int8":
        y = int8_to_fp16_asm(x) * fence
    elif KIND == "e4m3_bits" and ASM:
        y = e4m3_to_fp16_asm(x) * fence
    elif KIND == "e4m3_bits":
        y = e4m3_to_fp16_plain(x) * fence
    return y


@triton.jit
def soft_cap(scores, softcap):
    """softcap · tanh(scores / softcap) with one exponential, for scores in natural-log units; safe at both ends."""
    return softcap * (1.0 - 2.0 / (tl.exp2(scores * (2.8853900817779268 / softcap)) + 1.0))


@triton.jit
def block_ids(table, start, offsets, end, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Block id of each token of the tile from `start`, a multiple of TILE; 0 past the last token's block.

    One id where a block holds the tile whole. Where blocks divide the tile, the tile's own part of the index is known
    at compile time, so that a thread reads an id once for all of its rows in that block.
    """
    if BLOCK_SIZE % TILE == 0:
        index = start // BLOCK_SIZE
    elif TILE % BLOCK_SIZE == 0:
        index = start // BLOCK_SIZE + offsets // BLOCK_SIZE
    else:
        index = (start + offsets) // BLOCK_SIZE
    return tl.load(table + index, mask=index < (end + BLOCK_SIZE - 1) // BLOCK_SIZE, other=0)


@triton.jit
def row_offsets(
    blocks, start, offsets, stride_block, stride_slot, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Element offset of each row of the tile from `start`; 64-bit, since pools go past 2³¹ elements."""
    first = blocks.to(tl.int64) * stride_block
    if BLOCK_SIZE % TILE == 0:
        first += tl.cast(start % BLOCK_SIZE, tl.int64) * stride_slot
        slot = offsets
    elif TILE % BLOCK_SIZE == 0:
        slot = offsets % BLOCK_SIZE
    else:
        slot = (start + offsets) % BLOCK_SIZE
    return first + slot.to(tl.int64) * stride_slot
