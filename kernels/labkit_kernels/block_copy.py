"""Copying KV blocks: within the device pool, and between it and pinned host memory on a side stream.

One launch moves all blocks of all caches (every layer's K and V): the kernel finds the caches by a table of addresses,
and pinned host memory is read and written through the same address space. Reference: `reference_ops.copy_blocks`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from labkit_kernels.checks import KernelTypeError, KernelValueError, check_device, check_dtype, check_shape

WORD_BYTES = 4
WORDS_OF_STEP = 2048
# Each takes a multiprocessor from what runs beside a swap. Writes to the host need few in flight to fill the bus; reads
# need as many as pass while it answers one.
SWAP_OUT_PROGRAMS, SWAP_IN_PROGRAMS = 4, 16
ALIGNMENT_BYTES = 16


@triton.jit
def _copy_kernel(
    sources, targets, pairs, num_items, num_caches, source_stride, target_stride, words,
    STEP: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Item = (pair, cache); program i copies the items i, i + programs, … STEP words at a time."""
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        pair = item // num_caches
        source_block = tl.load(pairs + pair * 2)
        target_block = tl.load(pairs + pair * 2 + 1)
        source_address = tl.load(sources + item % num_caches) + source_block * source_stride
        target_address = tl.load(targets + item % num_caches) + target_block * target_stride
        source = source_address.to(tl.pointer_type(tl.int32))
        target = target_address.to(tl.pointer_type(tl.int32))
        if ALIGNED:
            source = tl.multiple_of(source, 16)
            target = tl.multiple_of(target, 16)
        if source_block >= 0 and target_block >= 0:
            for first in range(0, words, STEP):
                at = first + tl.arange(0, STEP)
                tl.store(target + at, tl.load(source + at, mask=at < words), mask=at < words)


@dataclass(frozen=True)
class BlockCaches:
    """The caches of a pool, each `[blocks, block size, KV heads, D]` of one shape and stride, and their addresses.

    Keep it (and so the caches) alive while copies run; `table` int64 `[caches]` is on the device that runs them.
    """

    caches: tuple[torch.Tensor, ...]
    table: torch.Tensor
    block_bytes: int
    stride_bytes: int

    @property
    def num_blocks(self) -> int:
        """Blocks of each cache."""
        return self.caches[0].shape[0]

    @property
    def aligned(self) -> bool:
        """Whether every block starts at a multiple of 16 bytes."""
        return (
            all(c.data_ptr() % ALIGNMENT_BYTES == 0 for c in self.caches) and self.stride_bytes % ALIGNMENT_BYTES == 0
        )


def _check_cache(name: str, cache: torch.Tensor, first: torch.Tensor) -> None:
    if cache.ndim < 2 or cache.shape[0] < 1:
        raise KernelValueError(f"{name} has shape {tuple(cache.shape)}; it must be (blocks, …) with at least one block")
    check_dtype(name, cache, (first.dtype,))
    check_device(name, cache, first.device)
    check_shape(name, cache, first.shape)
    if cache.stride() != first.stride():
        raise KernelValueError(f"{name} has strides {cache.stride()}; they must be {first.stride()}, as caches[0]'s")
    extent = sum((size - 1) * stride for size, stride in zip(cache.shape[1:], cache.stride()[1:], strict=True)) + 1
    if extent != cache[0].numel():
        raise KernelValueError(
            f"{name} has strides {cache.stride()}; a block must fill {cache[0].numel()} neighbouring elements, "
            f"it spreads over {extent}"
        )
    item = cache.element_size()
    if extent * item % WORD_BYTES or cache.stride(0) * item % WORD_BYTES or cache.data_ptr() % WORD_BYTES:
        raise KernelValueError(f"{name} has blocks of {extent * item} bytes; size and start must be multiples of 4")


def block_caches(caches: Sequence[torch.Tensor], device: torch.device | None = None) -> BlockCaches:
    """Checks the caches and makes their address table on `device` (default: theirs; for host caches, the card).

    Host caches used by a card must be pinned. Raises KernelValueError or KernelTypeError naming the cache.
    """
    if not caches:
        raise KernelValueError("caches is empty; it must hold at least one cache")
    first = caches[0]
    for i, cache in enumerate(caches):
        _check_cache(f"caches[{i}]", cache, first)
    device = first.device if device is None else device
    if device.type == "cuda" and first.device.type == "cpu" and not all(cache.is_pinned() for cache in caches):
        raise KernelTypeError("caches are in pageable host memory; a card can only reach pinned memory (pin_memory())")
    table = torch.tensor([cache.data_ptr() for cache in caches], dtype=torch.int64, device=device)
    item = first.element_size()
    return BlockCaches(tuple(caches), table, first[0].numel() * item, first.stride(0) * item)


