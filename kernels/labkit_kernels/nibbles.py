"""4-bit numbers unpacked in registers: word w of a tile of words gives entry w of eight 16-bit tiles.

As in `words`, a tile of words loads into the operand layout of the matrix instruction and is unpacked there, two words
together. A nibble needs no conversion: put into the mantissa of 2¹⁰ (fp16) or 2⁷ (bf16) it gives the number 2¹⁰ + q or
2⁷ + q, from which the same number with the zero point in it is taken away, exactly.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from labkit_kernels.checks import check_device, check_dtype, check_last_stride, check_shape

PER_WORD = 8
# Bits of column j of the eight of a word begin at SHIFTS[j].
SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)
CONSTRAINTS = tl.constexpr(",".join(["=&r"] * PER_WORD + ["r"] * 3))
CENTRED_CONSTRAINTS = tl.constexpr(",".join(["=&r"] * PER_WORD + ["r"] * 2))


def _assembly(power: str, subtract: str, zero: str = "$10") -> str:
    """PTX for words $8 and $9, in 16-bit pairs: `power` is 2¹⁰ or 2⁷, from which `zero` is taken away by `subtract`."""
    lines = ["{", ".reg .b32 l, h, o, z;", "mov.b32 o, 0x3f803f80;", f"mov.b32 z, {zero};"]
    lines += ["prmt.b32 l, $8, $9, 0x5410;", "prmt.b32 h, $8, $9, 0x7632;"]
    for first in range(0, PER_WORD, 2):
        if first:
            lines += ["shr.u32 l, l, 4;", "shr.u32 h, h, 4;"]
        lines += [f"lop3.b32 ${first + i}, {half}, 0x000f000f, {power}, 0xea;" for i, half in enumerate("lh")]
    lines += [subtract.format(f"${i}") for i in range(PER_WORD)]
    return "\n".join([*lines, "}"])


# bf16 by a multiply-add, which sm_80 has too: o is 1, and z negative.
_HALF, _BFLOAT = ("0x64006400", "sub.f16x2 {0}, {0}, z;"), ("0x43004300", "fma.rn.bf16x2 {0}, {0}, o, z;")
HALF, BFLOAT = tl.constexpr(_assembly(*_HALF)), tl.constexpr(_assembly(*_BFLOAT))
CENTRED_HALF = tl.constexpr(_assembly(*_HALF, "0x64086408"))
CENTRED_BFLOAT = tl.constexpr(_assembly(*_BFLOAT, "0xc308c308"))


def check_groups(name: str, words: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor, columns: int) -> None:
    """Checks zero points int32 `[groups, columns / 8]` and 16-bit scales `[groups, columns]` of the words `name`.

    Raises KernelValueError or KernelTypeError naming the bad tensor.
    """
    check_dtype("qzeros", qzeros, (torch.int32,))
    check_shape("qzeros", qzeros, (None, columns // PER_WORD))
    check_dtype("scales", scales, (torch.float16, torch.bfloat16))
    check_shape("scales", scales, (qzeros.shape[0], columns))
    for label, tensor in ((name, words), ("qzeros", qzeros), ("scales", scales)):
        check_device(label, tensor, words.device)
        check_last_stride(label, tensor)


@triton.jit
def nibble(words, J: tl.constexpr):
    """Column J of the eight of each word, 0 to 15: even columns lie in the lower half, odd ones in the upper."""
    return (words >> (J // 2 * 4 + J % 2 * 16)) & 0xF


@triton.jit
def _plain(words, zero, J: tl.constexpr, TYPE: tl.constexpr):
    return (nibble(words, J) - zero).to(TYPE)


@triton.jit
def unpack_nibbles(words, zero, IS_HALF: tl.constexpr, ASM: tl.constexpr):
    """Eight tiles of q - zero in fp16 or bf16, columns in order, from words and zero points that broadcast to them."""
    TYPE: tl.constexpr = tl.float16 if IS_HALF else tl.bfloat16
    if ASM:
        z = (zero | (0x6400 if IS_HALF else 0xC300)).to(tl.uint16).to(TYPE, bitcast=True)
        y = tl.inline_asm_elementwise(
            HALF if IS_HALF else BFLOAT, CONSTRAINTS, [words, z], is_pure=True, pack=2,
            dtype=(z.dtype, z.dtype, z.dtype, z.dtype, z.dtype, z.dtype, z.dtype, z.dtype),
        )  # fmt: skip
    else:
        y = (
            _plain(words, zero, 0, TYPE), _plain(words, zero, 1, TYPE), _plain(words, zero, 2, TYPE),
            _plain(words, zero, 3, TYPE), _plain(words, zero, 4, TYPE), _plain(words, zero, 5, TYPE),
            _plain(words, zero, 6, TYPE), _plain(words, zero, 7, TYPE),
        )  # fmt: skip
    return y


@triton.jit
def unpack_centred(words, IS_HALF: tl.constexpr, ASM: tl.constexpr):
    """`unpack_nibbles` with the zero point 8, which as a tile would take 40 registers."""
    if ASM:
        z = tl.full([], 0, tl.float16 if IS_HALF else tl.bfloat16)
        y = tl.inline_asm_elementwise(
            CENTRED_HALF if IS_HALF else CENTRED_BFLOAT, CENTRED_CONSTRAINTS, [words], is_pure=True, pack=2,
            dtype=(z.dtype, z.dtype, z.dtype, z.dtype, z.dtype, z.dtype, z.dtype, z.dtype),
        )  # fmt: skip
    else:
        y = unpack_nibbles(words, 8, IS_HALF, False)
    return y
