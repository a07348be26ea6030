"""Embedding mode: one vector for each text, from its last or first token or the mean of all, at unit length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F

from labkit.errors import OutOfRangeError
from labkit.models.attention import DenseAttention
from labkit.models.decoder import Decoder
from labkit.specs.model_spec import ModelSpec
from labkit.text import plain

POOLINGS = ("last", "mean", "cls")


def embed(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    pooling: str | None = None,
    normalize: bool = True,
    max_batched_tokens: int = 4096,
) -> torch.Tensor:
    """Embeddings of tokenised texts: float32 `[len(prompts), hidden_size]` on the decoder's device.

    Args:
        decoder: the model.
        prompts: token ids of each text, as the model's tokenizer frames them.
        pooling: "last" (hidden state of the last token), "mean" (over all tokens) or "cls" (of the first token); the
            spec's when None.
        normalize: divide each vector by its Euclidean length.
        max_batched_tokens: texts are computed together up to this many tokens; one longer text goes alone.

    Raises:
        OutOfRangeError: an empty text, a text longer than the model's positions, a token outside the vocabulary, or
            an unknown pooling.
    """
    kind = check_pooling(decoder.spec, pooling)
    for index, prompt in enumerate(prompts):
        _check(decoder, index, prompt)
    rows = [_pooled(decoder, batch, kind) for batch in _batches(prompts, max_batched_tokens)]
    if not rows:
        return torch.empty((0, decoder.spec.hidden_size), device=decoder.device)
    vectors = torch.cat(rows)
    return F.normalize(vectors, dim=-1) if normalize else vectors


def check_pooling(spec: ModelSpec, pooling: str | None) -> str:
    """The pooling that is asked for, or the model's.

    Raises:
        OutOfRangeError: an unknown one.
    """
    kind = spec.pooling if pooling is None else pooling
    if kind not in POOLINGS:
        raise OutOfRangeError(f"pooling is {plain(repr(kind), 40)}", works=" or ".join(POOLINGS), knob="pooling")
    return kind


def pool(hidden: torch.Tensor, lengths: Sequence[int], kind: str) -> torch.Tensor:
    """One vector for each sequence, float32 `[len(lengths), hidden_size]`, not normalised.

    Args:
        hidden: `[T, hidden_size]`, the sequences' tokens one after the other.
        lengths: tokens of each sequence, 1 or more.
        kind: one of `POOLINGS`.
    """
    if kind == "mean":
        return torch.stack([part.float().mean(dim=0) for part in hidden.split(list(lengths))])
    ends = list(accumulate(lengths))
    rows = [end - length for end, length in zip(ends, lengths, strict=True)] if kind == "cls" else [e - 1 for e in ends]
    return hidden.index_select(0, torch.tensor(rows, device=hidden.device)).float()


def _check(decoder: Decoder, index: int, prompt: Sequence[int]) -> None:
    limit = decoder.spec.max_position_embeddings
    if not 1 <= len(prompt) <= limit:
        raise OutOfRangeError(f"text {index} has {len(prompt)} tokens", available=f"1 to {limit} tokens")
    if not 0 <= min(prompt) <= max(prompt) < decoder.spec.vocab_size:
        raise OutOfRangeError(f"text {index} has tokens outside 0 to {decoder.spec.vocab_size - 1}")


def _batches(prompts: Sequence[Sequence[int]], max_tokens: int) -> Iterator[list[Sequence[int]]]:
    batch: list[Sequence[int]] = []
    for prompt in prompts:
        if batch and sum(map(len, batch)) + len(prompt) > max_tokens:
            yield batch
            batch = []
        batch.append(prompt)
    if batch:
        yield batch


def _pooled(decoder: Decoder, batch: Sequence[Sequence[int]], kind: str) -> torch.Tensor:
    lengths = [len(prompt) for prompt in batch]
    decoder.reserve_positions(max(lengths))
    tokens = torch.tensor([token for prompt in batch for token in prompt], device=decoder.device)
    positions = torch.cat([torch.arange(length) for length in lengths]).to(decoder.device)
    return pool(decoder.forward(tokens, positions, DenseAttention(decoder.spec, lengths)), lengths, kind)
