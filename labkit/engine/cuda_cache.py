"""`CudaKVCache`: the paged keys and values of every layer on a card, in the layout and number formats of the kernels.

One allocation holds all layers, so that giving it back leaves nothing behind. K and V of a layer are views of it,
`[num_blocks, block_size, num_kv_heads, head_dim]`, with float32 scales `[num_blocks, block_size, num_kv_heads]` beside
them where each token and head has its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType

import torch

from labkit.engine.cuda_swap import StagedRows, SwapLane, SwapTimes
from labkit.engine.host_memory import swap_pool
from labkit.errors import UnsupportedError
from labkit.memory.card_parts import STAGED_BYTES
from labkit.memory.labkit_rules import POOL_ALIGNMENT_BYTES, TOKEN_SCALED, blocks_in_pool
from labkit.specs.model_spec import LayerSpec, ModelSpec

EIGHT_BIT = MappingProxyType(
    {
        "fp8": torch.float8_e4m3fn,
        "fp8_e4m3": torch.float8_e4m3fn,
        "fp8_e5m2": torch.float8_e5m2,
        "int8_per_token_head": torch.int8,
        "fp8_per_token_head": torch.float8_e4m3fn,
    }
)

# Where the parts of a swapped block begin, for copies of 16 bytes a thread.
ROW_ALIGNMENT_BYTES = 16


@dataclass(frozen=True)
class LayerCache:
    """One layer's views; scales are None where the format has none of its own for each token."""

    k: torch.Tensor
    v: torch.Tensor
    k_scales: torch.Tensor | None = None
    v_scales: torch.Tensor | None = None

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The views that are there."""
        return tuple(tensor for tensor in (self.k, self.v, self.k_scales, self.v_scales) if tensor is not None)


@dataclass(frozen=True)
class CacheFormat:
    """How one engine stores KV.

    Attributes:
        heads: (num_kv_heads, head_dim) of each layer on this rank.
        block_size: tokens in a block.
        storage: element type in memory.
        has_token_scales: a float32 scale for each token and head beside K and V.
    """

    heads: tuple[tuple[int, int], ...]
    block_size: int
    storage: torch.dtype
    has_token_scales: bool

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return sum(sum(self._part_bytes(*heads)) for heads in self.heads)

    def _part_bytes(self, num_kv_heads: int, head_dim: int) -> list[int]:
        rows = self.block_size * num_kv_heads
        parts = [rows * head_dim * self.storage.itemsize] * 2
        return parts + [rows * 4] * 2 if self.has_token_scales else parts

    def pool_bytes(self, num_blocks: int) -> int:
        """Bytes of an allocation for `num_blocks` blocks."""
        return sum(self._steps(num_blocks))

    def blocks_in(self, num_bytes: int) -> int:
        """Blocks that fit in an allocation of `num_bytes`, each part at an aligned start."""
        return blocks_in_pool(num_bytes, self.block_bytes, len(self._steps(0)))

    @property
    def row_bytes(self) -> int:
        """Bytes of one block as it is swapped: all layers one after the other, each part at an aligned start."""
        return sum(_aligned(size, ROW_ALIGNMENT_BYTES) for heads in self.heads for size in self._part_bytes(*heads))

    def num_staged(self, num_swap_blocks: int) -> int:
        """Blocks that may be on their way between card and host, in each direction."""
        return min(num_swap_blocks, max(1, STAGED_BYTES // self.row_bytes))

    def staged_bytes(self, num_swap_blocks: int) -> int:
        """Bytes on the card for blocks on their way."""
        return 2 * self.num_staged(num_swap_blocks) * self.row_bytes

    def _steps(self, num_blocks: int) -> list[int]:
        sizes = [size * num_blocks for heads in self.heads for size in self._part_bytes(*heads)]
        return [_aligned(size, POOL_ALIGNMENT_BYTES) for size in sizes]

    def carve_rows(self, rows: torch.Tensor) -> tuple[LayerCache, ...]:
        """All layers' views over blocks as they are swapped, uint8 `[num_blocks, row_bytes]`."""
        layers, start = [], 0
        for num_kv_heads, head_dim in self.heads:
            views = []
            for number, size in enumerate(self._part_bytes(num_kv_heads, head_dim)):
                kind, last = (self.storage, (head_dim,)) if number < 2 else (torch.float32, ())
                shape = (self.block_size, num_kv_heads, *last)
                views.append(rows[:, start : start + size].view(kind).unflatten(1, shape))
                start += _aligned(size, ROW_ALIGNMENT_BYTES)
            layers.append(LayerCache(*views))
        return tuple(layers)

    def carve(self, flat: torch.Tensor, num_blocks: int) -> _Pool:
        """All layers' views over one allocation, which holds whatever was there before."""
        steps = self._steps(num_blocks)
        starts = iter([sum(steps[:index]) for index in range(len(steps))])
        return _Pool(flat, tuple(self._views(flat, starts, num_blocks, *heads) for heads in self.heads))

    def _views(
        self, flat: torch.Tensor, starts: Iterator[int], num_blocks: int, num_kv_heads: int, head_dim: int
    ) -> LayerCache:
        views = []
        for number, size in enumerate(self._part_bytes(num_kv_heads, head_dim)):
            start = next(starts)
            part = flat[start : start + size * num_blocks]
            shape = (num_blocks, self.block_size, num_kv_heads)
            views.append(
                part.view(self.storage).view(*shape, head_dim) if number < 2 else part.view(torch.float32).view(shape)
            )
        return LayerCache(*views)


