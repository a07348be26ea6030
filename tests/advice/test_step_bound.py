"""What binds the steps: each part made the largest by hand, and the counts of one step worked out from the model."""

from __future__ import annotations

import dataclasses
import sys

import pytest
from samples import sample_record

import labkit
from labkit.advice import binding_limit, step_bound
from labkit.engine.step_constants import load_constants
from labkit.experiments.virtual_run import VirtualOptions, simulate
from labkit.measure.run_record import RequestRow, RunRecord, StepRow
from labkit.memory import plan as make_plan
from labkit.specs import cpu_gpu, synthetic_workload
from labkit.specs.engine_config import EngineConfig

LLAMA, H100 = "meta-llama/Llama-3.1-8B-Instruct", "H100 SXM"


def run_of(model: str, gpu: str, *steps: StepRow, requests=(), **knobs) -> RunRecord:
    found = make_plan(labkit.load_model(model), labkit.load_gpu(gpu), EngineConfig(**knobs), engine="vllm")
    return dataclasses.replace(sample_record(), plan=found, config=found.config, model=found.model, gpu=found.gpu,
                               steps=steps, requests=tuple(requests), origin="simulated")  # fmt: skip


def decode(num: int, context: int, seconds: float = 0.01) -> StepRow:
    return StepRow(0.0, seconds, num, 0, num, num, 0, num * context // 16, 0, num * context)


def prompt(tokens: int, seconds: float = 0.1) -> StepRow:
    return StepRow(0.0, seconds, tokens, tokens, 0, 1, 0, tokens // 16, 0, tokens)


def bound_of(record: RunRecord):
    return step_bound(record.plan, record)


def test_a_decode_step_reads_weights_and_kv_and_multiplies_each_weight_once_for_each_request():
    bound = bound_of(run_of(LLAMA, H100, decode(32, 1000, seconds=0.01)))
    point = bound.points[0]
    # 8.03e9 parameters less the 0.525e9 of the embedding table, which only looks rows up; two bytes each. KV: 32
    # layers x 8 heads x 128 x (K and V) x 2 bytes a token. The query of each of 32 heads meets K and V: 4 FLOP.
    weights, kv = (8.03e9 - 0.525e9) * 2, 32 * 1000 * 32 * 8 * 128 * 2 * 2
    assert point.num_bytes == pytest.approx(weights + kv, rel=0.01)
    assert point.flops == pytest.approx(32 * weights + 32 * 1000 * 32 * 32 * 128 * 4, rel=0.01)
    assert point.flops_per_s == pytest.approx(point.flops / 0.01)
    assert (bound.name, point.num_steps) == ("bandwidth", 1)
    assert bound.ridge == pytest.approx(989e12 / 3.35e12, rel=0.02)
    assert point.intensity < bound.ridge


def test_a_prompt_is_bound_by_compute_and_stands_right_of_the_ridge():
    ask = RequestRow(0, 0.0, 0.1, 0.2, 8192, 1)
    bound = bound_of(run_of(LLAMA, H100, prompt(8192), requests=[ask]))
    assert bound.name == "compute"
    assert bound.points[0].label == "steps with prompts"
    assert bound.points[0].intensity > bound.ridge
    # Causal attention: each of 8,192 queries meets half of them on the mean.
    attention = 32 * 32 * 128 * 4 * 8192 * 8192 / 2
    assert bound.points[0].flops == pytest.approx(8192 * 2 * (8.03e9 - 2 * 0.525e9) + attention, rel=0.01)


def test_a_small_model_alone_is_bound_by_the_host_and_in_eager_mode_by_missing_graphs():
    captured = bound_of(run_of("Qwen/Qwen2-0.5B", H100, decode(1, 100)))
    eager = bound_of(run_of("Qwen/Qwen2-0.5B", H100, decode(1, 100), enforce_eager=True))
    assert (captured.name, captured.shares["graphs"]) == ("host", 0)
    assert eager.name == "graphs"


def test_links_take_time_only_where_cards_share_a_layer():
    alone, shared = (bound_of(run_of(LLAMA, "L40S", decode(256, 10), tensor_parallel_size=count)) for count in (1, 4))
    assert alone.shares["links"] == 0 < shared.shares["links"]
    assert shared.flops_per_s == 4 * alone.flops_per_s


def test_shares_sum_to_one_and_follow_the_steps():
    bound = bound_of(run_of(LLAMA, H100, decode(32, 1000), prompt(4096), decode(8, 50)))
    assert sum(bound.shares.values()) == pytest.approx(1)
    assert [point.num_steps for point in bound.points] == [2, 1]
    assert bound.shares["compute"] > 0.5


@pytest.mark.parametrize("steps", [(), (decode(4, 10, seconds=0.0),)])
def test_a_run_of_no_time_has_no_bound(steps):
    assert bound_of(run_of(LLAMA, H100, *steps)) is None


def test_nothing_is_said_of_a_cpu_or_of_what_does_not_fit():
    record = run_of(LLAMA, "A10", decode(4, 10), max_model_len=131072)
    assert record.plan.verdict == "does not fit"
    assert bound_of(record) is None
    on_cpu = labkit.plan(labkit.load_model("HuggingFaceTB/SmolLM2-135M-Instruct"), cpu_gpu(2.0))
    assert step_bound(on_cpu, dataclasses.replace(record, plan=on_cpu)) is None


@pytest.mark.parametrize(
    ("model", "knobs", "traffic", "name"),
    [
        ("Qwen/Qwen3-8B", {"max_num_seqs": 4, "max_model_len": 4096}, (40, 200, 60), "max_num_seqs"),
        ("Qwen/Qwen3-8B", {"max_model_len": 4096}, (6, 100, 60), "bandwidth"),
        ("Qwen/Qwen3-8B", {"num_gpu_blocks_override": 160, "max_model_len": 2048}, (40, 500, 60), "kv_blocks"),
        ("Qwen/Qwen3-Embedding-0.6B", {"max_model_len": 4096}, (60, 2000, 1), "compute"),
    ],
)
def test_the_limit_at_a_load_is_named_from_a_simulated_run(model, knobs, traffic, name):
    count, inputs, outputs = traffic
    workload = synthetic_workload(count, input_lengths=inputs, output_lengths=outputs, seed=3)
    record = simulate(labkit.load_model(model), labkit.load_gpu("A10"), workload, EngineConfig(**knobs),
                      options=VirtualOptions(arrival_scale=0.0, has_server=False))  # fmt: skip
    limit = binding_limit(record.plan, record)
    assert (limit.name, limit.basis) == (name, "simulated")
    assert limit.sentence.startswith(limit.title)
    assert limit.steps is not None
    assert any(entry.label.startswith("steps' time") for entry in limit.evidence)


def test_the_engines_own_constants_on_this_card_divide_the_step(monkeypatch):
    slow_host = dataclasses.replace(load_constants(engine="labkit"), step_s=10.0)

    def known(gpu, model, *, engine, **others):
        return slow_host if (gpu.name, model, engine) == ("H200", "Qwen/Qwen3-0.6B", "labkit") else load_constants()

    monkeypatch.setattr(sys.modules[step_bound.__module__], "constants_for", known)
    record = run_of("Qwen/Qwen3-0.6B", "H200", decode(8, 500, seconds=0.003), max_model_len=4096)
    own = make_plan(record.model, record.gpu, record.config, engine="labkit")
    assert step_bound(own, record).shares["host"] > 0.99
    assert step_bound(record.plan, record).shares["host"] < 0.9
