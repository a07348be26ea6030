"""Launches of our attention kernels on a card, by the shapes and variants that the simulation knows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from labkit_kernels.cold_timing import cold_l2, graph_time_s

from labkit.errors import OutOfRangeError, UnsupportedError
from labkit.measure.attention_shape import AttentionShape, check_variant
from labkit.measure.counters import METRICS, Counted, counters
from labkit.measure.l2_simulator import simulate_attention
from labkit.measure.run_record import Counters
from labkit.specs.gpu_spec import GpuSpec

_CACHE_TYPES = {
    "bfloat16": torch.bfloat16, "float16": torch.float16, "auto": torch.bfloat16, "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2, "int8_per_token_head": torch.int8,
}  # fmt: skip
TILE_BLOCKS = (16, 32, 64, 128)


@dataclass(frozen=True)
class KernelInputs:
    """Tensors of one launch: q `[tokens, heads, D]`, caches `[blocks, block, KV heads, D]`, int32 tables and lengths.

    `starts` are the first query rows of each sequence, and their end; `scores` is labkit_kernels' `Scores`.
    """

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    tables: torch.Tensor
    lens: torch.Tensor
    starts: torch.Tensor
    scores: Any


def make_inputs(shape: AttentionShape, device: str = "cuda", seed: int = 0) -> KernelInputs:
    """Random caches under shuffled block tables whose first blocks are shared as `shape` says.

    Raises:
        UnsupportedError: a KV type that the kernels cannot read.
    """
    from labkit_kernels.scores import Scores

    if shape.kv_cache_dtype not in _CACHE_TYPES:
        raise UnsupportedError(
            f"the kernels cannot read a {shape.kv_cache_dtype} cache", works=", ".join(_CACHE_TYPES),
            knob="kv_cache_dtype",
        )  # fmt: skip
    dtype = _CACHE_TYPES[shape.kv_cache_dtype]
    generator = torch.Generator().manual_seed(seed)
    contexts, queries, block = shape.batch.context_lens, shape.batch.query_lens, shape.block_size
    shared = shape.shared_tokens // block
    needs = [-(-length // block) - shared for length in contexts]
    order = torch.randperm(shared + sum(needs), generator=generator, dtype=torch.int32)
    tables = torch.zeros(len(contexts), shared + max(needs), dtype=torch.int32)
    tables[:, :shared] = order[:shared]
    at = shared
    for row, need in zip(tables, needs, strict=True):
        row[shared : shared + need] = order[at : at + need]
        at += need
    size = (len(order), block, shape.num_kv_heads, shape.head_dim)
    k_cache, v_cache = (_random_cache(size, dtype, device, seed + part) for part in (1, 2))
    q = torch.randn(sum(queries), shape.num_heads, shape.head_dim, generator=generator).to(device, torch.bfloat16)
    scales: dict[str, torch.Tensor] = {}
    if dtype is torch.int8:
        scales = {f"{name}_token_scales": torch.full(size[:3], 0.02, device=device) for name in ("k", "v")}
    starts = torch.tensor([0, *itertools.accumulate(queries)], dtype=torch.int32, device=device)
    return KernelInputs(
        q, k_cache, v_cache, tables.to(device), torch.tensor(contexts, dtype=torch.int32, device=device), starts,
        Scores(scale=shape.head_dim**-0.5, window=shape.window, **scales),
    )  # fmt: skip


def _random_cache(size: tuple[int, ...], dtype: torch.dtype, device: str, seed: int) -> torch.Tensor:
    """Random bytes, so that filling costs one pass: high bytes under 64 keep every float finite and small."""
    generator = torch.Generator(device).manual_seed(seed)
    width = torch.empty(0, dtype=dtype).element_size()
    values = torch.randint(0, 63, (*size[:-1], size[-1] * width), dtype=torch.int8, device=device, generator=generator)
    return values.view(dtype)


def prepare_launch(shape: AttentionShape, variant: str, inputs: KernelInputs) -> Callable[[], torch.Tensor]:
    """A call that launches `variant` (one of VARIANTS) and nothing else: plans and scratch are made here.

    Raises:
        UnknownNameError: no such variant.
        OutOfRangeError: a block size that cannot be a tile.
        UnsupportedError: uneven query lengths in decode.
    """
    check_variant(variant)
    # Triton is imported only where a kernel runs.
    from labkit_kernels.cascade import SharedPrefix, cascade_decode
    from labkit_kernels.paged_decode import make_workspace, paged_decode
    from labkit_kernels.paged_prefill import paged_prefill
    from labkit_kernels.teaching import variant_workspace

    q, k, v, scores = inputs.q, inputs.k_cache, inputs.v_cache, inputs.scores
    out = torch.empty_like(q)
    queries = shape.batch.query_lens
    if variant == "prefill":
        longest = max(queries)
        return lambda: paged_prefill(
            q, k, v, inputs.tables, inputs.lens, inputs.starts, scores, max_query_len=longest, out=out
        )
    if len(set(queries)) > 1:
        raise UnsupportedError("decode launches here have one query length for all sequences", works="prefill")
    if variant == "tile = block" and shape.block_size not in TILE_BLOCKS:
        raise OutOfRangeError(
            f"a block of {shape.block_size} tokens cannot be a tile", works=", ".join(map(str, TILE_BLOCKS)),
            knob="block_size",
        )  # fmt: skip
    if variant == "shared prefix":
        blocks = shape.shared_tokens // shape.block_size
        prefix = SharedPrefix.make(inputs.tables[0, :blocks].contiguous(), shape.shared_tokens, q.shape[0])
        tables, lens = inputs.tables[:, blocks:].contiguous(), inputs.lens - shape.shared_tokens
        workspace = make_workspace(q, k, tables, scores)
        workspace.plan(lens)
        return lambda: cascade_decode(q, k, v, prefix, tables, lens, scores, workspace=workspace, out=out)
    workspace = variant_workspace(variant, q, k, inputs.tables, scores)
    workspace.plan(inputs.lens)
    return lambda: paged_decode(q, k, v, inputs.tables, inputs.lens, scores, workspace=workspace, out=out)


class CardCounter:
    """Counts launches on the card that is here, with a cold L2; usable as `count` of `run_lab`.

    Args:
        repeats: how often each launch is counted; the values are means.
        metrics: what is counted.
    """

    def __init__(self, repeats: int = 3, metrics: Sequence[str] = METRICS) -> None:
        self._repeats, self._metrics = repeats, tuple(metrics)
        if not torch.cuda.is_available():
            raise UnsupportedError("no NVIDIA card here has anything to count", works="the simulation")
        self._flush = cold_l2()

    def count(self, shape: AttentionShape, gpu: GpuSpec, variant: str) -> Counted:
        """Counters of one launch after one that warms up; simulated where the card does not let count."""
        call = prepare_launch(shape, variant, make_inputs(shape))
        call()
        torch.cuda.synchronize()
        scope = counters(
            self._metrics, card=gpu.name, simulated=lambda: simulate_attention(shape, gpu, variant).counters
        )
        result = scope.count(call, before=self._flush, repeats=self._repeats)
        if result.counters is None or not result.counters.method.startswith("measured"):
            return result
        # The range's own time has the launch from Python in it.
        time_s = graph_time_s(call, self._flush)
        timed = replace(
            result.counters, kernel_time_s=time_s, dram_bytes_per_s=result.counters.dram_bytes / time_s
        )  # fmt: skip
        return replace(result, counters=timed)

    def __call__(self, shape: AttentionShape, gpu: GpuSpec, variant: str) -> Counters | None:
        """Counters of one launch, None for a launch that the kernels do not have."""
        try:
            return self.count(shape, gpu, variant).counters
        except (OutOfRangeError, UnsupportedError):
            return None
