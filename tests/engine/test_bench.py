"""The benchmark compares like with like: same weights, same tokens, only asked-for tokens counted."""

from __future__ import annotations

import pytest
import torch

from labkit.engine.bench import (
    mixed_jobs,
    run_bench,
    run_engine,
    run_generate,
    run_generate_batch,
    transformers_twin,
)
from labkit.models.attention import DenseAttention


@pytest.fixture(scope="module")
def decoder(tiny_decoder, tiny_spec):
    return tiny_decoder(tiny_spec(tie_word_embeddings=False, eos_token_ids=()))


@pytest.fixture(scope="module")
def twin(decoder):
    return transformers_twin(decoder)


def test_twin_computes_the_same_logits(decoder, twin):
    ids = torch.arange(1, 40)
    hidden = decoder.forward(ids, torch.arange(39), DenseAttention(decoder.spec, [39]))
    with torch.inference_mode():
        torch.testing.assert_close(decoder.logits(hidden), twin(ids.unsqueeze(0)).logits[0], atol=2e-5, rtol=1e-4)


def test_all_contenders_give_the_asked_for_tokens_and_the_same(decoder, twin):
    jobs = mixed_jobs(5, decoder.spec.vocab_size, longest=(24, 12))
    ours = run_engine(decoder, jobs)
    assert [len(output) for output in ours] == [count for _, count in jobs]
    assert run_generate(twin, jobs) == ours
    assert run_generate_batch(twin, jobs) == ours


def test_jobs_are_mixed_seeded_and_in_range():
    jobs = mixed_jobs(200, 1000, seed=3)
    assert jobs == mixed_jobs(200, 1000, seed=3)
    assert jobs != mixed_jobs(200, 1000, seed=4)
    assert {len(prompt) for prompt, _ in jobs} <= set(range(8, 129))
    assert {count for _, count in jobs} <= set(range(8, 65))
    assert len({count for _, count in jobs}) > 30
    assert all(10 <= token_id < 1000 for prompt, _ in jobs for token_id in prompt)


def test_results_have_rows_and_a_judged_summary(decoder):
    results = run_bench(decoder, rounds=1, made="2026-01-01T00:00:00+00:00")
    assert results["made"] == "2026-01-01T00:00:00+00:00"
    assert {(row["num_requests"], row["contender"]) for row in results["rows"]} == {
        (size, name) for size in (1, 32) for name in ("labkit", "generate", "generate_batch")
    }
    assert all(row["same_tokens_as_labkit"] for row in results["rows"])
    rates = {(row["num_requests"], row["contender"]): row["output_tokens_per_cpu_s"] for row in results["rows"]}
    for name, entry in results["summary"].items():
        _, size, _, other = name.split("_", 3)
        assert entry["value"] == pytest.approx(rates[int(size), "labkit"] / rates[int(size), other], rel=0.01)
        assert entry["ok"] == (entry["value"] >= entry["at_least"])
