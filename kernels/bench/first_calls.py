"""One small call of everything that run_all.py times, so that all compilers have run before the first time is taken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import peers
import torch
from labkit_kernels.kv_write import KVTarget, write_kv
from labkit_kernels.paged_decode import paged_decode
from labkit_kernels.scores import Scores
from labkit_kernels.teaching import VARIANTS, variant_workspace
from shapes import DECODE, PREFILL, Inputs, Pool, Shape, make_inputs
from sweep import KV, decode_call, first_shared_call, prefill_call

SMALL_LENGTH = 256
LARGE_BATCH = 128


def _inputs(shape: Shape, kv: str, block_size: int) -> Inputs:
    """The shape with short contexts: what is compiled depends on batch, heads, block size and dtype only."""
    short = replace(shape, lens=(max(SMALL_LENGTH, shape.new),) * len(shape.lens))
    elements = 2 * sum(short.lens) * shape.kv_heads * shape.head_dim + 2**20
    return make_inputs(short, block_size, KV[kv], Pool(elements))


def _try(call: Callable[[], object]) -> None:
    """What a peer cannot do is told when it is timed."""
    try:
        call()
    except Exception as error:
        print(f"{type(error).__name__}: {str(error)[:100]}")


def flashinfer(kv: str, tensor_cores: bool) -> None:
    """FlashInfer builds a module for each dtype and mode, about a minute each."""
    inputs = _inputs(DECODE[0], kv, 16)
    _try(lambda: peers.flashinfer(inputs, tensor_cores=tensor_cores)())


def decode(shape: Shape, kv: str, block_size: int) -> None:
    """Plan and decode; vLLM's kernel, which the table has for blocks of 16."""
    inputs = _inputs(shape, kv, block_size)
    decode_call(inputs, None)[1]()
    if block_size == 16 and kv != "int8":
        _try(lambda: peers.vllm_triton(inputs)())


def prefill(shape: Shape) -> None:
    """A chunk, ours and vLLM's."""
    inputs = make_inputs(replace(shape, lens=(shape.new,) * len(shape.lens)), 16, torch.bfloat16, Pool(2**26))
    prefill_call(inputs, None)()
    _try(lambda: peers.vllm_triton(inputs)())


def write(kv: str, num_tokens: int) -> None:
    """A KV write."""
    caches = [torch.empty(num_tokens, 1, 8, 128, dtype=KV[kv], device="cuda") for _ in range(2)]
    rows = torch.zeros(num_tokens, 8, 128, dtype=torch.bfloat16, device="cuda")
    caches = [cache.view(-1, 16, 8, 128) for cache in caches] if num_tokens % 16 == 0 else caches
    write_kv(rows, rows, torch.arange(num_tokens, device="cuda"), KVTarget(*caches))


def variant(name: str, block_size: int) -> None:
    """A teaching variant."""
    inputs, scores = _inputs(DECODE[0], "bf16", block_size), Scores(scale=0.1)
    workspace = variant_workspace(name, inputs.q, inputs.k, inputs.tables, scores)
    workspace.plan(inputs.lens)
    paged_decode(inputs.q, inputs.k, inputs.v, inputs.tables, inputs.lens, scores, workspace=workspace)


def tasks(
    decode_rows: list[tuple[Shape, str, int]], writes: list[tuple[str, int]], prefixes: list[tuple[int, int]]
) -> list[Callable]:
    """Calls without arguments, the slowest compilers first; rows that compile to the same are there once.

    The plan is compiled for each batch, the attention for each block size and for small and large batches.
    """
    distinct: dict[tuple, Callable[[], None]] = {}
    for shape, kv, block_size in decode_rows:
        batch_fact = len(shape.lens) if block_size == 16 else len(shape.lens) >= LARGE_BATCH
        key = (shape.q_heads, shape.kv_heads, kv, block_size, batch_fact)
        distinct.setdefault(key, partial(decode, shape, kv, block_size))
    return [
        *(partial(flashinfer, kv, tensor_cores) for kv in ("bf16", "fp8") for tensor_cores in (True, False)),
        partial(prefill, PREFILL[-1]),
        *distinct.values(),
        *(partial(first_shared_call, None, batch, shared) for batch, shared in prefixes),
        *(partial(write, *row) for row in writes),
        *(partial(variant, name, size) for name in VARIANTS[1:] for size in (16, 32, 64, 128)),
    ]
