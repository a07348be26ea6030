"""The step-time model: hand-computed parts, monotone in all that it should be, and true to its own fast path."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.engine.launch_rules import LaunchRules, labkit_rules, vllm_launch_rules
from labkit.engine.step_constants import CONSTANT_NAMES, link_bytes_per_s, load_constants
from labkit.engine.step_cost import step_cost
from labkit.engine.step_time import StepClock, StepLoad, StepTimeModel, TabulatedStepTimes, smooth_max
from labkit.errors import OutOfRangeError
from labkit.memory.step_shapes import capture_sizes, graph_shapes
from labkit.specs import gpu_names, load_gpu, load_model
from labkit.specs.engine_config import EngineConfig


def model_of(name="meta-llama/Llama-3.1-8B-Instruct", gpu="H100 SXM", eager=False, **knobs):
    config = EngineConfig(**knobs)
    sizes = () if eager else tuple(capture_sizes(512))
    launch = LaunchRules(sizes, sizes)
    return StepTimeModel(step_cost(load_model(name), config), load_gpu(gpu), load_constants(), launch)


def load(model, tokens, seqs, context=0.0, pairs=0.0):
    kinds = model.cost.kv
    one = np.array([1.0])
    return StepLoad(
        tokens * one, seqs * one, seqs * one, tuple(context * one for _ in kinds), tuple(pairs * one for _ in kinds)
    )


def test_costs_of_a_dense_model_by_hand():
    cost = model_of().cost
    # Llama 3.1 8B: 32 layers of q,k,v (4096 × 6144), o (4096²), gate and up (2 × 4096 × 14336), down.
    matrices = 32 * (4096 * 6144 + 4096**2 + 3 * 4096 * 14336)
    norms = 65 * 4096
    assert cost.dense.num_elements == matrices
    assert cost.dense.num_bytes == 2 * (matrices + norms)
    assert cost.head.num_elements == 4096 * 128256
    assert [(kind.num_layers, kind.token_bytes, kind.window) for kind in cost.kv] == [(32, 2 * 8 * 128 * 2, 0)]
    assert cost.kv[0].decode_flops == 4 * 32 * 128


def test_tensor_parallelism_and_fp8_kv_divide_what_a_card_reads():
    whole, half = model_of().cost, model_of(tensor_parallel_size=2, kv_cache_dtype="fp8").cost
    assert half.dense.num_elements == whole.dense.num_elements / 2
    assert half.kv[0].token_bytes == whole.kv[0].token_bytes / 4
    assert half.kv_is_quantized


def test_a_mixture_of_experts_reads_the_experts_that_some_token_visits():
    model = model_of("Qwen/Qwen3-30B-A3B")
    one, many = (float(model.parts(load(model, n, n))["experts"][0]) for n in (1, 4096))
    # One token visits 8 of 128 experts; thousands visit all.
    whole = model.cost.experts.num_bytes / model.gpu.mem_bandwidth_bytes_per_s
    reached = model.constants.bandwidth_efficiency * model.constants.expert_efficiency
    assert one == pytest.approx(whole / reached * 8 / 128, rel=0.01)
    assert many >= whole / reached


def test_windowed_layers_stop_growing_at_their_window():
    model = model_of("google/gemma-3-12b-it", max_model_len=32768)
    short, long = (model.decode_seconds(np.full(8, length), 1)[0] for length in (1024.0, 8192.0))
    by_hand = sum(
        kind.num_layers * kind.token_bytes * 8 * (8192 - 1024) for kind in model.cost.kv if not kind.window
    ) / (model.gpu.mem_bandwidth_bytes_per_s * model.constants.kv_efficiency)
    assert long - short == pytest.approx(by_hand, rel=0.1)


def test_a_jump_is_evaluated_as_its_single_steps():
    model = model_of("google/gemma-3-12b-it", max_model_len=4096)
    contexts = np.array([10.0, 900.0, 1020.0, 3000.0])
    single = [model.decode_seconds(contexts + step, 1)[0] for step in range(20)]
    assert model.decode_seconds(contexts, 20) == pytest.approx(single, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "launch"),
    [
        ("Qwen/Qwen3-30B-A3B", vllm_launch_rules),
        ("Qwen/Qwen3-0.6B", labkit_rules),
        ("Qwen/Qwen3-0.6B", lambda _: LaunchRules()),
    ],
)
def test_tables_hold_what_the_model_computes(name, launch):
    config = EngineConfig(max_num_seqs=64, max_num_batched_tokens=2048)
    model = StepTimeModel(step_cost(load_model(name), config), load_gpu("H100 SXM"), load_constants(), launch(config))
    tabulated = TabulatedStepTimes(model.cost, model.gpu, model.constants, model.launch, 2048)
    # One token, padded ones, the largest step, and one that no table has.
    for tokens, rows in ((1, 1), (37, 33), (700, 12), (2048, 64), (40_000, 64)):
        work = load(model, tokens, rows, 9000.0, 5000.0)
        work = work._replace(num_prompt_tokens=np.array([float(tokens - rows)]))
        assert tabulated.seconds(work) == pytest.approx(model.seconds(work), rel=1e-12)
    changed = dataclasses.replace(tabulated, constants=model.constants.replace(flops_efficiency=0.1))
    plain = dataclasses.replace(model, constants=changed.constants)
    small = load(model, 700, 12, 9000.0, 5000.0)
    assert changed.seconds(small) == pytest.approx(plain.seconds(small), rel=1e-12)


def test_seconds_are_the_sum_of_the_parts_times_the_correction():
    model = model_of(tensor_parallel_size=4)
    work = load(model, 300, 40, 9000.0, 5000.0)
    assert model.seconds(work)[0] == pytest.approx(sum(part[0] for part in model.parts(work).values()))
    corrected = dataclasses.replace(model, constants=model.constants.replace(correction=1.25))
    assert corrected.seconds(work)[0] == pytest.approx(1.25 * model.seconds(work)[0])


def test_without_graphs_small_steps_cost_more_and_large_ones_the_same():
    graphs, eager = model_of("Qwen/Qwen3-0.6B"), model_of("Qwen/Qwen3-0.6B", eager=True)
    assert eager.seconds(load(eager, 1, 1, 100.0))[0] > 1.5 * graphs.seconds(load(graphs, 1, 1, 100.0))[0]
    assert eager.seconds(load(eager, 8192, 8))[0] == pytest.approx(graphs.seconds(load(graphs, 8192, 8))[0], rel=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 16000), more=st.integers(0, 4000), context=st.floats(0, 1e7), extra=st.floats(0, 1e6),
    name=st.sampled_from(["Qwen/Qwen3-0.6B", "Qwen/Qwen3-30B-A3B", "deepseek-ai/DeepSeek-V2-Lite"]),
)  # fmt: skip
def test_more_work_never_takes_less_time(tokens, more, context, extra, name):
    model = model_of(name)
    before = model.seconds(load(model, tokens, min(tokens, 256), context, context))[0]
    after = model.seconds(load(model, tokens + more, min(tokens + more, 256), context + extra, context + extra))[0]
    assert 0 < before <= after * (1 + 1e-12)


@settings(max_examples=40, deadline=None)
@given(tokens=st.integers(1, 8192), context=st.floats(0, 1e7), factor=st.floats(1, 8))
def test_more_bandwidth_never_takes_more_time(tokens, context, factor):
    model = model_of()
    faster = dataclasses.replace(model.gpu, mem_bandwidth_bytes_per_s=model.gpu.mem_bandwidth_bytes_per_s * factor)
    work = load(model, tokens, min(tokens, 64), context)
    assert StepTimeModel(model.cost, faster, model.constants).seconds(work)[0] <= model.seconds(work)[0] * (1 + 1e-12)


@given(st.floats(0, 1e6), st.floats(0, 1e6))
def test_smooth_max_lies_between_the_larger_and_a_seventh_above(first, second):
    found = float(smooth_max(first, second))
    assert max(first, second) <= found * (1 + 1e-12)
    assert found <= max(first, second) * 2**0.2 * (1 + 1e-12)


def test_every_level_has_every_constant_above_zero_and_an_interval_around_one():
    for level in ("data sheet", "shipped"):
        for version in ("0.6.0", "0.19.0", "0.33.0"):
            constants = load_constants(version, level)
            assert all(getattr(constants, name) >= 0 for name in CONSTANT_NAMES)
            assert all(getattr(constants, name) > 0 for name in CONSTANT_NAMES if "efficiency" in name)
            assert constants.interval_low < 1 < constants.interval_high
            assert constants.level == level
    moe, dense = load_constants(is_moe=True), load_constants()
    assert moe.interval_high / moe.interval_low > dense.interval_high / dense.interval_low
    with pytest.raises(OutOfRangeError):
        load_constants("newest")


def test_every_card_of_the_catalogue_has_a_link():
    assert link_bytes_per_s(load_gpu("H100 SXM")) > link_bytes_per_s(load_gpu("L4")) > 0
    assert all(link_bytes_per_s(load_gpu(name)) > 0 for name in gpu_names())


@pytest.mark.parametrize("max_num_seqs", [1, 48, 700])
@pytest.mark.parametrize("max_num_batched_tokens", [700, 8192])
@pytest.mark.parametrize("largest", [False, True])
def test_the_rules_are_those_by_which_the_engine_captures(max_num_seqs, max_num_batched_tokens, largest):
    pytest.importorskip("triton", reason="needs Triton: pip install 'labkit[triton]'")
    config = EngineConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
    prompts, decodes = graph_shapes(config, largest=largest)
    rules = labkit_rules(config, largest=largest)
    assert rules.graph_sizes == tuple(shape.num_tokens for shape in decodes)
    assert rules.prompt_sizes == tuple(shape.num_tokens for shape in prompts)
    assert labkit_rules(config.replace(enforce_eager=True)) == labkit_rules(config, captures=False)


def test_steps_run_padded_in_their_graphs_or_are_launched():
    config = EngineConfig(max_num_seqs=64, max_num_batched_tokens=4096)
    constants = load_constants(engine="labkit").replace(eager_step_s=1.0)
    model = StepTimeModel(
        step_cost(load_model("Qwen/Qwen3-8B"), config), load_gpu("H200"), constants, labkit_rules(config)
    )

    def seconds(tokens, prompts):
        work = load(model, tokens, 4.0, 100.0, 100.0)._replace(num_prompt_tokens=np.array([float(prompts)]))
        return model.seconds(work)[0]

    assert seconds(41, 0) == seconds(48, 0) < seconds(49, 0)
    assert seconds(130, 100) == pytest.approx(seconds(192, 100), rel=1e-9)
    assert seconds(2000, 1990) > 1.0 > seconds(1024, 1000)
    assert model.waits_for_host(4096)
    assert not StepTimeModel(
        model.cost, model.gpu, constants.replace(eager_step_s=0.0, eager_layer_s=1e-6, eager_prompt_layer_s=0.0)
    ).waits_for_host(64)


def test_the_longer_of_host_and_card_sets_the_pace():
    clock = StepClock()
    done = [clock.submit(0.001, 0.0, 0.010)]
    assert done[0] == pytest.approx(0.011)
    # The host puts the next step together meanwhile, and waits for the first.
    done.append(clock.submit(0.001, 0.0, 0.010))
    assert clock.collect(done[0]) == pytest.approx(0.011)
    assert done[1] == pytest.approx(0.021)
    # A step that is launched kernel by kernel ends with its last launch at the earliest.
    done.append(clock.submit(0.001, 0.030, 0.002))
    assert done[2] == pytest.approx(0.011 + 0.001 + 0.030)
    assert clock.collect(done[1]) == pytest.approx(0.042)
