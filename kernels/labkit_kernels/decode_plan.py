"""The split of a decode step over the card, computed on the device once a step and shared by all layers.

Each sequence is cut into chunks of the same number of tiles; a work item is one chunk of one sequence, and one program
runs an item for one KV head. The chunk is the one with the smallest estimated finish among maxlen/1 … maxlen/k:
whole waves of full chunks, or all work spread over the slots, whichever is longer (FA3's rule with the count of waves
made explicit). Items lie longest first, so the card's own scheduler fills the tail with short ones.
"""

from __future__ import annotations

from functools import cached_property

import torch
import triton
import triton.language as tl

from labkit_kernels.checks import KernelValueError, check_heads
from labkit_kernels.decode_split import ITEM_COST, MIN_CHUNK_TOKENS, NUM_BUCKETS, OVERLAP, REDUCE_COST, SPLIT_COST
from labkit_kernels.heuristics import DecodeConfig, decode_config, num_slots
from labkit_kernels.launches import Launches, addresses_of
from labkit_kernels.ops import cache_kind, capability
from labkit_kernels.sizes import next_power_of_2

ITEM_FIELDS = 7
DETERMINISTIC_CHUNK_TOKENS = 1024


@triton.jit
def _sequence_tiles(
    seq_lens, query_start_loc, offsets, batch, window,
    TILE: tl.constexpr, QUERY_LEN: tl.constexpr, RAGGED: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Tiles that each sequence reads (all up to its length, less those before its window), first token, length."""
    inside = offsets < batch
    length = tl.load(seq_lens + offsets, mask=inside, other=0)
    base = length * 0
    if WINDOW:
        query_len = tl.full(length.shape, QUERY_LEN, tl.int32)
        if RAGGED:
            query_len = tl.load(query_start_loc + offsets + 1, mask=inside, other=0)
            query_len -= tl.load(query_start_loc + offsets, mask=inside, other=0)
        base = tl.maximum(length - query_len - window + 1, 0) // TILE * TILE
    return (length - base + TILE - 1) // TILE, base, length


@triton.jit
def _finish_time(full, rest_items, rest_tiles, chunk, slots, overlap, item_cost, reduce_cost, split_cost, splits):
    """Estimated finish in tiles of one slot: whole waves of full chunks, then the last wave with the short chunks.

    A wave that fills a share x of the slots runs faster, since they share the memory: by overlap + (1 - overlap)·x.
    Short chunks that do not fit beside the full ones run after them, on average half of one late.
    """
    waves = tl.floor(full / slots)
    left = full - waves * slots
    items = left + rest_items
    rest_mean = rest_tiles / tl.maximum(rest_items, 1.0)
    longest = tl.where(left > 0, chunk, rest_mean)
    alone = longest * (overlap + (1.0 - overlap) * tl.minimum(items / slots, 1.0))
    packed = tl.maximum((left * chunk + rest_tiles) / slots + 0.5 * rest_mean, longest)
    last = tl.where(items > 0, tl.where(items <= slots, alone, packed), 0.0)
    count = tl.ceil((full + rest_items) / slots)
    return waves * chunk + last + count * item_cost + tl.where(splits > 1, reduce_cost + split_cost * splits, 0.0)


@triton.jit
def _best_chunk(
    seq_lens, query_start_loc, batch, window, longest, slots_per_head, max_items, min_chunk,
    overlap, item_cost, reduce_cost, split_cost,
    TILE: tl.constexpr, QUERY_LEN: tl.constexpr, RAGGED: tl.constexpr, WINDOW: tl.constexpr,
    CANDIDATES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Tiles of a chunk with the smallest estimated finish time."""
    k = tl.arange(0, CANDIDATES)
    chunk = tl.maximum((longest + k) // (k + 1), min_chunk)
    full = tl.zeros([CANDIDATES], tl.int32)
    rest_items = tl.zeros([CANDIDATES], tl.int32)
    rest_tiles = tl.zeros([CANDIDATES], tl.int32)
    empty = batch * 0
    for start in range(0, batch, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        tiles, _, _ = _sequence_tiles(
            seq_lens, query_start_loc, offsets, batch, window, TILE, QUERY_LEN, RAGGED, WINDOW
        )  # fmt: skip
        whole = tiles[:, None] // chunk[None, :]
        rest = tiles[:, None] - whole * chunk[None, :]
        full += tl.sum(whole, 0)
        rest_items += tl.sum(tl.where(rest > 0, 1, 0), 0)
        rest_tiles += tl.sum(rest, 0)
        # Padding of a graph takes an item too.
        empty += tl.sum(tl.where((offsets < batch) & (tiles == 0), 1, 0), 0)
    finish = _finish_time(
        full.to(tl.float32), rest_items.to(tl.float32), rest_tiles.to(tl.float32), chunk.to(tl.float32),
        slots_per_head, overlap, item_cost, reduce_cost, split_cost, ((longest + chunk - 1) // chunk).to(tl.float32),
    )  # fmt: skip
    finish = tl.where((full + rest_items + empty <= max_items) | (k == 0), finish, float("inf"))
    best = tl.argmin(finish, 0)
    return tl.sum(tl.where(k == best, chunk, 0), 0)


@triton.jit
def _write_item(items, max_items, at, seq, start, end, length, first, count, index, mask):
    """A work item field by field: sequence, tokens start … end, length; where the sequence's partial results begin,
    how many there are, and which of them is this one's."""
    tl.store(items + at, seq, mask=mask)
    tl.store(items + max_items + at, start, mask=mask)
    tl.store(items + 2 * max_items + at, tl.minimum(end, length), mask=mask)
    tl.store(items + 3 * max_items + at, length, mask=mask)
    tl.store(items + 4 * max_items + at, first, mask=mask)
    tl.store(items + 5 * max_items + at, count, mask=mask)
    tl.store(items + 6 * max_items + at, index, mask=mask)


@triton.jit
def read_item(items, max_items, at):
    """The fields of a work item, as `_write_item` wrote them."""
    seq = tl.load(items + at)
    start = tl.load(items + max_items + at)
    end = tl.load(items + 2 * max_items + at)
    length = tl.load(items + 3 * max_items + at)
    first = tl.load(items + 4 * max_items + at)
    count = tl.load(items + 5 * max_items + at)
    index = tl.load(items + 6 * max_items + at)
    return seq, start, end, length, first, count, index


@triton.jit
def _write_items(
    items, max_items, tiles, base, length, chunk, batch,
    TILE: tl.constexpr, BLOCK: tl.constexpr, BUCKETS: tl.constexpr,
):  # fmt: skip
    """Writes the item list, longest first; returns the number of items."""
    seq = tl.arange(0, BLOCK)
    full = tl.where(seq < batch, tiles // chunk, 0)
    at = tl.cumsum(full, 0) - full
    rest = tiles - full * chunk
    has_rest = (seq < batch) & ((rest > 0) | (tiles == 0))
    count = full + tl.where(has_rest, 1, 0)
    first = tl.cumsum(count, 0) - count
    bucket = rest * BUCKETS // chunk
    items_before = tl.sum(full, 0)
    rest_at = tl.full([BLOCK], 0, tl.int32)
    for i in tl.static_range(BUCKETS):
        here = has_rest & (bucket == BUCKETS - 1 - i)
        one = tl.where(here, 1, 0)
        rest_at = tl.where(here, items_before + tl.cumsum(one, 0) - one, rest_at)
        items_before += tl.sum(one, 0)
    step = chunk * TILE
    for j in range(tl.max(full, 0)):
        start = base + j * step
        _write_item(items, max_items, at + j, seq, start, start + step, length, first, count, seq * 0 + j, j < full)
    start = base + full * step
    _write_item(items, max_items, rest_at, seq, start, start + step, length, first, count, full, has_rest)
    return items_before


@triton.jit(do_not_specialize=["batch", "window", "item_limit", "max_items"])
def _plan_kernel(
    seq_lens, query_start_loc, meta, items, batch, window, item_limit, max_items, min_chunk, fixed_chunk,
    slots_per_head, overlap, item_cost, reduce_cost, split_cost,
    TILE: tl.constexpr, QUERY_LEN: tl.constexpr, RAGGED: tl.constexpr, WINDOW: tl.constexpr, FIXED: tl.constexpr,
    CANDIDATES: tl.constexpr, BLOCK: tl.constexpr, SCAN_BLOCK: tl.constexpr, BUCKETS: tl.constexpr,
):  # fmt: skip
    tiles, base, length = _sequence_tiles(
        seq_lens, query_start_loc, tl.arange(0, BLOCK), batch, window, TILE, QUERY_LEN, RAGGED, WINDOW
    )
    chunk = fixed_chunk
    if not FIXED:
        chunk = _best_chunk(
            seq_lens, query_start_loc, batch, window, tl.maximum(tl.max(tiles, 0), 1), slots_per_head, item_limit,
            min_chunk, overlap, item_cost, reduce_cost, split_cost, TILE, QUERY_LEN, RAGGED, WINDOW, CANDIDATES,
            SCAN_BLOCK,
        )  # fmt: skip
    count = _write_items(items, max_items, tiles, base, length, chunk, batch, TILE, BLOCK, BUCKETS)
    tl.store(meta, count)
    tl.store(meta + 1, chunk)


class DecodeWorkspace:
    """Plan and scratch of the decode kernel, allocated once: every address stays the same for CUDA graphs.

    One workspace serves all layers of one head layout and window. Call `plan` once a step (inside the graph), then
    `paged_decode` for each layer. Rows: `max_batch` sequences of up to `query_len` tokens.

    deterministic=True cuts every sequence every `chunk_tokens` (1024), so that the result for a sequence has the same
    bits whatever else is in the batch. Without it the plan chooses; both give the same bits when repeated.

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
        chunk_tokens: int | None = None,
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
        self.config = config or decode_config(capability(device), kind, head_dim, rows, max_batch)
        self.rows = self.config.padded_rows(rows)
        self.fixed_chunk = max(1, (chunk_tokens or DETERMINISTIC_CHUNK_TOKENS) // self.config.tile)
        self.fixed = deterministic or chunk_tokens is not None
        self.slots_per_head = max(1.0, num_slots(device, self.config) / self.programs)
        # Of `plan` and of `paged_decode`: what they launch depends on the workspace too.
        self.plans, self.launches = Launches(), Launches()
        self._allocate(device)

    # A workspace's own settings are not told apart within its own launches.
    looks = ()

    def _allocate(self, device: torch.device) -> None:
        tiles = -(-self.max_seq_len // self.config.tile)
        if self.fixed:
            self.max_items = self.max_batch * -(-tiles // self.fixed_chunk)
        else:
            # Programs without an item still cost: for one sequence no more than the card holds at once.
            self.max_items = min(self.max_batch - 1 + int(self.slots_per_head), self.max_batch * max(tiles, 1))
        ints = {"dtype": torch.int32, "device": device}
        self.meta = torch.zeros(4, **ints)
        self.items = torch.zeros(ITEM_FIELDS, self.max_items, **ints)
        self.counters = torch.zeros(self.max_batch * self.programs, **ints)
        scratch = self.max_items * self.programs * self.rows
        self.partial_out = torch.empty(scratch * self.head_dim, dtype=torch.float32, device=device)
        self.partial_lse = torch.empty(scratch, dtype=torch.float32, device=device)

    @cached_property
    def addresses(self) -> tuple[int, ...]:
        """Plan and scratch in the decode kernel's order."""
        return addresses_of(self.meta, self.items, self.counters, self.partial_out, self.partial_lse)

    @cached_property
    def cascade_counters(self) -> torch.Tensor:
        """Counters of `cascade_launch`, 0 between launches: two for each KV head, one for each sequence and KV head."""
        return torch.zeros((self.max_batch + 2) * self.programs, dtype=torch.int32, device=self.meta.device)

    @property
    def num_bytes(self) -> int:
        """Bytes of device memory that the workspace holds."""
        parts = (self.meta, self.items, self.counters, self.partial_out, self.partial_lse)
        return sum(part.numel() * part.element_size() for part in parts)

    def plan(self, seq_lens: torch.Tensor, query_start_loc: torch.Tensor | None = None) -> None:
        """Computes the split from int32 `seq_lens [batch]` on the device; no host read."""
        parts = (seq_lens, query_start_loc, self.meta, self.items)
        if self.plans.again(parts):
            return
        batch = seq_lens.shape[0]
        if batch > self.max_batch:
            raise KernelValueError(f"seq_lens has {batch} sequences; the workspace has room for {self.max_batch}")
        if batch == 0:
            return
        candidates = min(256, max(32, next_power_of_2(int(self.slots_per_head))))
        self.plans.first(
            parts, (), _plan_kernel, (1,),
            seq_lens, seq_lens if query_start_loc is None else query_start_loc, self.meta, self.items, batch,
            self.window or 0, self.max_items + batch - self.max_batch, self.max_items,
            max(1, MIN_CHUNK_TOKENS // self.config.tile), self.fixed_chunk, self.slots_per_head,
            OVERLAP, ITEM_COST, REDUCE_COST, SPLIT_COST, TILE=self.config.tile, QUERY_LEN=self.query_len,
            RAGGED=query_start_loc is not None, WINDOW=self.window is not None, FIXED=self.fixed,
            CANDIDATES=candidates, BLOCK=max(16, next_power_of_2(batch)),
            SCAN_BLOCK=max(16, 4096 // candidates), BUCKETS=NUM_BUCKETS, num_warps=8,
        )  # fmt: skip
