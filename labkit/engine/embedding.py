"""Embeddings by an engine: texts through its executor, in its own pool, one vector for each at the end."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F

from labkit.engine.batch import BatchBuilder
from labkit.engine.engine import Engine
from labkit.engine.sampling_params import EngineRequest, SamplingParams, check_prompt
from labkit.engine.sequence import Sequence
from labkit.errors import DoesNotFitError, LabkitError, UnsupportedError
from labkit.models.embedding import check_pooling, pool


def embed(
    engine: Engine, prompts: SequenceOf[SequenceOf[int]], *, pooling: str | None = None, normalize: bool = True
) -> torch.Tensor:
    """Embeddings of tokenised texts: float32 `[len(prompts), hidden_size]` on the device of the weights.

    Args:
        engine: idle; its plan bounds a step and its pool holds keys and values meanwhile.
        prompts: token ids of each text, as the model's tokenizer frames them.
        pooling: "last", "mean" or "cls" (first token); the model's when None.
        normalize: divide each vector by its Euclidean length.

    Raises:
        OutOfRangeError: an empty text, a token outside the vocabulary, or an unknown pooling.
        DoesNotFitError: a text longer than max_model_len or than the pool.
        UnsupportedError: an executor without hidden states.
        LabkitError: requests are running.
    """
    kind = check_pooling(engine.plan.model, pooling)
    hidden_states = getattr(engine.executor, "hidden_states", None)
    if hidden_states is None or engine.plan.config.tensor_parallel_size > 1:
        raise UnsupportedError("this executor gives no hidden states", works="an engine on a CPU or on one card")
    if engine.has_unfinished:
        raise LabkitError("requests are running", works="embedding before or after them")
    sequences = [_sequence(engine, index, prompt) for index, prompt in enumerate(prompts)]
    rows = [_vectors(engine, hidden_states, group, kind) for group in _groups(engine, sequences)]
    if not rows:
        return torch.empty((0, engine.plan.model.hidden_size))
    vectors = torch.cat(rows)
    return F.normalize(vectors, dim=-1) if normalize else vectors


def _sequence(engine: Engine, index: int, prompt: SequenceOf[int]) -> Sequence:
    request = EngineRequest(index, tuple(prompt), SamplingParams(max_tokens=1))
    check_prompt(request, engine.plan.model.vocab_size)
    pool, longest = engine.scheduler.pool, engine.scheduler.max_model_len
    limit = min(longest, pool.num_blocks * pool.block_size)
    if len(prompt) > limit:
        raise DoesNotFitError(
            f"text {index} is longer than the engine can take",
            needed=f"{len(prompt)} tokens",
            available=f"{limit} tokens",
            works=f"texts of {limit} tokens at most",
            knob="max_model_len" if limit == longest else "gpu_memory_utilization",
        )
    return Sequence(request, index, 0, longest)


def _groups(engine: Engine, sequences: SequenceOf[Sequence]) -> Iterator[tuple[Sequence, ...]]:
    """Texts in order, as many together as a step and the pool take; a longer one is alone."""
    config, pool = engine.plan.config, engine.scheduler.pool
    max_tokens, max_seqs = int(config.max_num_batched_tokens or 1), int(config.max_num_seqs or 1)
    group: list[Sequence] = []
    for sequence in sequences:
        together = [*group, sequence]
        blocks = sum(pool.blocks_for(entry.num_tokens) for entry in together)
        tokens = sum(entry.num_tokens for entry in together)
        if group and (tokens > max_tokens or len(together) > max_seqs or blocks > pool.num_available):
            yield tuple(group)
            group = []
        group.append(sequence)
    if group:
        yield tuple(group)


def _vectors(engine: Engine, hidden_states: Any, group: tuple[Sequence, ...], kind: str) -> torch.Tensor:
    """One row for each text of the group, not normalised."""
    blocks = engine.scheduler.pool
    for slot, sequence in enumerate(group):
        sequence.slot = slot
        sequence.block_table = blocks.allocate(blocks.blocks_for(sequence.num_tokens)) or []
    try:
        parts = [
            _pooled(hidden_states(batch), [count for _, count in chosen], kind)
            for batch, chosen in _steps(engine, group)
        ]
    finally:
        for sequence in group:
            blocks.free(sequence.block_table)
    if len(parts) == 1:
        return parts[0]
    if kind != "mean":
        return parts[0 if kind == "cls" else -1]
    budget, total = int(engine.plan.config.max_num_batched_tokens or 1), group[0].num_tokens
    counts = [min(budget, total - start) for start in range(0, total, budget)]
    return torch.stack([part * (count / total) for part, count in zip(parts, counts, strict=True)]).sum(0)


def _steps(engine: Engine, group: tuple[Sequence, ...]) -> Iterator[tuple[Any, list[tuple[Sequence, int]]]]:
    """One step, or several for a text alone that is longer than a step."""
    budget = int(engine.plan.config.max_num_batched_tokens or 1)
    while any(sequence.num_tokens_to_compute for sequence in group):
        builder = BatchBuilder(budget)
        for sequence in group:
            builder.choose(sequence, min(sequence.num_tokens_to_compute, budget))
        yield builder.build(), builder.chosen
        for sequence, count in builder.chosen:
            sequence.num_computed_tokens += count


def _pooled(hidden: torch.Tensor, lengths: list[int], kind: str) -> torch.Tensor:
    """`labkit.models.embedding.pool`, with labkit's kernel for means on a card."""
    if not hidden.is_cuda or kind != "mean":
        return pool(hidden, lengths, kind)
    from labkit_kernels import pooling

    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(hidden.device)
    return pooling.pool(hidden, starts, kind, normalise=False)
