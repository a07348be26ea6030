"""The real model: the engine's greedy tokens equal transformers', 32 prompts of 64 tokens in float32."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from labkit.engine import Engine

GREEDY = Path(__file__).parent.parent / "models" / "data" / "smollm2_greedy.json"


@pytest.fixture(scope="module")
def smollm2(smollm2_gguf, one_thread):
    from labkit.models.loading import load_model_weights
    from labkit.specs.gguf_spec import model_from_gguf

    return load_model_weights(model_from_gguf(smollm2_gguf), smollm2_gguf, "float32")


def test_thirty_two_prompts_of_sixty_four_tokens_equal_transformers(smollm2, make_plan, drain, greedy_request):
    runs = json.loads(GREEDY.read_text())["runs"]
    assert len(runs) == 32
    # A pool for about a third of them and chunks of 100 tokens: preemption, swapping and sharing take part.
    plan = make_plan(
        smollm2.spec,
        blocks=130,
        swap=100,
        preemption_mode="swap",
        block_size=16,
        max_num_seqs=32,
        max_num_batched_tokens=100,
        max_model_len=512,
    )
    engine = Engine(smollm2, plan)
    for request_id, run in enumerate(runs):
        request = greedy_request(request_id, tuple(run["prompt"]), len(run["tokens"]))
        engine.add_request(request)
    outputs = drain(engine)
    differing = [i for i, run in enumerate(runs) if list(outputs[i].token_ids) != run["tokens"]]
    assert not differing