@dataclass(frozen=True)
class _Pool:
    flat: torch.Tensor
    layers: tuple[LayerCache, ...]


def cache_format(
    spec: ModelSpec, block_size: int, kv_cache_dtype: str, dtype: torch.dtype, tp_size: int = 1
) -> CacheFormat:
    """The format for a model and its knobs; `dtype` is that of activations, which "auto" means.

    Raises:
        UnsupportedError: layers or a KV type that the kernels cannot read.
    """
    storage = EIGHT_BIT.get(kv_cache_dtype)
    if storage is None:
        if kv_cache_dtype not in ("auto", str(dtype).removeprefix("torch.")):
            raise UnsupportedError(
                f"the GPU engine does not store KV as {kv_cache_dtype} beside {str(dtype).removeprefix('torch.')}",
                works=", ".join(("auto", *EIGHT_BIT)),
                knob="kv_cache_dtype",
            )
        storage = dtype
    heads = tuple(_heads(spec, layer, tp_size) for layer in spec.layers)
    return CacheFormat(heads, block_size, storage, kv_cache_dtype in TOKEN_SCALED)


def _heads(spec: ModelSpec, layer: LayerSpec, tp_size: int) -> tuple[int, int]:
    same_widths = layer.v_head_dim in (None, layer.head_dim)
    if layer.kind not in ("full", "sliding") or layer.shares_kv_with is not None or not same_widths:
        raise UnsupportedError(
            f"the GPU engine does not run {spec.model_type}: its kernels lack {layer.kind} layers of this form",
            works="models whose layers are full or sliding, with keys as wide as values; or gpu='cpu'",
        )
    return max(1, layer.num_kv_heads // tp_size), layer.head_dim


class CudaKVCache:
    """Device pool and pinned host pool of one engine.

    Args:
        form: from `cache_format`.
        num_blocks, num_swap_blocks: blocks on the device and in host memory.
        memory: bytes on the device, `form.pool_bytes(num_blocks)` or more; the host pool is pinned for a card.

    Attributes:
        staged_bytes: on the device beside `memory`, for swapped blocks on their way.

    Raises:
        DoesNotFitError: the host has no room for the swap blocks.
    """

    def __init__(self, form: CacheFormat, num_blocks: int, num_swap_blocks: int, memory: torch.Tensor) -> None:
        self.form = form
        self.num_blocks = num_blocks
        self._pool = form.carve(memory, num_blocks)
        pinned = memory.is_cuda and num_swap_blocks > 0
        host = swap_pool(form.row_bytes * num_swap_blocks, pinned=pinned)
        self._host = host.view(num_swap_blocks, form.row_bytes)
        self.staged_bytes = form.staged_bytes(num_swap_blocks)
        self._lane = self._make_lane(form.num_staged(num_swap_blocks)) if num_swap_blocks else None

    @property
    def layers(self) -> tuple[LayerCache, ...]:
        """The views of each layer."""
        return self._pool.layers

    @property
    def pool_bytes(self) -> int:
        """Bytes of the device pool."""
        return self.form.pool_bytes(self.num_blocks)

    @property
    def memory(self) -> torch.Tensor:
        """What the device pool lies in, for the next pool to lie in too."""
        return self._pool.flat

    def swap(self, swap_out: list[tuple[int, int]], swap_in: list[tuple[int, int]], *, now: bool = True) -> None:
        """Copy blocks to the host pool, then host blocks back; pairs are (block, host block).

        What is computed next waits for it on the device; the host goes on. With `now` false only what was to come back
        before is there for the next computation, and what begins to come back here for the one after it.
        """
        if self._lane is None:
            self._swap_with_torch(swap_out, swap_in)
            return
        self._lane.settle()
        self._lane.swap_out(swap_out)
        self._lane.swap_in(swap_in)
        if now:
            self._lane.settle()

    def finish_swaps(self) -> None:
        """Wait until no block is on its way; before the memory is given up."""
        if self._lane is not None:
            self._lane.finish()

    def time_swaps(self, times: SwapTimes | None) -> None:
        """Have the copies' events added to `times`; see `SwapLane`."""
        if self._lane is not None:
            self._lane.times = times

    def _make_lane(self, num_staged: int) -> SwapLane | None:
        """None where no kernel can run."""
        from labkit_kernels.ops import interpreting

        if not self.memory.is_cuda and not interpreting():
            return None
        staged = torch.empty(2, num_staged, self.form.row_bytes, dtype=torch.uint8, device=self.memory.device)
        leaving, coming = (StagedRows(rows, self.form.carve_rows(rows)) for rows in staged)
        return SwapLane(self._pool.layers, self._host, leaving, coming)

    def _swap_with_torch(self, swap_out: list[tuple[int, int]], swap_in: list[tuple[int, int]]) -> None:
        if swap_out:
            blocks, hosts = torch.tensor(swap_out).unbind(1)
            for source, target in self._pairs():
                target[hosts] = source[blocks]
        if swap_in:
            blocks, hosts = torch.tensor(swap_in).unbind(1)
            for source, target in self._pairs():
                source[blocks] = target[hosts]

    def _pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(device, host) tensors as bytes, so that indexing works for every element type."""
        for layer, host in zip(self._pool.layers, self.form.carve_rows(self._host), strict=True):
            for ours, theirs in zip(layer.tensors(), host.tensors(), strict=True):
                yield ours.view(torch.uint8), theirs.view(torch.uint8)


def _aligned(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment
