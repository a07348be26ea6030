"""Greedy tokens do not depend on the memory knobs: block size, budget, caching, pool size, preemption, order."""

from __future__ import annotations

import random

import pytest

from labkit.engine import Engine

NUM_CONFIGURATIONS = 60
OUTPUT_TOKENS = 12


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    """Ten prompts; some share a beginning, one is a single token, two are equal."""
    rng = random.Random(1)
    base = tuple(rng.randrange(1, 101) for _ in range(40))
    drawn = [
        base[: rng.randint(0, 40)] + tuple(rng.randrange(1, 101) for _ in range(rng.randint(1, 30))) for _ in range(7)
    ]
    return [*drawn, (7,), base, base]


@pytest.fixture(scope="module")
def decoder(tiny_decoder):
    return tiny_decoder()


@pytest.fixture(scope="module")
def expected(decoder, prompts, greedy_tokens) -> list[list[int]]:
    outputs = [greedy_tokens(decoder, prompt, OUTPUT_TOKENS) for prompt in prompts]
    assert len({tuple(output) for output in outputs}) >= 8, "the model must tell prompts apart"
    return outputs


def _configuration(number: int) -> tuple[dict, random.Random]:
    rng = random.Random(number)
    block_size = (1, 8, 16, 32, 64)[number % 5]
    budget = (16, 64, 256, 2048)[number // 5 % 4]
    needed = -(-(70 + OUTPUT_TOKENS) // block_size)
    return {
        "blocks": rng.choice((needed, needed + 1, 2 * needed, 12 * needed)),
        "swap": rng.choice((0, needed, 20 * needed)),
        "block_size": block_size,
        "max_num_batched_tokens": budget,
        "max_num_seqs": rng.choice((1, 3, 10)),
        "enable_prefix_caching": rng.random() < 0.5,
        "enable_chunked_prefill": budget < 80 or rng.random() < 0.5,
        "preemption_mode": rng.choice(("recompute", "swap")),
    }, rng


@pytest.mark.parametrize("number", range(NUM_CONFIGURATIONS))
def test_same_tokens_under_every_memory_knob(number, decoder, prompts, expected, make_plan, drain, greedy_request):
    knobs, rng = _configuration(number)
    engine = Engine(decoder, make_plan(**knobs))
    order = rng.sample(range(len(prompts)), len(prompts))
    finished = {}
    for request_id in order:
        engine.add_request(greedy_request(request_id, prompts[request_id], OUTPUT_TOKENS))
        for _ in range(rng.choice((0, 0, 1, 5))):
            finished |= {output.request_id: output for output in engine.step().finished}
            engine.check()
    finished |= drain(engine)
    assert {i: list(output.token_ids) for i, output in finished.items()} == dict(enumerate(expected)), knobs


def test_configurations_reach_preemption_by_recompute_and_by_swap(decoder, prompts, make_plan, greedy_request):
    """The sixty configurations would prove little if none of them sent requests back."""
    seen = {"recompute": 0, "swap": 0, "cached": 0}
    for number in range(NUM_CONFIGURATIONS):
        knobs, _ = _configuration(number)
        engine = Engine(decoder, make_plan(**knobs))
        for request_id, prompt in enumerate(prompts):
            engine.add_request(greedy_request(request_id, prompt, OUTPUT_TOKENS))
        while engine.has_unfinished:
            result = engine.step()
            seen["swap" if result.num_swapped_blocks else "recompute"] += result.num_preemptions
            seen["cached"] += sum(output.num_cached_tokens for output in result.finished)
    assert min(seen.values()) > 5, seen


def test_all_hashes_equal_changes_no_token(decoder, prompts, expected, make_plan, drain, greedy_request):
    engine = Engine(decoder, make_plan(blocks=100), hash_function=lambda parent, token_ids: b"same")
    for request_id, prompt in enumerate(prompts):
        engine.add_request(greedy_request(request_id, prompt, OUTPUT_TOKENS))
    finished = drain(engine)
    assert [list(finished[i].token_ids) for i in range(len(prompts))] == expected


def test_reconfigured_in_the_middle_gives_the_same_tokens(decoder, prompts, expected, make_plan, drain, greedy_request):
    engine = Engine(decoder, make_plan(blocks=100))
    for request_id, prompt in enumerate(prompts):
        engine.add_request(greedy_request(request_id, prompt, OUTPUT_TOKENS))
    finished = {}
    for block_size in (16, 1, 32):
        for _ in range(6):
            finished |= {output.request_id: output for output in engine.step().finished}
        engine.reconfigure(make_plan(blocks=400 // block_size, block_size=block_size))
        engine.check()
    finished |= drain(engine)
    assert [list(finished[i].token_ids) for i in range(len(prompts))] == expected


def test_a_failed_step_changes_no_token(decoder, prompts, expected, make_plan, drain, greedy_request):
    engine = Engine(decoder, make_plan(blocks=30, swap=30, preemption_mode="swap"))
    execute, calls = engine.executor.execute, []

    def fail_every_seventh(batch):
        calls.append(batch)
        tokens = execute(batch)
        if len(calls) % 7 == 0:
            raise MemoryError("as told")
        return tokens

    engine.executor.execute = fail_every_seventh
    for request_id, prompt in enumerate(prompts):
        engine.add_request(greedy_request(request_id, prompt, OUTPUT_TOKENS))
    finished = {}
    while engine.has_unfinished:
        try:
            finished |= {output.request_id: output for output in engine.step().finished}
        except MemoryError:
            assert len(calls) % 7 == 0
        engine.check()
    assert [list(finished[i].token_ids) for i in range(len(prompts))] == expected


def test_two_engines_in_one_process_do_not_meet(decoder, prompts, expected, make_plan, drain, greedy_request):
    engines = [Engine(decoder, make_plan(blocks=200, block_size=size)) for size in (1, 16)]
    for request_id, prompt in enumerate(prompts):
        for engine in engines:
            engine.add_request(greedy_request(request_id, prompt, OUTPUT_TOKENS))
    for _ in range(5):
        for engine in engines:
            engine.step()
    for engine in engines:
        finished = drain(engine)
        assert [list(finished[i].token_ids) for i in range(len(prompts)) if i in finished] == [
            expected[i] for i in sorted(finished)
        ]
