"""A true test of this machine: paged attention against its reference, the planned pool taken and given back, a copy.

It runs labkit's own CPU path, and on a card its kernel; with no torch it says so. Nothing stays allocated.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING

from labkit import format as shown
from labkit.doctor.card_test import check_card_attention, check_card_copy, check_card_pool
from labkit.doctor.check import Check
from labkit.specs.model_spec import LayerSpec, ModelSpec

if TYPE_CHECKING:
    import torch

    from labkit.engine.kv_cache import KVCache
    from labkit.engine.paged_attention import Span

BLOCK_SIZE = 16
LENGTHS = (37, 2, 64)
NUM_BLOCKS = 16
# float32 on both sides, sums of at most 64 terms in another order.
TOLERANCE = 1e-4
COPY_BYTES = 32 * 2**20
SLOW_BYTES_PER_S = 0.5e9


def run_true_test(pool_blocks: int = 64) -> list[Check]:
    """Three checks that compute something on the CPU, and three on the card where torch has one.

    Args:
        pool_blocks: blocks of the pool that is taken and given back.
    """
    if find_spec("torch") is None:
        return [Check("true-test", "unknown", "torch is not installed", "nothing can be computed", "pip install torch")]
    tests: list[Callable[[], Check]] = [check_attention, lambda: check_pool(pool_blocks), check_copy]
    if _has_card():
        tests += [check_card_attention, check_card_pool, check_card_copy]
    return [_guarded(test) for test in tests]


def _has_card() -> bool:
    try:
        import torch

        return torch.cuda.is_available()
    except (ImportError, OSError, RuntimeError):
        return False


def _guarded(test: Callable[[], Check]) -> Check:
    try:
        return test()
    except Exception as error:
        # Compilers and drivers raise classes of their own; whatever it is, it is the finding.
        return Check(
            "true-test", "problem", f"{type(error).__name__}: {error}", "torch or a kernel does not work here",
            "reinstall torch in a clean environment",
        )  # fmt: skip


def check_attention() -> Check:
    """Prompts of three sequences over scattered blocks, then a token each: greatest difference to dense attention."""
    from labkit.engine.paged_attention import PagedAttention
    from labkit.models.attention import DenseAttention

    spec = _spec()
    prompts = [length - 1 for length in LENGTHS]
    paged, dense = PagedAttention(spec, _cache(spec, num_blocks=NUM_BLOCKS)), DenseAttention(spec, prompts)
    difference = 0.0
    for starts, stops, seed in (([0] * len(prompts), prompts, 1), (prompts, list(LENGTHS), 2)):
        q, k, v = _random_tokens(sum(stops) - sum(starts), seed)
        paged.begin(*_placed(starts, stops))
        dense.begin([stop - start for start, stop in zip(starts, stops, strict=True)])
        found = (paged.attend(0, q, k, v) - dense.attend(0, q, k, v)).abs().max().item()
        # A NaN is greater than any tolerance here, and stays.
        difference = found if not found <= difference else difference
    evidence = f"{len(LENGTHS)} sequences, {sum(LENGTHS)} tokens: greatest difference to the reference {difference:.1e}"
    if not difference <= TOLERANCE:
        return Check(
            "paged-attention", "problem", evidence, f"more than {TOLERANCE:g}: torch computes wrongly here",
            "reinstall torch; compare with ATEN_CPU_CAPABILITY=default",
        )  # fmt: skip
    return Check("paged-attention", "ok", evidence)


def check_pool(num_blocks: int) -> Check:
    """Take the pool that the plan states, compare the bytes, give it back."""
    from labkit.memory import plan
    from labkit.specs.engine_config import EngineConfig
    from labkit.specs.gpu_catalogue import cpu_gpu

    spec = _spec()
    config = EngineConfig(
        block_size=BLOCK_SIZE, num_gpu_blocks_override=num_blocks, max_model_len=BLOCK_SIZE * 4, max_num_seqs=4,
        max_num_batched_tokens=128, cpu_memory_gib=1.0, dtype="float32",
    )  # fmt: skip
    planned = plan(spec, cpu_gpu(1.0), config)
    cache = _cache(spec, num_blocks=planned.num_gpu_blocks)
    wanted, taken = planned.block_bytes * planned.num_gpu_blocks, cache.pool_bytes
    evidence = f"planned {shown.memory(wanted)}, taken {shown.memory(taken)} in {planned.num_gpu_blocks} blocks"
    del cache
    if wanted != taken:
        return Check("pool", "problem", evidence, "plan and engine disagree", "report it with `labkit doctor --json`")
    return Check("pool", "ok", f"{evidence}, given back")


def check_copy() -> Check:
    """Copy 32 MiB in host memory."""
    import torch

    source = torch.ones(COPY_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    target.copy_(source)
    start = time.perf_counter()
    target.copy_(source)
    speed = COPY_BYTES / max(time.perf_counter() - start, 1e-9)
    evidence = f"host copy of {shown.memory(COPY_BYTES)}: {shown.bandwidth(speed)}"
    if not bool(target[::4096].all()):
        return Check("copy", "problem", evidence, "the copy differs from its source", "test this machine's memory")
    if speed < SLOW_BYTES_PER_S:
        return Check(
            "copy", "warning", evidence, "the machine is busy or its memory is very slow", "look at its load (top)",
        )  # fmt: skip
    return Check("copy", "ok", evidence)


def _spec() -> ModelSpec:
    layer = LayerSpec(kind="full", num_heads=6, num_kv_heads=2, head_dim=32)
    return ModelSpec(
        name="test", architecture="LlamaForCausalLM", model_type="llama", layers=(layer,), hidden_size=192,
        intermediate_size=256, vocab_size=512, max_position_embeddings=1024, dtype="float32",
    )  # fmt: skip


def _cache(spec: ModelSpec, num_blocks: int) -> KVCache:
    import torch

    from labkit.engine.kv_cache import KVCache

    return KVCache(
        spec, num_blocks=num_blocks, num_swap_blocks=0, block_size=BLOCK_SIZE, kv_cache_dtype="auto",
        dtype=torch.float32, max_blocks_per_seq=8,
    )  # fmt: skip


def _random_tokens(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    import torch

    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(count, heads, 32, generator=generator) for heads in (6, 2, 2))
    return q, k, v


def _placed(starts: list[int], stops: list[int]) -> tuple[list[Span], torch.Tensor]:
    """Spans and slots of tokens start … stop-1 of each sequence; blocks descend, so that none is one run."""
    import torch

    from labkit.engine.kv_cache import BlockRun
    from labkit.engine.paged_attention import Span

    spans: list[Span] = []
    slots: list[int] = []
    first_block = NUM_BLOCKS - 1
    for start, stop, length in zip(starts, stops, LENGTHS, strict=True):
        owned = range(first_block, first_block - -(-length // BLOCK_SIZE), -1)
        first_block -= len(owned)
        blocks = list(owned)[: -(-stop // BLOCK_SIZE)]
        run = BlockRun(blocks[0], len(blocks), stop, torch.tensor(blocks))
        spans.append(Span(len(slots), len(slots) + stop - start, run))
        slots += [blocks[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(start, stop)]
    return spans, torch.tensor(slots)
