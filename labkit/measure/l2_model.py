"""A simulated L2 hit rate of paged attention: least-recently-used cache of tiles, driven by the kernel's own order.

A tile is the K and V of some blocks of one sequence for one KV head. As many programs as the card holds run in step;
each walks its tiles from first to last, and the next programs start when these are done. Programs that ask for the
same tile in the same step share one read. A tile hits when it was read before and has not been pushed out since.
Method: Nugteren et al., HPCA 2014; expected shapes: decode without sharing near 0, n sequences on one prefix
(n - 1)/n, one program for each of g query heads 1 - 1/g, prefill 1 - 1/(query tiles that run at once).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from labkit.errors import OutOfRangeError, UnsupportedError
from labkit.measure.run_record import Counters, RequestRow, RunRecord
from labkit.memory.dtypes import compute_dtype, kv_format
from labkit.specs.engine_config import EngineConfig
from labkit.specs.gpu_spec import GpuSpec
from labkit.specs.model_spec import LayerSpec, ModelSpec
from labkit.text import plain

# A read-only stream on an H200 reached 4,536 of 4,800 GB/s (2026-11-30, torch 2.11, driver 580).
STREAM_SHARE = 0.945
# A100, H100 and H200 have two L2 partitions, and lines that all SMs read may be kept in both.
TWO_PARTITIONS = ("8.0", "9.0")
MAX_ACCESSES = 150_000


@dataclass(frozen=True)
class BatchShape:
    """One step of attention.

    Attributes:
        context_lens: tokens in the cache of each sequence, the step's own included.
        query_lens: tokens that each sequence computes in this step: 1 in decode, more in prefill.
        shared_prefix_tokens: tokens at the beginning whose blocks all sequences share.
    """

    context_lens: tuple[int, ...]
    query_lens: tuple[int, ...]
    shared_prefix_tokens: int = 0

    def __post_init__(self) -> None:
        if not self.context_lens or len(self.context_lens) != len(self.query_lens):
            raise OutOfRangeError("a batch has as many query lengths as contexts, and one at least")
        if min(self.query_lens) < 1 or any(
            query > context for query, context in zip(self.query_lens, self.context_lens, strict=True)
        ):
            raise OutOfRangeError("a query length is at least 1 and at most its context", knob="query_lens")

    @classmethod
    def decode(cls, num_seqs: int, context_len: int, shared_prefix_tokens: int = 0) -> BatchShape:
        """`num_seqs` sequences of `context_len` tokens, one new token each."""
        return cls((context_len,) * num_seqs, (1,) * num_seqs, shared_prefix_tokens)


@dataclass(frozen=True)
class _Kernel:
    """What the launch of one kind of layer looks like."""

    num_kv_heads: int
    group: int
    head_bytes: int
    flops_per_pair: int
    window: int | None


def simulate_l2(
    model: ModelSpec,
    gpu: GpuSpec,
    config: EngineConfig,
    batch: BatchShape,
    *,
    packed: bool = True,
    programs_per_sm: int = 2,
    query_tile: int = 128,
    capacity_share: float | None = None,
) -> Counters:
    """Simulated counters of the attention kernels of all layers in one step of `batch`.

    Args:
        packed: one program computes all query heads of a KV head; False gives each query head its own program.
        programs_per_sm: programs that an SM holds at once.
        query_tile: query rows of one program in prefill; when packed, the group's heads are rows too.
        capacity_share: share of the L2 that counts; None takes 0.5 for cards with two partitions and 1 for others.

    Raises:
        UnsupportedError: the card's L2, SMs or bandwidth are not known, or the model keeps no KV.
    """
    if not (gpu.l2_bytes and gpu.sm_count and gpu.mem_bandwidth_bytes_per_s):
        raise UnsupportedError(
            f"the L2 of {plain(gpu.name, 60)} is not known", works="a card from the catalogue, such as H100", knob="gpu"
        )
    if capacity_share is None:
        capacity_share = 0.5 if gpu.compute_capability in TWO_PARTITIONS else 1.0
    kernels = Counter(_kernel(model, config, layer) for layer in model.layers if _keeps_kv(layer))
    if not kernels:
        raise UnsupportedError(f"{plain(model.name, 60)} keeps no KV, so its attention reads none")
    read = missed = flops = 0.0
    for kernel, num_layers in kernels.items():
        programs = _programs(kernel, batch, packed, query_tile)
        tile = _tile_tokens(programs, config.block_size)
        capacity = max(1, int(gpu.l2_bytes * capacity_share / (tile * kernel.head_bytes)))
        asked, fetched = _run(programs, tile, batch.shared_prefix_tokens, gpu.sm_count * programs_per_sm, capacity)
        read += num_layers * asked * kernel.head_bytes
        missed += num_layers * fetched * kernel.head_bytes
        flops += num_layers * _pairs(kernel, batch) * kernel.flops_per_pair
    time_s = max(missed / (STREAM_SHARE * gpu.mem_bandwidth_bytes_per_s), flops / (gpu.bf16_flops or np.inf))
    heads = "query heads of a group packed" if packed else "a program for each query head"
    return Counters(
        method=f"simulated (LRU of {config.block_size}-token blocks × KV head, {heads})",
        card=gpu.name,
        l2_hit_rate=1 - missed / read,
        dram_bytes=missed,
        dram_bytes_per_s=missed / time_s,
        kernel_time_s=time_s,
    )


def simulate_l2_of_run(record: RunRecord, gpu: GpuSpec) -> Counters | None:
    """Simulated counters of the decode step at the run's fullest moment, on `gpu`; None when nothing was decoded.

    Raises:
        UnsupportedError: as `simulate_l2`.
    """
    fullest = max(record.steps, key=lambda step: step.num_blocks_used, default=None)
    if fullest is None:
        return None
    at_s = fullest.start_s + fullest.duration_s
    running = [row for row in record.requests if _decodes_at(row, at_s)]
    if not running:
        return None
    contexts = [row.input_tokens + max(1, sum(time_s <= at_s for time_s in row.token_times_s)) for row in running]
    shared = min(row.num_cached_tokens for row in running) if len(running) > 1 else 0
    batch = BatchShape(tuple(contexts), (1,) * len(contexts), shared)
    return simulate_l2(record.model, gpu, record.config, batch)


def _decodes_at(row: RequestRow, at_s: float) -> bool:
    if row.first_token_s is None or row.first_token_s > at_s:
        return False
    last_s = row.finish_s if row.finish_s is not None else max(row.token_times_s, default=at_s)
    return last_s >= at_s


def _keeps_kv(layer: LayerSpec) -> bool:
    return layer.kind in ("full", "sliding", "chunked", "mla")


def _kernel(model: ModelSpec, config: EngineConfig, layer: LayerSpec) -> _Kernel:
    element = kv_format(config.kv_cache_dtype, compute_dtype(model, config))
    if layer.kind == "mla":
        width = layer.kv_lora_rank + layer.qk_rope_head_dim
        flops = 2 * layer.num_heads * (width + layer.kv_lora_rank)
        return _Kernel(1, layer.num_heads, element.mla_bytes(width), flops, None)
    v_head_dim = layer.v_head_dim or layer.head_dim
    return _Kernel(
        num_kv_heads=layer.num_kv_heads,
        group=max(1, layer.num_heads // layer.num_kv_heads),
        head_bytes=element.head_bytes(layer.head_dim, v_head_dim),
        flops_per_pair=2 * layer.num_heads * (layer.head_dim + v_head_dim),
        window=layer.window if layer.kind in ("sliding", "chunked") else None,
    )


def _pairs(kernel: _Kernel, batch: BatchShape) -> float:
    """Pairs of query and key that a causal kernel computes."""
    total = 0.0
    for context, query in zip(batch.context_lens, batch.query_lens, strict=True):
        reach = context if kernel.window is None else min(context, kernel.window)
        total += query * reach - (query * (query - 1) / 2 if reach == context else 0)
    return total


@dataclass(frozen=True)
class _Programs:
    """One entry a program, in launch order: its sequence and KV head as one id, and the keys it walks over."""

    head: np.ndarray
    num_heads: int
    first_key: np.ndarray
    end_key: np.ndarray


def _programs(kernel: _Kernel, batch: BatchShape, packed: bool, query_tile: int) -> _Programs:
    heads, firsts, ends = [], [], []
    copies = 1 if packed else kernel.group
    rows = max(1, query_tile // kernel.group) if packed else query_tile
    for index, (context, query) in enumerate(zip(batch.context_lens, batch.query_lens, strict=True)):
        stops = np.minimum(np.arange(rows, query + rows, rows), query)
        end = context - query + stops
        first = np.zeros_like(end)
        if kernel.window is not None:
            first = np.maximum(0, end - np.diff(stops, prepend=0) - kernel.window + 1)
        launches = kernel.num_kv_heads * copies
        heads.append(index * kernel.num_kv_heads + np.repeat(np.arange(kernel.num_kv_heads), copies * len(end)))
        firsts.append(np.tile(first, launches))
        ends.append(np.tile(end, launches))
    return _Programs(np.concatenate(heads), kernel.num_kv_heads, np.concatenate(firsts), np.concatenate(ends))


def _tile_tokens(programs: _Programs, block_size: int) -> int:
    """Tokens of a tile: whole blocks, as many that the trace stays short."""
    blocks = int(np.sum(-(-(programs.end_key - programs.first_key) // block_size)))
    return block_size * max(1, -(-blocks // MAX_ACCESSES))


def _run(
    programs: _Programs, tile: int, shared_prefix_tokens: int, num_concurrent: int, capacity: int
) -> tuple[int, int]:
    """Tokens (of one KV head) that the programs ask for, and those that the cache has to fetch."""
    first_tile = programs.first_key // tile
    num_tiles = -(-programs.end_key // tile) - first_tile
    program = np.repeat(np.arange(len(num_tiles)), num_tiles)
    step = np.arange(len(program)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)
    index = first_tile[program] + step
    head = programs.head[program]
    # All sequences read the first one's blocks where the prefix is shared.
    head = np.where((index + 1) * tile <= shared_prefix_tokens, head % programs.num_heads, head)
    name = head * (int(index.max()) + 1) + index
    start = np.maximum(index * tile, programs.first_key[program])
    size = np.minimum((index + 1) * tile, programs.end_key[program]) - start
    when = (program // num_concurrent) * (int(step.max()) + 1) + step
    order = np.lexsort((name, when))
    name, when, size = name[order], when[order], size[order]
    asked = int(size.sum())
    alone = np.ones(len(name), dtype=bool)
    alone[1:] = (name[1:] != name[:-1]) | (when[1:] != when[:-1])
    return asked, _fetched(name[alone].tolist(), size[alone].tolist(), capacity)


def _fetched(names: Sequence[int], sizes: Sequence[int], capacity: int) -> int:
    """Sum of the sizes of the accesses that miss in a cache of `capacity` names, least recently used first out."""
    cache: OrderedDict[int, None] = OrderedDict()
    fetched = 0
    for name, size in zip(names, sizes, strict=True):
        if name in cache:
            cache.move_to_end(name)
            continue
        fetched += size
        cache[name] = None
        if len(cache) > capacity:
            cache.popitem(last=False)
    return fetched
