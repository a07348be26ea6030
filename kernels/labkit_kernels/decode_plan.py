"""The split of a decode step over the card, computed on the device once a step and shared by all layers.

Each sequence is cut into chunks of the same number of tiles; a work item is one chunk of one sequence, and one program
runs an item for one KV head. The chunk is the one with the smallest estimated finish among maxlen/1 … maxlen/k:
whole waves of full chunks, or all work spread over the slots, whichever is longer (FA3's rule with the count of waves
made explicit). Items lie longest first, so the card's own scheduler fills the tail with short ones.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from labkit_kernels.checks import KernelValueError, check_heads
from labkit_kernels.heuristics import DecodeConfig, decode_config, num_slots
from labkit_kernels.ops import cache_kind, capability

ITEM_COST_TILES = 0.75
REDUCE_COST_TILES = 1.5
MIN_CHUNK_TOKENS = 256
DETERMINISTIC_CHUNK_TOKENS = 1024
NUM_BUCKETS = 8


@triton.jit
def _sequence_tiles(
    seq_lens, query_start_loc, offsets, batch, window,
    TILE: tl.constexpr, QUERY_LEN: tl.constexpr, RAGGED: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Tiles that each sequence reads: all up to its length, less those before its window."""
    inside = offsets < batch
    length = tl.load(seq_lens + offsets, mask=inside, other=0)
    tiles = (length + TILE - 1) // TILE
    if WINDOW:
        query_len = tl.full(length.shape, QUERY_LEN, tl.int32)
        if RAGGED:
            query_len = tl.load(query_start_loc + offsets + 1, mask=inside, other=0)
            query_len -= tl.load(query_start_loc + offsets, mask=inside, other=0)
        tiles -= tl.maximum(length - query_len - window + 1, 0) // TILE
    return tiles


