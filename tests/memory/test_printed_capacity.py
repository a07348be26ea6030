"""Tokens and concurrency of real vLLM servers, from the pool that each printed: no constant is in between."""

from __future__ import annotations

from dataclasses import replace

import pytest

from labkit.memory import plan
from labkit.memory.run_files import load_runs

GIB = 2**30
PRINT_ROUNDING_GIB = 0.005


def ends(run):
    """Plans at both ends of what the printed pool can stand for."""
    pools = (round((run.pool_gib + sign * PRINT_ROUNDING_GIB) * GIB) for sign in (-1, 1))
    return [
        plan(
            run.model, run.gpu, run.config, engine="vllm", engine_version=run.version,
            overrides=replace(run.overrides, available_kv_bytes=pool),
        )
        for pool in pools
    ]  # fmt: skip


@pytest.mark.parametrize("run", load_runs(), ids=lambda run: f"{run.version} {run.model_name} {run.setting}")
def test_printed_tokens_and_concurrency_follow_from_the_printed_pool(run):
    low, high = ends(run)
    if run.config.pipeline_parallel_size > 1:
        # The log prints the pool of one stage; the other, which has the head, holds less.
        assert run.tokens < low.kv_cache_tokens
        return
    assert low.kv_cache_tokens <= run.tokens <= high.kv_cache_tokens
    assert round(low.max_concurrency, 2) <= run.concurrency <= round(high.max_concurrency, 2)
