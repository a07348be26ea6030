"""The shapes of the tables, and random inputs for them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from labkit_kernels.reference import quantise


@dataclass(frozen=True)
class Shape:
    """Sequences of `lens` cached tokens, the last `new` of each being queries."""

    name: str
    lens: tuple[int, ...]
    new: int = 1
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128


def _ragged(count: int, low: int, high: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randint(low, high + 1, (count,), generator=generator).tolist())


DECODE = (
    Shape("64x4096", (4096,) * 64),
    Shape("256x1024", (1024,) * 256),
    Shape("1x32768", (32768,)),
    Shape("8x16384", (16384,) * 8),
    Shape("128 ragged", _ragged(128, 100, 8192)),
    Shape("16x4096", (4096,) * 16),
    Shape("16x1024", (1024,) * 16),
    Shape("1x1024", (1024,)),
    Shape("1x4096", (4096,)),
    Shape("1x65536", (65536,)),
)
PREFILL = (
    Shape("1x8192 over 8192", (16384,), new=8192),
    Shape("4x2048 over 2048", (4096,) * 4, new=2048),
    Shape("4x512 over 8192", (8704,) * 4, new=512),
    Shape("16x512 over 2048", (2560,) * 16, new=512),
)


def with_heads(shape: Shape, q_heads: int, kv_heads: int) -> Shape:
    """The same lengths under another head layout."""
    return Shape(f"{shape.name} {q_heads}/{kv_heads}", shape.lens, shape.new, q_heads, kv_heads, shape.head_dim)


@dataclass(frozen=True)
class Inputs:
    """Device tensors of a shape."""

    shape: Shape
    block_size: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    tables: torch.Tensor
    lens: torch.Tensor
    starts: torch.Tensor

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that must be read once."""
        s = self.shape
        return 2 * sum(s.lens) * s.kv_heads * s.head_dim * self.k.element_size()

    @property
    def flops(self) -> float:
        """Causal attention operations: 4 · D for each pair of a query head's token and a key it sees."""
        s = self.shape
        pairs = sum(s.new * (length - s.new) + s.new * (s.new + 1) // 2 for length in s.lens)
        return 4.0 * s.head_dim * s.q_heads * pairs


class Pool:
    """One reservoir of random numbers for each dtype, cut to each shape: filling memory anew would cost the time."""

    def __init__(self, num_elements: int) -> None:
        self._size = num_elements
        self._pools: dict[torch.dtype, torch.Tensor] = {}

    def take(self, dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Random K and V of `shape`."""
        if dtype not in self._pools:
            pool = torch.empty(self._size, dtype=dtype, device="cuda")
            for i in range(0, self._size, 2**26):
                part = pool[i : i + 2**26]
                part.copy_(
                    quantise(torch.randn(part.shape, device="cuda"), dtype, 0.03 if dtype is torch.int8 else 1.0)
                )
            self._pools[dtype] = pool
        count = torch.Size(shape).numel()
        pool = self._pools[dtype]
        if 2 * count > pool.numel():
            raise ValueError(f"the pool has {pool.numel()} elements; {shape} twice needs {2 * count}")
        return pool[:count].view(shape), pool[pool.numel() - count :].view(shape)


def make_inputs(shape: Shape, block_size: int, kv_dtype: torch.dtype, pool: Pool) -> Inputs:
    """Inputs with shuffled block tables."""
    need = [-(-length // block_size) for length in shape.lens]
    total = sum(need)
    k, v = pool.take(kv_dtype, (total, block_size, shape.kv_heads, shape.head_dim))
    order = torch.randperm(total, generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    tables = torch.zeros(len(need), max(need), dtype=torch.int32)
    at = 0
    for i, blocks in enumerate(need):
        tables[i, :blocks] = order[at : at + blocks]
        at += blocks
    batch = len(shape.lens)
    q = torch.randn(batch * shape.new, shape.q_heads, shape.head_dim, device="cuda", dtype=torch.bfloat16)
    return Inputs(
        shape, block_size, q, k, v, tables.cuda(), torch.tensor(shape.lens, dtype=torch.int32, device="cuda"),
        torch.arange(0, (batch + 1) * shape.new, shape.new, dtype=torch.int32, device="cuda"),
    )  # fmt: skip