@triton.jit
def _best_chunk(
    seq_lens, query_start_loc, batch, window, longest, slots_per_head, max_items, min_chunk, item_cost, reduce_cost,
    TILE: tl.constexpr, QUERY_LEN: tl.constexpr, RAGGED: tl.constexpr, WINDOW: tl.constexpr,
    CANDIDATES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Tiles of a chunk with the smallest estimated finish time, in tiles of one slot."""
    k = tl.arange(0, CANDIDATES)
    chunk = tl.maximum((longest + k) // (k + 1), min_chunk)
    full = tl.zeros([CANDIDATES], tl.int32)
    items = tl.zeros([CANDIDATES], tl.int32)
    work = tl.zeros([CANDIDATES], tl.int32)
    for start in range(0, batch, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        tiles = _sequence_tiles(
            seq_lens, query_start_loc, offsets, batch, window, TILE, QUERY_LEN, RAGGED, WINDOW
        )[:, None]  # fmt: skip
        whole = tiles // chunk[None, :]
        full += tl.sum(whole, 0)
        items += tl.sum(whole + tl.where(tiles > whole * chunk[None, :], 1, 0), 0)
        work += tl.sum(tiles + tl.zeros_like(whole), 0)
    waves = tl.ceil(full.to(tl.float32) / slots_per_head) * (chunk.to(tl.float32) + item_cost)
    spread = (work.to(tl.float32) + items.to(tl.float32) * item_cost) / slots_per_head
    finish = tl.maximum(waves, spread) + tl.where(chunk < longest, reduce_cost, 0.0)
    finish = tl.where((items + batch <= max_items) | (k == 0), finish, float("inf"))
    best = tl.argmin(finish, 0)
    return tl.sum(tl.where(k == best, chunk, 0), 0)


@triton.jit
def _write_items(
    item_seq, item_chunk, seq_info, tiles, chunk, batch, max_batch, BLOCK: tl.constexpr, BUCKETS: tl.constexpr
):
    """Writes the item list, longest first, and where each sequence's items are; returns the number of items."""
    seq = tl.arange(0, BLOCK)
    full = tl.where(seq < batch, tiles // chunk, 0)
    first = tl.cumsum(full, 0) - full
    for j in range(tl.max(full, 0)):
        tl.store(item_seq + first + j, seq, mask=j < full)
        tl.store(item_chunk + first + j, full * 0 + j, mask=j < full)
    rest = tiles - full * chunk
    has_rest = (seq < batch) & ((rest > 0) | (tiles == 0))
    bucket = rest * BUCKETS // chunk
    count = tl.sum(full, 0)
    last = tl.full([BLOCK], -1, tl.int32)
    for i in tl.static_range(BUCKETS):
        here = has_rest & (bucket == BUCKETS - 1 - i)
        one = tl.where(here, 1, 0)
        position = count + tl.cumsum(one, 0) - one
        last = tl.where(here, position, last)
        count += tl.sum(one, 0)
    tl.store(item_seq + last, seq, mask=has_rest)
    tl.store(item_chunk + last, full, mask=has_rest)
    tl.store(seq_info + seq, first, mask=seq < batch)
    tl.store(seq_info + max_batch + seq, full, mask=seq < batch)
    tl.store(seq_info + 2 * max_batch + seq, last, mask=seq < batch)
    return count


@triton.jit(do_not_specialize=["batch", "max_batch", "window", "max_items"])
def _plan_kernel(
    seq_lens, query_start_loc, meta, item_seq, item_chunk, seq_info,
    batch, max_batch, window, max_items, min_chunk, fixed_chunk, slots_per_head, item_cost, reduce_cost,
    TILE: tl.constexpr, QUERY_LEN: tl.constexpr, RAGGED: tl.constexpr, WINDOW: tl.constexpr, FIXED: tl.constexpr,
    CANDIDATES: tl.constexpr, BLOCK: tl.constexpr, SCAN_BLOCK: tl.constexpr, BUCKETS: tl.constexpr,
):  # fmt: skip
    tiles = _sequence_tiles(
        seq_lens, query_start_loc, tl.arange(0, BLOCK), batch, window, TILE, QUERY_LEN, RAGGED, WINDOW
    )
    longest = tl.maximum(tl.max(tiles, 0), 1)
    if FIXED:
        chunk = fixed_chunk
    else:
        chunk = _best_chunk(
            seq_lens, query_start_loc, batch, window, longest, slots_per_head, max_items, min_chunk, item_cost,
            reduce_cost, TILE, QUERY_LEN, RAGGED, WINDOW, CANDIDATES, SCAN_BLOCK,
        )  # fmt: skip
    count = _write_items(item_seq, item_chunk, seq_info, tiles, chunk, batch, max_batch, BLOCK, BUCKETS)
    tl.store(meta, count)
    tl.store(meta + 1, chunk)


class DecodeWorkspace:
    """Plan and scratch of the decode kernel, allocated once: every address stays the same for CUDA graphs.

    One workspace serves all layers of one head layout and window. Call `plan` once a step (inside the graph), then
    `paged_decode` for each layer. Rows: `max_batch` sequences of up to `query_len` tokens.

    deterministic=True cuts every sequence at fixed places, so that the result for a sequence has the same bits
    whatever else is in the batch. Both modes give the same bits when repeated.

    Raises KernelValueError for a head layout or sizes that the kernel cannot take.
    """

    def __init__(
        self,
        *,
        max_batch: int,
        max_seq_len: int,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        kv_dtype: torch.dtype,
        device: torch.device | str,
        query_len: int = 1,
        window: int | None = None,
        deterministic: bool = False,
        pack_heads: bool = True,
        config: DecodeConfig | None = None,
    ) -> None:
        check_heads(num_q_heads, num_kv_heads, head_dim)
        for name, value in (("max_batch", max_batch), ("max_seq_len", max_seq_len), ("query_len", query_len)):
            if value < 1:
                raise KernelValueError(f"{name} is {value}; it must be at least 1")
        if window is not None and window < 1:
            raise KernelValueError(f"window is {window}; it must be at least 1 token, or None")
        device = torch.device(device)
        self.max_batch, self.max_seq_len, self.query_len = max_batch, max_seq_len, query_len
        self.num_q_heads, self.num_kv_heads, self.head_dim = num_q_heads, num_kv_heads, head_dim
        self.window, self.deterministic, self.kv_dtype = window, deterministic, kv_dtype
        self.heads_per_program = num_q_heads // num_kv_heads if pack_heads else 1
        self.programs = num_q_heads // self.heads_per_program
        kind = cache_kind(torch.empty(0, dtype=kv_dtype, device=device))
        rows = self.heads_per_program * query_len
        self.config = config or decode_config(capability(device), kind, head_dim, rows)
        self.rows = self.config.padded_rows(rows)
        self.slots_per_head = max(1.0, num_slots(device, self.config) / self.programs)
        self._allocate(device)

    def _allocate(self, device: torch.device) -> None:
        tiles = -(-self.max_seq_len // self.config.tile)
        self.fixed_chunk = max(1, DETERMINISTIC_CHUNK_TOKENS // self.config.tile)
        if self.deterministic:
            self.max_items = self.max_batch * -(-tiles // self.fixed_chunk)
        else:
            self.max_items = self.max_batch + min(
                int(1.25 * self.slots_per_head) + 1, self.max_batch * max(tiles - 1, 0)
            )
        ints = {"dtype": torch.int32, "device": device}
        self.meta = torch.zeros(4, **ints)
        self.items = torch.zeros(2, self.max_items, **ints)
        self.seq_info = torch.zeros(3, self.max_batch, **ints)
        self.counters = torch.zeros(self.max_batch * self.programs, **ints)
        scratch = self.max_items * self.programs * self.rows
        self.partial_out = torch.empty(scratch * self.head_dim, dtype=torch.float32, device=device)
        self.partial_stats = torch.empty(2, scratch, dtype=torch.float32, device=device)

    @property
    def num_bytes(self) -> int:
        """Bytes of device memory that the workspace holds."""
        parts = (self.meta, self.items, self.seq_info, self.counters, self.partial_out, self.partial_stats)
        return sum(part.numel() * part.element_size() for part in parts)

    def plan(self, seq_lens: torch.Tensor, query_start_loc: torch.Tensor | None = None) -> None:
        """Computes the split from int32 `seq_lens [batch]` on the device; no host read."""
        batch = seq_lens.shape[0]
        if batch > self.max_batch:
            raise KernelValueError(f"seq_lens has {batch} sequences; the workspace has room for {self.max_batch}")
        if batch == 0:
            return
        candidates = min(256, max(32, triton.next_power_of_2(int(self.slots_per_head))))
        _plan_kernel[(1,)](
            seq_lens, seq_lens if query_start_loc is None else query_start_loc, self.meta, self.items[0], self.items[1],
            self.seq_info, batch, self.max_batch, self.window or 0,
            self.max_items + (batch - self.max_batch), max(1, MIN_CHUNK_TOKENS // self.config.tile), self.fixed_chunk,
            self.slots_per_head, ITEM_COST_TILES, REDUCE_COST_TILES,
            TILE=self.config.tile, QUERY_LEN=self.query_len, RAGGED=query_start_loc is not None,
            WINDOW=self.window is not None, FIXED=self.deterministic, CANDIDATES=candidates,
            BLOCK=max(16, triton.next_power_of_2(batch)), SCAN_BLOCK=max(16, 4096 // candidates),
            BUCKETS=NUM_BUCKETS, num_warps=8,
        )  # fmt: skip
