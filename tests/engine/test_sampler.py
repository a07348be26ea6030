"""Sampling against transformers' processors and against the probabilities that it claims to draw from."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from labkit.engine import Engine, EngineRequest, SamplingParams
from labkit.engine.sampler import distribution, penalize, pick, sample
from labkit.engine.sampling_params import request_seed, uniform
from labkit.engine.sequence import Sequence

VOCAB = 400


def _logits(seed: int = 0, rows: int = 1, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * spread


def _sequence(request_id: int = 0, prompt=(1, 2, 3), engine_seed: int = 0, **sampling) -> Sequence:
    request = EngineRequest(request_id, tuple(prompt), SamplingParams(**sampling))
    return Sequence(request, request_id, request_seed(request, engine_seed), 10_000)


def _reference(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    chain = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k:
        chain.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        chain.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        chain.append(MinPLogitsWarper(sampling.min_p))
    return chain(torch.tensor([[1]]), logits.unsqueeze(0).clone())[0].softmax(-1)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"top_k": 7},
        {"top_k": VOCAB + 5},
        {"top_p": 0.5},
        {"top_p": 0.999},
        {"top_p": 1e-6},
        {"min_p": 0.1},
        {"min_p": 1.0},
        {"top_k": 30, "top_p": 0.8},
        {"top_k": 30, "top_p": 0.8, "min_p": 0.2},
        {"top_p": 0.9, "min_p": 0.05},
    ],
)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_distribution_equals_transformers(one_thread, values, temperature):
    sampling = SamplingParams(temperature=temperature, **values)
    logits = _logits(3)[0]
    token_ids, probabilities = distribution(logits, sampling)
    found = torch.zeros(VOCAB).scatter_(0, token_ids, probabilities)
    torch.testing.assert_close(found, _reference(logits, sampling), atol=1e-6, rtol=1e-4)


def test_nucleus_wider_than_the_guess_is_exact(one_thread):
    logits = torch.randn(5000, generator=torch.Generator().manual_seed(1)) * 0.1
    sampling = SamplingParams(temperature=1.0, top_p=0.9)
    token_ids, probabilities = distribution(logits, sampling)
    found = torch.zeros(5000).scatter_(0, token_ids, probabilities)
    assert token_ids.numel() > 1024
    torch.testing.assert_close(found, _reference(logits, sampling), atol=1e-6, rtol=1e-3)


@pytest.mark.parametrize("penalty", [0.5, 1.2, 2.0])
def test_repetition_penalty_equals_transformers(one_thread, penalty):
    logits = _logits(5)
    token_ids = [3, 3, 17, 250, 0]
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([token_ids]), logits.clone())
    penalize(logits[0], token_ids, penalty)
    assert torch.equal(logits, expected)


def test_greedy_rows_take_the_largest_beside_random_ones(one_thread):
    logits = _logits(7, rows=3)
    expected = logits.argmax(-1).tolist()
    tokens = sample(
        logits.clone(), [_sequence(0), _sequence(1, temperature=3.0), _sequence(2, temperature=1.0, top_k=1)]
    )
    assert (tokens[0], tokens[2]) == (expected[0], expected[2])


def test_drawn_frequencies_fit_the_distribution(one_thread):
    """Chi-square of 20,000 draws; the limit is exceeded by chance once in 10⁶ runs, and the draws are seeded."""
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -2.0, -3.0, 1.5])
    sampling = SamplingParams(temperature=0.8)
    token_ids, probabilities = distribution(logits, sampling)
    draws = 20_000
    counts = torch.zeros(8)
    for position in range(draws):
        counts[token_ids[pick(probabilities, uniform(11, position))]] += 1
    expected = torch.softmax(logits / 0.8, 0) * draws
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 40.5


def test_uniform_numbers_fill_the_unit_interval_evenly():
    draws = [uniform(seed, position) for seed in range(100) for position in range(200)]
    assert all(0.0 <= draw < 1.0 for draw in draws)
    counts = [0] * 50
    for draw in draws:
        counts[int(draw * 50)] += 1
    expected = len(draws) / 50
    assert sum((count - expected) ** 2 / expected for count in counts) < 107
    pairs = list(itertools.pairwise(draws))
    covariance = sum((a - 0.5) * (b - 0.5) for a, b in pairs) / len(pairs)
    assert abs(covariance) < 5 * (1 / 12) / math.sqrt(len(pairs))


def test_last_token_can_be_drawn_and_none_beyond_it(one_thread):
    probabilities = torch.tensor([0.5, 0.25, 0.25])
    assert [pick(probabilities, draw) for draw in (0.0, 0.4999, 0.5, 0.75, 0.999999999)] == [0, 0, 1, 2, 2]


def test_token_of_zero_probability_is_never_drawn(one_thread):
    assert pick(torch.tensor([0.0, 1.0, 0.0]), 0.0) == 1
    assert pick(torch.tensor([0.0, 1.0, 0.0]), 1 - 1e-12) == 1


def _sampled(decoder, plan, drain, requests, engine_seed=0) -> dict[int, tuple[int, ...]]:
    engine = Engine(decoder, plan, seed=engine_seed)
    for request in requests:
        engine.add_request(request)
    return {i: output.token_ids for i, output in drain(engine).items()}


def test_seeds_do_not_depend_on_batch_order_or_preemption(tiny_decoder, make_plan, drain):
    decoder = tiny_decoder()
    requests = [
        EngineRequest(i, (i + 1, 5, 9), SamplingParams(max_tokens=20, temperature=1.0, seed=100 + i, ignore_eos=True))
        for i in range(6)
    ]
    together = _sampled(decoder, make_plan(), drain, requests)
    alone = {}
    for request in requests:
        alone |= _sampled(decoder, make_plan(), drain, [request])
    tight = _sampled(decoder, make_plan(blocks=9, block_size=4), drain, requests[::-1])
    assert together == alone == tight


def test_seed_decides_the_text_and_the_engine_seed_only_where_there_is_none(tiny_decoder, make_plan, drain):
    decoder = tiny_decoder()

    def run(seed, engine_seed):
        sampling = SamplingParams(max_tokens=20, temperature=1.5, seed=seed, ignore_eos=True)
        return _sampled(decoder, make_plan(), drain, [EngineRequest(1, (4, 5), sampling)], engine_seed)[1]

    assert run(1, 0) == run(1, 9)
    assert run(1, 0) != run(2, 0)
    assert run(None, 0) == run(None, 0)
    assert run(None, 0) != run(None, 1)