def _check_pairs(pairs: torch.Tensor, device: torch.device) -> None:
    check_dtype("pairs", pairs, (torch.int64,))
    check_device("pairs", pairs, device)
    check_shape("pairs", pairs, (None, 2))
    if not pairs.is_contiguous():
        raise KernelValueError(f"pairs has strides {pairs.stride()}; it must be contiguous")


def launch_copy(source: BlockCaches, target: BlockCaches, pairs: torch.Tensor, programs: int) -> None:
    """Copies block pairs[i, 0] of every source cache to block pairs[i, 1] of its target cache, on the stream of now."""
    if len(source.caches) != len(target.caches) or source.block_bytes != target.block_bytes:
        raise KernelValueError(
            f"source has {len(source.caches)} caches with blocks of {source.block_bytes} bytes, "
            f"target {len(target.caches)} with {target.block_bytes}; they must agree"
        )
    check_device("target", target.table, source.table.device)
    _check_pairs(pairs, source.table.device)
    items = pairs.shape[0] * len(source.caches)
    if items == 0:
        return
    words = source.block_bytes // WORD_BYTES
    step = min(WORDS_OF_STEP, triton.next_power_of_2(words))
    _copy_kernel[(min(items, programs),)](
        source.table, target.table, pairs, items, len(source.caches), source.stride_bytes, target.stride_bytes, words,
        STEP=step, ALIGNED=source.aligned and target.aligned, num_warps=max(1, min(8, step // 256)),
    )  # fmt: skip


def copy_blocks(caches: BlockCaches, pairs: torch.Tensor) -> None:
    """Copies blocks within the pool: pairs int64 `[n, 2]` on its device, (from, to); a negative id skips the pair.

    No block may be both read and written, nor written twice: order is not defined. Ids are not read on the host (so the
    call can be captured in a CUDA graph), hence not checked against the pool. Raises naming the argument.
    """
    launch_copy(caches, caches, pairs, programs=65535)


class BlockSwapper:
    """Moves blocks between a device pool and pinned host memory beside the computation, in the order of the calls.

    Each swap first waits for what is queued on the caller's stream (the KV writes), then runs on the swapper's own
    stream, on a few multiprocessors. The caller waits for the returned event before it uses the blocks: `wait`.
    """

    def __init__(self, device_caches: Sequence[torch.Tensor], host_caches: Sequence[torch.Tensor]) -> None:
        """Caches of device and host in the same order; raises KernelValueError or KernelTypeError naming them."""
        self.device_pool = block_caches(device_caches)
        self._device = self.device_pool.table.device
        self.host_pool = block_caches(host_caches, self._device)
        self.stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> torch.cuda.Event | None:
        """Copies (device block, host block) pairs to the host; returns the event of its end (None without a card)."""
        return self._swap(self.device_pool, self.host_pool, pairs, SWAP_OUT_PROGRAMS)

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> torch.cuda.Event | None:
        """Copies (host block, device block) pairs to the device; returns the event of its end (None without a card)."""
        return self._swap(self.host_pool, self.device_pool, pairs, SWAP_IN_PROGRAMS)

    def wait(self, event: torch.cuda.Event | None) -> None:
        """Makes the caller's stream wait for a swap; the host goes on."""
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def _swap(self, source: BlockCaches, target: BlockCaches, pairs: Sequence[tuple[int, int]], programs: int):
        _check_ids(pairs, source.num_blocks, target.num_blocks)
        table = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2)
        if self.stream is None:
            launch_copy(source, target, table, programs)
            return None
        self.stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self.stream):
            launch_copy(source, target, table.pin_memory().to(self._device, non_blocking=True), programs)
            return self.stream.record_event()


def _check_ids(pairs: Sequence[tuple[int, int]], num_sources: int, num_targets: int) -> None:
    for source, target in pairs:
        if not (0 <= source < num_sources and 0 <= target < num_targets):
            raise KernelValueError(
                f"pairs holds ({source}, {target}); works: 0 to {num_sources - 1} from, 0 to {num_targets - 1} to"
            )
    written = [target for _, target in pairs]
    if len(set(written)) != len(written):
        raise KernelValueError("pairs writes a block twice; each target block may appear once")
