"""8-bit caches read as 32-bit words: four neighbouring head dimensions of a token in one register.

A tile of words loads from shared memory straight into the operand layout of the matrix instruction and is unpacked in
registers there: word w gives the dimensions 4w + j as the four fp16 tiles j = 0 … 3. Unpacking two words together
leaves each output pair where the instruction wants it. Nothing is written back to shared memory, unlike a cast before
`tl.dot`, which costs two more passes over the tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

WORD = 4


def as_words(cache: torch.Tensor) -> torch.Tensor | None:
    """`[…, D / 4]` int32 over the same memory, or None where strides or the offset are not multiples of four bytes."""
    aligned = all(stride % WORD == 0 for stride in cache.stride()[:-1]) and cache.data_ptr() % WORD == 0
    if cache.element_size() != 1 or cache.shape[-1] % WORD or not aligned:
        return None
    return cache.view(torch.int32)


@triton.jit
def _unpack_e4m3(x):
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b;
        .reg .b16 l, h;
        prmt.b32 a, $4, $5, 0x5140;
        prmt.b32 b, $4, $5, 0x7362;
        mov.b32 {l, h}, a;
        cvt.rn.f16x2.e4m3x2 $0, l;
        cvt.rn.f16x2.e4m3x2 $1, h;
        mov.b32 {l, h}, b;
        cvt.rn.f16x2.e4m3x2 $2, l;
        cvt.rn.f16x2.e4m3x2 $3, h;
        }
        """,
        "=&r,=&r,=&r,=&r,r,r",
        [x],
        dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def _unpack_e5m2(x):
    """e5m2 is the upper byte of fp16."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b;
        prmt.b32 a, $4, $5, 0x5140;
        prmt.b32 b, $4, $5, 0x7362;
        prmt.b32 $0, a, 0, 0x1404;
        prmt.b32 $1, a, 0, 0x3424;
        prmt.b32 $2, b, 0, 0x1404;
        prmt.b32 $3, b, 0, 0x3424;
        }
        """,
        "=&r,=&r,=&r,=&r,r,r",
        [x],
        dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def _unpack_int8(x):
    """0x6400 | (x ^ 0x80) is the fp16 number 1152 + x."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b, c;
        prmt.b32 a, $4, $5, 0x5140;
        prmt.b32 b, $4, $5, 0x7362;
        xor.b32 a, a, 0x80808080;
        xor.b32 b, b, 0x80808080;
        mov.b32 c, 0x64806480;
        prmt.b32 $0, a, 0x64646464, 0x4140;
        prmt.b32 $1, a, 0x64646464, 0x4342;
        prmt.b32 $2, b, 0x64646464, 0x4140;
        prmt.b32 $3, b, 0x64646464, 0x4342;
        sub.f16x2 $0, $0, c;
        sub.f16x2 $1, $1, c;
        sub.f16x2 $2, $2, c;
        sub.f16x2 $3, $3, c;
        }
        """,
        "=&r,=&r,=&r,=&r,r,r",
        [x],
        dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def _unpack_e4m3_bits(x):
    """e4m3 by bits for cards that cannot convert it: value · 2⁻⁸, exact."""
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b, s0, s1, s2, s3, t;
        prmt.b32 a, $4, $5, 0x5140;
        prmt.b32 b, $4, $5, 0x7362;
        prmt.b32 s0, a, 0, 0x1404;
        prmt.b32 s1, a, 0, 0x3424;
        prmt.b32 s2, b, 0, 0x1404;
        prmt.b32 s3, b, 0, 0x3424;
        shr.u32 t, s0, 1;
        and.b32 t, t, 0x3f803f80;
        and.b32 s0, s0, 0x80008000;
        or.b32 $0, s0, t;
        shr.u32 t, s1, 1;
        and.b32 t, t, 0x3f803f80;
        and.b32 s1, s1, 0x80008000;
        or.b32 $1, s1, t;
        shr.u32 t, s2, 1;
        and.b32 t, t, 0x3f803f80;
        and.b32 s2, s2, 0x80008000;
        or.b32 $2, s2, t;
        shr.u32 t, s3, 1;
        and.b32 t, t, 0x3f803f80;
        and.b32 s3, s3, 0x80008000;
        or.b32 $3, s3, t;
        }
        """,
        "=&r,=&r,=&r,=&r,r,r",
        [x],
        dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def _plain_byte(x, J: tl.constexpr, KIND: tl.constexpr):
    """Byte J of each word as fp16 without assembly: value · 2⁻⁸ for e4m3, the value otherwise."""
    bits = (x >> (8 * J)) & 0xFF
    if KIND == "int8":
        y = (((bits ^ 0x80) - 128).to(tl.float32)).to(tl.float16)
    elif KIND == "e5m2":
        y = (bits << 8).to(tl.uint16).to(tl.float16, bitcast=True)
    else:
        y = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.uint16).to(tl.float16, bitcast=True)
    return y


@triton.jit
def unpack(x, KIND: tl.constexpr, ASM: tl.constexpr):
    """Four fp16 tiles from a tile of words; `word_factor` says what they must still be multiplied by."""
    if not ASM:
        y = (_plain_byte(x, 0, KIND), _plain_byte(x, 1, KIND), _plain_byte(x, 2, KIND), _plain_byte(x, 3, KIND))
    elif KIND == "int8":
        y = _unpack_int8(x)
    elif KIND == "e5m2":
        y = _unpack_e5m2(x)
    elif KIND == "e4m3":
        y = _unpack_e4m3(x)
    else:
        y = _unpack_e4m3_bits(x)
    return y


def word_factor(kind: str, asm: bool) -> float:
    """What `unpack`'s numbers must be multiplied by: 2⁸ for e4m3 read by bits."""
    return 256.0 if kind == "e4m3_bits" or (kind == "e4m3" and not asm) else 1.0


def word_kind(cache: torch.Tensor, kind: str) -> str:
    """Number format of an 8-bit cache as `unpack` names it, from its dtype and how its card reads it."""
    if kind == "fp8":
        return "e5m2" if cache.dtype is torch.float8_e5m2 else "e4m3"
    return kind
