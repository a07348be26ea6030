"""The sampler: logits to tokens, each request by its own parameters and its own random numbers."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import torch

from labkit.engine.sampling_params import SamplingParams, uniform
from labkit.engine.sequence import Sequence

# Nearly all of top-p's mass lies in this many tokens; only the rest needs a full sort.
_NUCLEUS_GUESS = 1024


def sample(logits: torch.Tensor, sequences: SequenceOf[Sequence]) -> list[int]:
    """One token for each row.

    Args:
        logits: [rows, vocab] float32; rows with a repetition penalty are changed in place.
        sequences: the request of each row; its random number is that of the position about to be filled.
    """
    for row, sequence in enumerate(sequences):
        penalty = sequence.request.sampling.repetition_penalty
        if penalty != 1.0:
            penalize(logits[row], sequence.token_ids, penalty)
    tokens = logits.argmax(dim=-1).tolist()
    for row, sequence in enumerate(sequences):
        sampling = sequence.request.sampling
        if not sampling.is_greedy:
            token_ids, probabilities = distribution(logits[row], sampling)
            draw = uniform(sequence.seed, sequence.num_tokens)
            tokens[row] = int(token_ids[pick(probabilities, draw)])
    return tokens


def penalize(logits: torch.Tensor, token_ids: SequenceOf[int], penalty: float) -> None:
    """Repetition penalty in place: seen tokens' positive logits are divided by it, negative ones multiplied.

    Formula of Keskar et al. 2019 (CTRL), as in transformers' RepetitionPenaltyLogitsProcessor.
    """
    seen = torch.tensor(sorted(set(token_ids)))
    values = logits[seen]
    logits[seen] = torch.where(values < 0, values * penalty, values / penalty)


def distribution(logits: torch.Tensor, sampling: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """What may be drawn: token ids and their probabilities, which sum to 1, most likely first where it is cut.

    Order as in transformers: temperature, top-k, top-p, min-p.

    Args:
        logits: [vocab] float32.
    """
    logits = logits / sampling.temperature
    vocab_size = logits.shape[0]
    if 0 < sampling.top_k < vocab_size:
        values, token_ids = logits.topk(sampling.top_k)
        probabilities = values.softmax(dim=-1)
        if sampling.top_p < 1.0:
            probabilities = _nucleus(probabilities, sampling.top_p)
    elif sampling.top_p < 1.0:
        probabilities, token_ids = _sorted_nucleus(logits.softmax(dim=-1), sampling.top_p)
    else:
        probabilities, token_ids = logits.softmax(dim=-1), torch.arange(vocab_size)
    if sampling.min_p > 0.0:
        keep = probabilities >= sampling.min_p * probabilities.max()
        probabilities, token_ids = probabilities[keep], token_ids[: keep.shape[0]][keep]
    return token_ids[: probabilities.shape[0]], probabilities / probabilities.sum()


def pick(probabilities: torch.Tensor, draw: float) -> int:
    """Index at which the cumulated probability passes `draw`, a number in [0, 1)."""
    cumulated = probabilities.double().cumsum(dim=-1)
    target = torch.tensor(draw * float(cumulated[-1]), dtype=torch.float64)
    return min(int(torch.searchsorted(cumulated, target, right=True)), probabilities.shape[0] - 1)


def _nucleus(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    """The leading entries of falling probabilities up to the one with which their sum reaches `top_p`."""
    before = probabilities.cumsum(dim=-1) - probabilities
    return probabilities[: max(1, int((before < top_p).sum()))]


def _sorted_nucleus(probabilities: torch.Tensor, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    guess = min(_NUCLEUS_GUESS, probabilities.shape[0])
    values, token_ids = probabilities.topk(guess)
    if float(values.sum()) < top_p:
        values, token_ids = probabilities.sort(descending=True)
    values = _nucleus(values, top_p)
    return values, token_ids[: values.shape[0]]
