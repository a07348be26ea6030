"""Peak of temporary memory of a step on a CPU, from the allocator's own events."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import accumulate

import torch
from torch.profiler import ProfilerActivity, profile

from labkit.engine.kv_cache import BlockRun, KVCache
from labkit.engine.paged_attention import PagedAttention, Span
from labkit.memory.labkit_rules import model_of_rank
from labkit.memory.records import MemoryPlan
from labkit.models.decoder import Decoder, DecoderWeights


def peak_bytes(call: Callable[[], object]) -> int:
    """Most bytes that `call` had allocated through torch at one moment, beyond what was there before.

    Buffers inside operators count, since they come from the same allocator; those of the BLAS library do not.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler prints two lines at each use otherwise
    call()  # the first call of an operator allocates what later ones keep
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    results = profiler.profiler.kineto_results
    events = sorted((event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]")
    return max(accumulate((num_bytes for _, num_bytes in events), initial=0))


@torch.inference_mode()
def activation_peak_bytes(decoder: Decoder, plan: MemoryPlan) -> int:
    """Measured peak of the largest step of `plan`: all of `max_num_batched_tokens` in one prompt behind a cached
    block (capped scores grow with the context, so there behind as much as `max_model_len` leaves), and logits of
    `max_num_seqs` rows.

    The decoder's later layers are like its first ones, so only so many are run as have every kind of layer in them;
    keys and values go to a cache of their own. About a second for a small model.
    """
    short = _first_layers(decoder)
    num_tokens = int(plan.config.max_num_batched_tokens or 1)
    num_rows = min(int(plan.config.max_num_seqs or 1), num_tokens)
    block_size = plan.config.block_size
    longest = int(plan.config.max_model_len or 1) if short.spec.attention_softcap is not None else 0
    context = block_size * max(1, (longest - num_tokens) // block_size)
    num_blocks = -(-(context + num_tokens) // block_size)
    spec = model_of_rank(short.spec, decoder.tp_size)
    cache = KVCache(
        spec,
        num_blocks=num_blocks,
        num_swap_blocks=0,
        block_size=block_size,
        kv_cache_dtype=plan.config.kv_cache_dtype,
        dtype=decoder.dtype,
        max_blocks_per_seq=num_blocks,
    )
    attention = PagedAttention(spec, cache)

    def step() -> list[int]:
        slots = torch.arange(context, context + num_tokens)
        run = BlockRun(0, num_blocks, context + num_tokens, None)
        attention.begin([Span(0, num_tokens, run)], slots)
        hidden = short.forward(torch.zeros_like(slots), slots % short.max_positions, attention)
        return short.logits(hidden.index_select(0, torch.arange(num_rows))).argmax(dim=-1).tolist()

    return peak_bytes(step)


def _first_layers(decoder: Decoder) -> Decoder:
    """The decoder cut behind the first layer of the last new kind, and one more."""
    kinds = [(layer.kind, layer.num_heads, layer.head_dim, layer.num_experts) for layer in decoder.spec.layers]
    count = max((kinds.index(kind) for kind in set(kinds)), default=0) + 2
    weights = decoder.weights
    layers = weights.layers[:count]
    return Decoder(
        decoder.spec.replace(layers=decoder.spec.layers[:count]),
        DecoderWeights(weights.embedding, layers, weights.final_norm, weights.head),
        ranks=decoder.ranks,
    )
