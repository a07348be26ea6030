"""Steps of labkit's engine in the step-time model: places of prompts in graphs, padded rows, launches by the host."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from labkit.engine.launch_rules import labkit_rules, vllm_launch_rules
from labkit.engine.step_constants import load_constants
from labkit.engine.step_cost import Matrix, MatrixCost, step_cost
from labkit.engine.step_time import StepLoad, StepTimeModel
from labkit.memory.card_parts import padded_tokens
from labkit.specs import load_gpu, load_model
from labkit.specs.engine_config import EngineConfig

H200 = load_gpu("H200")
CONFIG = EngineConfig(max_num_seqs=64, max_num_batched_tokens=4096)


def model_of(largest=False, kv="auto", **constants):
    found = load_constants(engine="labkit").replace(**constants)
    cost = step_cost(load_model("Qwen/Qwen3-0.6B"), CONFIG.replace(kv_cache_dtype=kv))
    return StepTimeModel(cost, H200, found, labkit_rules(CONFIG, largest=largest))


def work(tokens, decodes, prompts, swapped=0.0):
    one = np.ones(1)
    return StepLoad(
        tokens * one, (decodes + prompts) * one, (decodes + prompts) * one, (decodes * 100.0 * one,),
        ((tokens - decodes) * 50.0 * one,), swapped * one, (tokens - decodes) * one * (prompts > 0), prompts * one,
    )  # fmt: skip


def test_steps_with_more_prompts_than_a_graph_has_places_for_are_launched():
    model = model_of(eager_step_s=1.0)
    assert labkit_rules(CONFIG).prompt_places == (8, 8, 16, 24, 32, 48, 64, 64, 64)
    assert labkit_rules(CONFIG, largest=True).prompt_places[-1] == 64
    assert model.seconds(work(600, 20, 64))[0] < 0.1
    assert model.seconds(work(600, 20, 65))[0] > 1.0
    assert model.seconds(work(60, 20, 8))[0] < 0.1
    # As an H200 showed when all graphs had 8 places: 614 tokens of 11 prompts took 9 to 30 ms, those of 8 take 2.
    assert model.seconds(work(60, 20, 9))[0] > 1.0
    assert model_of(largest=True, eager_step_s=1.0).seconds(work(3000, 20, 40))[0] < 0.1
    assert vllm_launch_rules(CONFIG).prompt_places == ()


@pytest.mark.parametrize(
    ("tokens", "prompts", "padded_up_to", "expected"),
    [
        (20, 9, 128, 128), (20, 9, 127, 0), (20, 8, 0, 32), (33, 17, 191, 0), (33, 17, 192, 192), (120, 16, 0, 128),
        (129, 24, 0, 192), (129, 25, 1024, 0), (193, 1, 1024, 0),
    ],
)  # fmt: skip
def test_engine_and_virtual_engine_pad_a_step_of_many_prompts_to_the_same_graph(
    one_thread, tokens, prompts, padded_up_to, expected
):
    from labkit.engine.cuda_graphs import next_larger
    from labkit.memory.step_shapes import StepShape, mixed_shapes

    shapes = mixed_shapes(64, 192, largest=False)
    taken = next_larger(shapes, StepShape(tokens, 0, prompts, prompts), padded_up_to)
    assert (taken.num_tokens if taken else 0) == expected
    rules = labkit_rules(CONFIG.replace(max_num_batched_tokens=192), padded_tokens=padded_up_to)
    model = StepTimeModel(
        step_cost(load_model("Qwen/Qwen3-0.6B"), CONFIG), H200, load_constants(engine="labkit"), rules
    )
    launched, _, is_eager = model._launched(work(tokens, 0, prompts))
    assert is_eager[0] == (taken is None)
    assert launched[0] == (taken.num_tokens if taken else tokens)
    assert model._places(work(tokens, 0, prompts))[0] == (taken.num_prompts if taken else prompts)


def test_steps_are_padded_as_far_as_the_card_is_sooner_than_the_host():
    """8B on an H200: 323 launches of 25 µs, less 3.2 ms for its weights, at half of 989 TFLOP/s.

    Measured there: 34 tokens of 9 prompts took 8.8 ms without a graph, 6.7 in that of 128 tokens; 80 tokens of 40
    prompts 9.3 and 10.9 in that of 384; 128 of 64 9.3 and 13.6 in that of 512.
    """

    def padded(name, gpu="H200", **knobs):
        return padded_tokens(load_model(name), load_gpu(gpu), EngineConfig(dtype="bfloat16", **knobs))

    large = padded("meta-llama/Llama-3.1-8B")
    assert large == pytest.approx((323 * 25e-6 - 16.06e9 / 4.8e12) * 0.5 * 989.5e12 / (2 * 6.98e9), rel=0.03)
    assert 128 <= large < 256
    assert padded("Qwen/Qwen3-0.6B") > 1024
    assert padded("meta-llama/Llama-3.1-8B", "A10") == padded("meta-llama/Llama-3.1-70B") == 0
    assert padded("Qwen/Qwen3-0.6B", tensor_parallel_size=2) == 0


def test_a_captured_step_samples_all_its_places():
    model = model_of()
    few, padded = (model.parts(work(tokens, tokens, 0)) for tokens in (41, 48))
    assert few["lm_head"][0] == padded["lm_head"][0]
    # 512 tokens with 8 prompts have places for all 64 requests; those of 100 tokens that are launched have 20 and 17.
    assert model.parts(work(500, 3, 2))["lm_head"][0] == model.parts(work(64, 64, 0))["lm_head"][0]
    launched = model.parts(work(120, 20, 17))["lm_head"][0]
    assert launched < model.parts(work(120, 20, 16))["lm_head"][0]


def test_each_place_of_a_captured_step_costs_its_layer():
    attention = [
        model_of(prompt_start_s=1e-6, prompt_place_s=place_s).parts(work(tokens, 20, prompts))["prefill_attention"][0]
        for tokens, prompts in ((60, 1), (500, 1), (500, 60), (3000, 3))
        for place_s in (0.0, 1e-7)
    ]
    more = [after - before for before, after in zip(attention[::2], attention[1::2], strict=True)]
    # 28 layers; graphs of 64 and 512 tokens have 8 and 64 places; 3,000 tokens are launched, with places for 3.
    assert more == pytest.approx([28 * places * 1e-7 for places in (8, 64, 64, 3)])
    assert model_of(prompt_start_s=1e-6, prompt_place_s=1.0).parts(work(20, 20, 0))["prefill_attention"][0] == 0.0


def test_without_graphs_a_prompt_costs_the_host_more_in_every_layer():
    constants = {
        "eager_step_s": 0.0,
        "eager_layer_s": 1e-3,
        "eager_prompt_layer_s": 2e-3,
        "step_s": 0.0,
        "request_s": 0.0,
    }
    model = dataclasses.replace(model_of(**constants), launch=labkit_rules(CONFIG.replace(enforce_eager=True)))
    assert model.seconds(work(8, 8, 0))[0] == pytest.approx(28 * 1e-3, rel=1e-3)
    assert model.seconds(work(64, 8, 1))[0] == pytest.approx(28 * 3e-3, rel=1e-3)


def test_prompts_over_an_8_bit_cache_take_longer_by_their_products():
    plain, slower = (model_of(kv="fp8", prompt_factor_8bit=factor) for factor in (1.0, 2.0))
    bare = model_of(kv="fp8", prompt_start_s=0.0, prompt_factor_8bit=1.0)
    products = bare.parts(work(1000, 0, 1))["prefill_attention"][0]
    gained = (
        slower.parts(work(1000, 0, 1))["prefill_attention"][0] - plain.parts(work(1000, 0, 1))["prefill_attention"][0]
    )
    assert gained == pytest.approx(products)
    assert model_of(prompt_factor_8bit=2.0).seconds(work(1000, 0, 1)) == model_of().seconds(work(1000, 0, 1))


def test_products_near_the_peak_slow_down_and_those_that_read_do_not():
    # One matrix: 1 µs at one row, and at 8,192 rows 0.8 of an H200's 989 TFLOP/s.
    size, rows = 4096.0, 8192.0
    products = ((size, size, 1.0, 1e-6), (size, size, rows, 2 * size * size * rows / 0.8 / H200.bf16_flops))
    dense = MatrixCost(2 * size * size, size * size)
    short, long = (
        dataclasses.replace(
            model, cost=dataclasses.replace(model.cost, dense=dense, matrices=(Matrix(size, size, 1, False),))
        )
        for model in (model_of(products=products, sustained_factor=factor) for factor in (1.0, 1.25))
    )
    for tokens, slower in ((rows, 1.25), (1.0, 1.0)):
        before, after = (model._products(dense, np.array([tokens]), is_head=False)[0] for model in (short, long))
        assert after == pytest.approx(slower * before, rel=0.01)
