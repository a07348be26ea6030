"""`KVCache`: the paged keys and values of every layer, their storage types, and the host pool for swapping.

Layout of one layer, K and V each: `[num_blocks, block_size, num_kv_heads, head_dim]`, so that a token is one row,
a block is one piece, and an ascending run of blocks is one view. `pool_bytes` is exactly what is allocated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from labkit.engine.host_memory import check_swap_room
from labkit.errors import UnsupportedError
from labkit.specs.model_spec import LayerSpec, ModelSpec

_TORCH_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_FLOAT8 = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
# A cast beyond the largest finite value gives NaN or infinity, not that value.
_FLOAT8_MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
_INT8 = "int8_per_token_head"


class BlockRun(NamedTuple):
    """Blocks of one sequence for reading: an ascending run from `first`, or the ids in `block_ids` ([n] int64)."""

    first: int
    num_blocks: int
    num_tokens: int
    block_ids: torch.Tensor | None


@dataclass(frozen=True)
class CacheShape:
    """One layer's widths."""

    num_kv_heads: int
    head_dim: int
    v_head_dim: int


class KVCache:
    """KV pool, host pool and gather scratch of one engine.

    Args:
        spec: the model; layers that share another's KV own none here.
        num_blocks, num_swap_blocks: blocks on the device and in host memory.
        block_size: tokens in a block.
        kv_cache_dtype: a name of `labkit.specs.engine_config.KV_CACHE_DTYPES`.
        dtype: of activations; what "auto" means and what `read` returns.
        max_blocks_per_seq: blocks of the longest sequence; sizes the scratch.

    Raises:
        UnsupportedError: a layer kind or KV type that this cache cannot hold.
        DoesNotFitError: the host has no room for the swap blocks.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        num_blocks: int,
        num_swap_blocks: int,
        block_size: int,
        kv_cache_dtype: str,
        dtype: torch.dtype,
        max_blocks_per_seq: int,
    ) -> None:
        self.block_size = block_size
        self.dtype = dtype
        self._kind = kv_cache_dtype
        self._storage = storage_dtype(kv_cache_dtype, dtype)
        self._owner = [_owner(spec, index) for index in range(spec.num_layers)]
        shapes = {index: _shape(spec.layers[index]) for index in sorted(set(self._owner))}
        self._pool = {i: self._allocate(shape, num_blocks) for i, shape in shapes.items()}
        check_swap_room(num_swap_blocks * self.pool_bytes // max(1, num_blocks))
        self._host = {i: self._allocate(shape, num_swap_blocks) for i, shape in shapes.items()}
        self._scratch = self._allocate_scratch(shapes, max_blocks_per_seq)
        # One view of each whole pool, from which a run is cut in a single call; only where no cast is needed.
        self._heads = (
            {i: tuple(_heads_first(tensors[name].flatten(0, 1)) for name in "kv") for i, tensors in self._pool.items()}
            if self._storage == dtype
            else {}
        )
        self._table = _float8_table(kv_cache_dtype, dtype) if kv_cache_dtype in _FLOAT8 else None

    @property
    def pool_bytes(self) -> int:
        """Bytes of keys, values and scales in the device pool."""
        return _num_bytes(self._pool)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the gather buffers."""
        return sum(tensor.nbytes for tensor in self._scratch.values())

    def write(self, layer_index: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store new keys and values; a layer that shares another's KV stores nothing.

        Args:
            slots: [T] int64, block · block_size + offset of each token.
            k, v: [T, num_kv_heads, head_dim].
        """
        if self._owner[layer_index] != layer_index:
            return
        tensors = self._pool[layer_index]
        for name, new in (("k", k), ("v", v)):
            rows = tensors[name].flatten(0, 1)
            if self._kind == _INT8:
                new, scales = _to_int8(new)
                tensors[f"{name}_scale"].flatten(0, 1).index_copy_(0, slots, scales)
            elif self._table is not None:
                new = _to_float8(new, _FLOAT8[self._kind])
            rows.index_copy_(0, slots, new.to(rows.dtype))

    def read(self, layer_index: int, run: BlockRun, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one sequence from position `first` on, [1, num_kv_heads, tokens, head_dim].

        In the compute type; a view of the pool or of the scratch, valid until the next `read`.
        """
        owner = self._owner[layer_index]
        if run.block_ids is None and self._heads:
            keys, values = self._heads[owner]
            start, length = run.first * self.block_size + first, run.num_tokens - first
            return keys.narrow(2, start, length), values.narrow(2, start, length)
        # Blocks before the first visible token are not gathered.
        skipped = first // self.block_size
        block_ids = None if run.block_ids is None else run.block_ids[skipped:]
        num_tokens = run.num_tokens - skipped * self.block_size
        run = BlockRun(run.first + skipped, run.num_blocks - skipped, num_tokens, block_ids)
        first -= skipped * self.block_size
        tensors = self._pool[owner]
        rows = self._read_one(tensors, "k", run)[first:], self._read_one(tensors, "v", run)[first:]
        return _heads_first(rows[0]), _heads_first(rows[1])

    def swap(self, swap_out: list[tuple[int, int]], swap_in: list[tuple[int, int]]) -> None:
        """Copy blocks to the host pool, then host blocks back; pairs are (block, host block)."""
        for pairs, source, target in ((swap_out, self._pool, self._host), (swap_in, self._host, self._pool)):
            if not pairs:
                continue
            blocks, hosts = torch.tensor(pairs).unbind(1)
            from_ids, to_ids = (blocks, hosts) if source is self._pool else (hosts, blocks)
            for layer_index, tensors in source.items():
                for name, tensor in tensors.items():
                    target[layer_index][name][to_ids] = tensor[from_ids]

    def _allocate(self, shape: CacheShape, num_blocks: int) -> dict[str, torch.Tensor]:
        head = (num_blocks, self.block_size, shape.num_kv_heads)
        tensors = {
            "k": torch.empty(*head, shape.head_dim, dtype=self._storage),
            "v": torch.empty(*head, shape.v_head_dim, dtype=self._storage),
        }
        if self._kind == _INT8:
            tensors |= {name: torch.empty(head, dtype=torch.float32) for name in ("k_scale", "v_scale")}
        return tensors

    def _allocate_scratch(self, shapes: dict[int, CacheShape], max_blocks_per_seq: int) -> dict[str, torch.Tensor]:
        """Buffers for the longest sequence of the widest layer; a fresh one per read costs page faults."""
        num_tokens = max_blocks_per_seq * self.block_size
        scratch = {}
        for name, width in (("k", "head_dim"), ("v", "v_head_dim")):
            size = num_tokens * max(shape.num_kv_heads * getattr(shape, width) for shape in shapes.values())
            scratch[name] = torch.empty(size, dtype=self.dtype)
            if self._storage != self.dtype:
                scratch[f"{name}_raw"] = torch.empty(size, dtype=self._storage)
        if self._kind == _INT8:
            heads = max(shape.num_kv_heads for shape in shapes.values())
            scratch["scale"] = torch.empty(num_tokens * heads, dtype=torch.float32)
        if self._kind in _FLOAT8:
            widest = max(scratch["k"].numel(), scratch["v"].numel())
            scratch["index"] = torch.empty(widest, dtype=torch.int32)
        return scratch

    def _read_one(self, tensors: dict[str, torch.Tensor], name: str, run: BlockRun) -> torch.Tensor:
        stored = tensors[name]
        raw = self._scratch.get(f"{name}_raw")
        rows = self._rows(stored, run, self._scratch[name] if raw is None else raw)
        if raw is None:
            return rows
        out = self._scratch[name][: rows.numel()].view(rows.shape)
        if self._table is not None:
            index = self._scratch["index"][: rows.numel()]
            index.copy_(rows.reshape(-1) if rows.is_contiguous() else rows.flatten())
            torch.index_select(self._table, 0, index, out=out.view(-1))
        else:
            out.copy_(rows)
            if self._kind == _INT8:
                scales = self._rows(tensors[f"{name}_scale"], run, self._scratch["scale"])
                out.mul_(scales.unsqueeze(-1))
        return out

    def _rows(self, stored: torch.Tensor, run: BlockRun, scratch: torch.Tensor) -> torch.Tensor:
        if run.block_ids is None:
            return stored[run.first : run.first + run.num_blocks].flatten(0, 1)[: run.num_tokens]
        shape = (run.num_blocks, *stored.shape[1:])
        block_numel = stored.stride(0)
        out = scratch[: run.num_blocks * block_numel].view(run.num_blocks, block_numel)
        torch.index_select(stored.view(stored.shape[0], block_numel), 0, run.block_ids, out=out)
        return out.view(shape).flatten(0, 1)[: run.num_tokens]


def storage_dtype(kv_cache_dtype: str, dtype: torch.dtype) -> torch.dtype:
    """Element type in memory.

    Raises:
        UnsupportedError: the name is none that this cache knows.
    """
    if kv_cache_dtype == "auto":
        return dtype
    if kv_cache_dtype in _TORCH_DTYPES:
        return _TORCH_DTYPES[kv_cache_dtype]
    if kv_cache_dtype in _FLOAT8:
        return torch.uint8
    if kv_cache_dtype == _INT8:
        return torch.int8
    raise UnsupportedError(f"this engine has no KV type {kv_cache_dtype}", works="auto", knob="kv_cache_dtype")


def _owner(spec: ModelSpec, index: int) -> int:
    layer = spec.layers[index]
    if layer.kind not in ("full", "sliding", "chunked"):
        raise UnsupportedError(
            f"this engine holds no KV for {layer.kind} layers", works="models whose layers are full or sliding"
        )
    return index if layer.shares_kv_with is None else layer.shares_kv_with


def _shape(layer: LayerSpec) -> CacheShape:
    return CacheShape(layer.num_kv_heads, layer.head_dim, layer.v_head_dim or layer.head_dim)


def _heads_first(rows: torch.Tensor) -> torch.Tensor:
    """[S, H, D] → [1, H, S, D] without a copy."""
    return rows.transpose(0, 1).unsqueeze(0)


def _num_bytes(pool: dict[int, dict[str, torch.Tensor]]) -> int:
    return sum(tensor.nbytes for tensors in pool.values() for tensor in tensors.values())


def _to_float8(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    limit = _FLOAT8_MAX[dtype]
    return values.float().clamp(-limit, limit).to(dtype).view(torch.uint8)


def _to_int8(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounded values and their scales [T, num_kv_heads]; the largest of each token and head becomes ±127."""
    values = values.float()
    scales = values.abs().amax(dim=-1) / 127.0
    safe = scales.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(-1)
    return (values / safe).round_().clamp_(-127, 127).to(torch.int8), scales


def _float8_table(kv_cache_dtype: str, dtype: torch.dtype) -> torch.Tensor:
    """[256] value of each byte: looking it up is three times as fast as torch's cast on a CPU."""
    return torch.arange(256, dtype=torch.uint8).view(_FLOAT8[kv_cache_dtype]).to(dtype)
