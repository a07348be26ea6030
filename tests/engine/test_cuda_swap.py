"""The lane of swapped blocks against a dictionary, with plain copies in the kernel's place: rows, turns and places."""

from __future__ import annotations

import dataclasses
import random
from itertools import pairwise

import pytest


@pytest.fixture(params=["auto", "int8_per_token_head"])
def caches(request, tiny_spec, one_thread, monkeypatch):
    """Makes a cache of 12 blocks and 30 host blocks with rows for so many at once; blocks are made of their number."""
    from labkit.engine import cuda_cache, cuda_swap

    form = cuda_cache.cache_format(tiny_spec(), 4, request.param, one_thread.float16)

    def copy(source, target, pairs, programs):
        for first, second in pairs.tolist():
            for ours, theirs in zip(source.caches, target.caches, strict=True):
                if first >= 0:
                    theirs[second] = ours[first]

    monkeypatch.setattr(cuda_swap, "launch_copy", copy)
    monkeypatch.setattr("labkit_kernels.ops.interpreting", lambda: True)

    def make(num_staged: int):
        monkeypatch.setattr(cuda_cache, "STAGED_BYTES", num_staged * form.row_bytes)
        memory = one_thread.zeros(form.pool_bytes(12), dtype=one_thread.uint8)
        return cuda_cache.CudaKVCache(form, 12, 30, memory)

    return make


def fill(cache, block: int, number: int) -> None:
    for at, layer in enumerate(cache.layers):
        for part, view in enumerate(layer.tensors()):
            view[block] = (number + 7 * at + 3 * part) % 100


def holds(cache, block: int, number: int) -> bool:
    return all(
        bool((view[block] == (number + 7 * at + 3 * part) % 100).all())
        for at, layer in enumerate(cache.layers)
        for part, view in enumerate(layer.tensors())
    )


@pytest.mark.parametrize("num_staged", [1, 2, 5, 40])
def test_every_block_comes_back_as_it_left(caches, num_staged):
    """Out and in at random, a few or many at once, in this step or for the next one; pool blocks change hands."""
    cache, rng = caches(num_staged), random.Random(num_staged)
    pool: dict[int, int] = {}
    host: dict[int, int] = {}
    later: dict[int, int] = {}
    for number in range(300):
        pool |= later
        free_hosts = [block for block in range(30) if block not in host]
        leaving = rng.sample(sorted(pool), min(len(pool), len(free_hosts), rng.choice([0, 1, 6])))
        swap_out = list(zip(leaving, rng.sample(free_hosts, len(leaving)), strict=True))
        host |= {there: pool.pop(block) for block, there in swap_out}
        free = [block for block in range(12) if block not in pool]
        coming = rng.sample(sorted(host), min(len(host), len(free), rng.choice([0, 0, 2, 7])))
        swap_in = list(zip(rng.sample(free, len(coming)), coming, strict=True))
        later = {block: host.pop(there) for block, there in swap_in}
        now = rng.random() < 0.3
        cache.swap(swap_out, swap_in, now=now)
        pool, later = (pool | later, {}) if now else (pool, later)
        assert all(holds(cache, block, content) for block, content in pool.items())
        free = [block for block in range(12) if block not in pool and block not in later]
        for block in rng.sample(free, min(len(free), 3)):
            pool[block] = number
            fill(cache, block, number)
    cache.finish_swaps()
    assert all(holds(cache, block, content) for block, content in {**pool, **later}.items())


def test_neighbours_on_the_host_cross_the_bus_together():
    from labkit.engine.cuda_swap import _runs

    assert list(_runs(4, [(9, 2), (1, 3), (5, 4), (7, 8), (6, 10), (3, 11)])) == [(4, 2, 3), (7, 8, 1), (8, 10, 2)]
    assert list(_runs(0, [(9, 2)])) == [(0, 2, 1)]


def batches_of(lengths: list[int], blocks: int, block_bytes: int = 0) -> list:
    """The steps of requests with three prompt tokens that outgrow a pool and are swapped."""
    from labkit.engine import Engine, EngineRequest, SamplingParams
    from labkit.engine.simulation import VirtualExecutor, bare_plan, virtual_model
    from labkit.specs.engine_config import EngineConfig

    config = EngineConfig(
        max_model_len=64, max_num_seqs=12, max_num_batched_tokens=48, block_size=4, preemption_mode="swap",
        enable_prefix_caching=False,
    )  # fmt: skip
    plan = dataclasses.replace(bare_plan(virtual_model(), config, blocks, 100), block_bytes=block_bytes)
    executor, batches = VirtualExecutor(plan), []
    execute = executor.execute
    executor.execute = lambda batch: batches.append(batch) or execute(batch)
    engine = Engine(None, plan, executor=executor, clock=executor.clock)
    for index, length in enumerate(lengths):
        sampling = SamplingParams(max_tokens=length, ignore_eos=True)
        engine.add_request(EngineRequest(index, (1, 2, 3 + index), sampling))
    while engine.has_unfinished:
        engine.step()
        engine.check()
    return batches


def test_blocks_come_back_while_others_are_computed_and_are_read_by_the_next_step():
    """A request that is alone does not wait: there is nothing to travel beside."""
    beside = alone = 0
    for batch, after in pairwise(batches_of([20, 25, 30, 35, 40, 45], 16)):
        coming = {block for block, _ in batch.swap_in}
        reads = [table for table in batch.block_tables if coming & set(table)]
        if coming and len(batch.sequences) > len(reads):
            assert not reads
            assert any(coming & set(table) for table in after.block_tables)
            beside += 1
        alone += bool(reads)
    assert beside > 0
    assert alone > 0


def test_no_more_comes_back_with_one_step_than_travels_beside_it():
    """All end at once, and there is room for all that was swapped: without a bound it comes back in one step."""
    from labkit.memory.card_parts import STAGED_BYTES

    most = [max(len(batch.swap_in) for batch in batches_of([26] * 10, 50, size)) for size in (0, STAGED_BYTES // 8)]
    assert most[0] > 8
    assert 0 < most[1] <= 8
