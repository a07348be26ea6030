"""Dequantisation of GGUF tensors, bit for bit as ggml-quants.c computes them in float32."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from labkit.errors import UnsupportedError
from labkit.specs.gguf import GgufFile, GgufTensor
from labkit.text import plain

# Blocks decoded at a time: keeps float32 intermediates of a large tensor in cache and out of the memory peak.
_CHUNK_ELEMENTS = 2**18


def check_decodable(tensor: GgufTensor) -> None:
    """Refuse a quantisation that labkit does not decode.

    Raises:
        UnsupportedError: names the tensor, its type and the types that work.
    """
    if tensor.kind not in _DECODERS:
        raise UnsupportedError(
            f"tensor {plain(tensor.name, 80)!r} is stored as {tensor.kind}, which labkit does not decode",
            works=f"a GGUF file with {', '.join(_DECODERS)}",
        )


def read_gguf_tensor(file: GgufFile, name: str, out: torch.Tensor) -> None:
    """Decode tensor `name` of `file` in float32 and round it into `out`: contiguous, CPU, of the tensor's shape.

    Raises:
        FileFormatError: the file became shorter.
        UnsupportedError: a quantisation that labkit does not decode.
    """
    tensor = file.tensors[name]
    check_decodable(tensor)
    dequantize(torch.from_numpy(file.read(name)), tensor.kind, out.view(-1))


def dequantize(data: torch.Tensor, kind: str, out: torch.Tensor) -> None:
    """Decode `data` (uint8 `[bytes]`) of ggml type `kind` into `out` (`[elements]`, contiguous, any float dtype)."""
    block_length, block_bytes, decode = _DECODERS[kind]
    blocks = data.view(-1, block_bytes)
    rows = out.view(-1, block_length)
    step = max(_CHUNK_ELEMENTS // block_length, 1)
    for start in range(0, blocks.shape[0], step):
        chunk = blocks[start : start + step]
        rows[start : start + step] = decode(chunk).view(chunk.shape[0], block_length)


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The float16 at byte `start` of each block, as float32 `[blocks, 1]`."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Low halves, then high halves, of the last axis: `[..., n]` → `[..., 2 n]`."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _fifth_bits(packed: torch.Tensor) -> torch.Tensor:
    """Bit j of the little-endian 32-bit field, moved to value 16: `[blocks, 4]` → `[blocks, 32]`."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return ((packed.unsqueeze(-1) >> shifts & 1) << 4).flatten(1)


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).to(torch.int8) - 8)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _nibbles(blocks[:, 4:]).float().mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    quants = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return _half(blocks, 0) * (quants.to(torch.int8) - 16)


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    quants = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return quants.float().mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * blocks[:, 2:].view(torch.int8)


def _k_scales(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight 6-bit scales and minima from 12 bytes (get_scale_min_k4): float32 `[blocks, 8]` each."""
    low, mid, high = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat((low & 63, (high & 15) | (low >> 6 << 4)), dim=1)
    minima = torch.cat((mid & 63, (high >> 4) | (mid >> 6 << 4)), dim=1)
    return scales.float(), minima.float()


def _k_affine(blocks: torch.Tensor, quants: torch.Tensor) -> torch.Tensor:
    """`d * scale * q - dmin * minimum` for eight runs of 32: `quants` is `[blocks, 8, 32]`."""
    scales, minima = _k_scales(blocks[:, 4:16])
    scale = (_half(blocks, 0) * scales).unsqueeze(-1)
    minimum = (_half(blocks, 2) * minima).unsqueeze(-1)
    return scale * quants - minimum


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    return _k_affine(blocks, _nibbles(blocks[:, 16:].unflatten(1, (4, 32))).view(-1, 8, 32))


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    low = _nibbles(blocks[:, 48:].unflatten(1, (4, 32))).view(-1, 8, 32)
    shifts = torch.arange(8, dtype=torch.uint8).unsqueeze(-1)
    high = blocks[:, 16:48].unsqueeze(1) >> shifts & 1
    return _k_affine(blocks, low | high << 4)


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    low = _nibbles(blocks[:, :128].unflatten(1, (2, 64)))
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).unsqueeze(-1)
    high = (blocks[:, 128:192].unflatten(1, (2, 1, 32)) >> shifts & 3).flatten(2)
    quants = (low | high << 4).to(torch.int8) - 32
    scale = (_half(blocks, 208) * blocks[:, 192:208].view(torch.int8)).unsqueeze(-1)
    return scale * quants.view(-1, 16, 16)


# ggml type → elements and bytes of a block, decoder of `[blocks, bytes]`.
_DECODERS: Mapping[str, tuple[int, int, Callable[[torch.Tensor], torch.Tensor]]] = MappingProxyType(
    {
        "F32": (1, 4, lambda blocks: blocks.view(torch.float32)),
        "F16": (1, 2, lambda blocks: blocks.view(torch.float16)),
        "BF16": (1, 2, lambda blocks: blocks.view(torch.bfloat16)),
        "Q4_0": (32, 18, _q4_0),
        "Q4_1": (32, 20, _q4_1),
        "Q5_0": (32, 22, _q5_0),
        "Q5_1": (32, 24, _q5_1),
        "Q8_0": (32, 34, _q8_0),
        "Q4_K": (256, 144, _q4_k),
        "Q5_K": (256, 176, _q5_k),
        "Q6_K": (256, 210, _q6_k),
    }
)
