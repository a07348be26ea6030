"""Advice comes from planning each change: its gain is the difference of the two plans, and it cures what it says."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
from samples import sample_gpu, sample_plan, sample_record

import labkit
from labkit.advice import advise, binding_limit, headline, recommend
from labkit.advice.advise import _order, leads_with
from labkit.advice.cures import cures
from labkit.advice.limit import requests_at_once, tokens_per_request
from labkit.errors import OutOfRangeError
from labkit.specs.engine_config import EngineConfig

SMALL_CARD = sample_gpu(4.0)


def what_if(config):
    return sample_plan(config, gpu=SMALL_CARD)


def plan_of(**config):
    return what_if(EngineConfig(**config))


CASES = {
    "tight KV": {"max_model_len": 8192},
    "places bind": {"max_model_len": 512, "max_num_seqs": 8},
    "fp8 already": {"max_model_len": 8192, "kv_cache_dtype": "fp8"},
    "eager": {"max_model_len": 8192, "enforce_eager": True},
    "override": {"max_model_len": 2048, "num_gpu_blocks_override": 400},
    "does not fit": {"max_model_len": 8192, "num_gpu_blocks_override": 100},
}


@pytest.mark.parametrize("case", CASES)
def test_every_advice_is_complete_and_its_gain_is_that_of_the_new_plan(case):
    plan = plan_of(**CASES[case])
    tokens = tokens_per_request(plan)
    found = advise(plan, what_if)
    assert found, "each of these cases can be improved"
    for advice in found:
        after = what_if(plan.config.replace(**advice.changes))
        assert advice.plan == after
        assert advice.gain_tokens == after.kv_cache_tokens - plan.kv_cache_tokens
        order = ("does not fit", "may not fit", "fits")
        assert advice.cures == (order.index(after.verdict) > order.index(plan.verdict))
        if plan.verdict != "does not fit":
            expected = requests_at_once(after, tokens) / requests_at_once(plan, tokens) - 1
            assert advice.gain_share == pytest.approx(expected)
            assert "at most" in advice.gain
        assert all((advice.rule, advice.title, advice.reason, advice.risk, advice.evidence, advice.changes))


@pytest.mark.parametrize("case", CASES)
def test_cures_come_first_then_the_largest_gain(case):
    found = advise(plan_of(**CASES[case]), what_if)
    keys = [(not advice.cures, -advice.gain_share) for advice in found]
    assert keys == sorted(keys)
    assert len({advice.rule for advice in found}) == len(found)


def test_nothing_is_proposed_that_is_already_set():
    rules = {advice.rule for advice in advise(plan_of(**CASES["fp8 already"]), what_if)}
    assert "fp8-kv" not in rules
    assert "eager" not in {advice.rule for advice in advise(plan_of(**CASES["eager"]), what_if)}


def test_what_does_not_fit_gets_the_length_that_fits():
    plan = plan_of(**CASES["does not fit"])
    cures = {advice.rule: advice for advice in advise(plan, what_if) if advice.cures}
    assert cures["model-length"].changes == {"max_model_len": 1600}
    assert cures["no-override"].plan.verdict == "fits"


def test_a_change_that_the_planner_refuses_is_no_advice():
    def refuse_fp8(config):
        if config.kv_cache_dtype == "fp8":
            raise OutOfRangeError("this card has no fp8")
        return what_if(config)

    assert "fp8-kv" not in {advice.rule for advice in advise(plan_of(max_model_len=8192), refuse_fp8)}


def test_on_a_cpu_the_advice_is_about_host_memory_not_about_the_card():
    gpu = sample_gpu(name="cpu")
    plan = sample_plan(EngineConfig(cpu_memory_gib=1.0, max_model_len=8192), gpu=gpu)
    rules = {advice.rule for advice in advise(plan, lambda config: sample_plan(config, gpu=gpu))}
    assert "cpu-memory" in rules
    assert not rules & {"utilization", "eager", "tensor-parallel"}


def test_a_run_makes_the_estimate_its_own():
    record = sample_record(EngineConfig(block_size=128))
    steps = tuple(dataclasses.replace(row, num_tokens_stored=row.num_blocks_used * 64) for row in record.steps)
    record = dataclasses.replace(record, steps=steps)
    found = {advice.rule: advice for advice in advise(record.plan, sample_plan, record=record)}
    longest = max(row.input_tokens + row.output_tokens for row in record.requests)
    assert found["fp8-kv"].evidence[2].label.startswith("requests of")
    assert longest < 1024
    assert all(advice.changes["max_model_len"] == 1024 for rule, advice in found.items() if rule == "model-length")


def test_the_headline_names_verdict_limit_knob_and_gain():
    plan = plan_of(max_model_len=8192)
    best = advise(plan, what_if)[0]
    text = headline(plan, binding_limit(plan), best)
    assert text.startswith("Fits: ")
    for part in ("KV blocks bind", best.title[1:], best.gain):
        assert part in text
    broken = plan_of(**CASES["does not fit"])
    text = headline(broken, binding_limit(broken), advise(broken, what_if)[0])
    assert text.startswith("Does not fit: short by 145 MiB")
    assert "fits then" in text
    assert headline(plan, binding_limit(plan), None).endswith("No single change gives more.")


@pytest.mark.parametrize(("duration_s", "name"), [(0.01, "traffic"), (0.05, "compute")])
def test_while_memory_does_not_bind_the_headline_promises_nothing(duration_s, name):
    record = sample_record()
    steps = tuple(
        dataclasses.replace(row, num_waiting=0, num_preemptions=0, duration_s=duration_s) for row in record.steps
    )
    record = dataclasses.replace(record, steps=steps)
    limit = binding_limit(record.plan, record)
    found = advise(record.plan, sample_plan, record=record)
    assert limit.name == name
    assert "more room gains nothing yet" in headline(record.plan, limit, found[0])


def test_while_steps_are_full_more_room_is_not_called_the_next_change():
    record = sample_record()
    budget = record.plan.config.max_num_batched_tokens
    full = tuple(
        dataclasses.replace(row, num_waiting=3, num_preemptions=0, num_tokens=budget, num_blocks_used=1)
        for row in record.steps
    )
    record = dataclasses.replace(record, steps=full)
    limit = binding_limit(record.plan, record)
    assert limit.name == "max_num_batched_tokens"
    room = next(entry for entry in advise(record.plan, sample_plan, record=record) if entry.rule == "fp8-kv")
    assert not leads_with(limit, room)
    assert headline(record.plan, limit, room).endswith(
        "Next: raise max_num_batched_tokens; more room gains nothing yet."
    )
    larger = dataclasses.replace(room, changes={"max_num_batched_tokens": 2 * budget})
    assert leads_with(limit, larger)


def test_memory_of_the_host_is_raised_to_what_one_request_needs():
    model = labkit.load_model("Qwen/Qwen3-8B")
    plan = labkit.plan(model, labkit.load_gpu("cpu"), EngineConfig(max_model_len=2048, dtype="float32"))
    assert plan.verdict == "does not fit"
    cure = next(entry for entry in advise(plan) if entry.rule == "cpu-memory")
    gib = cure.changes["cpu_memory_gib"]
    assert cure.plan.verdict == "fits"
    # 8.19 billion parameters of 4 bytes, and at most a tenth for everything else.
    assert 8.19e9 * 4 / 2**30 < gib < 1.25 * 8.19e9 * 4 / 2**30


def test_what_may_not_fit_is_made_sure_first_and_the_answer_says_why_it_is_in_doubt():
    plan = labkit.plan(labkit.load_model("Qwen/Qwen2.5-32B-Instruct"), labkit.load_gpu("H100 SXM"), engine="vllm")
    assert plan.verdict == "may not fit"
    found = advise(plan)
    sure = [advice for advice in found if advice.cures]
    assert found[: len(sure)] == tuple(sure)
    assert all(advice.plan.verdict == "fits" for advice in sure)
    assert {"model-length", "utilization", "fp8-kv", "eager", "tensor-parallel"} <= {advice.rule for advice in sure}
    assert [advice.rule for advice in sure][-2:] == ["eager", "tensor-parallel"]
    said = headline(plan, binding_limit(plan), found[0])
    assert said.startswith("May not fit: ")
    assert "the plan is sure to ±" in said
    assert f"Next: {sure[0].title[0].lower()}{sure[0].title[1:]}, surely fits then" in said
    # By hand: what is left less the doubt, over the need of a token, in whole 256 tokens.
    token = (plan.breakdown.kv_cache_bytes - plan.margin_bytes) / plan.config.max_model_len
    left = plan.breakdown.kv_cache_bytes - plan.breakdown.uncertainty_bytes["kv_cache"]
    assert next(item for item in sure if item.rule == "model-length").changes == {
        "max_model_len": int(left / token) // 256 * 256
    }


def test_a_run_on_the_card_ends_the_doubt():
    plan = labkit.plan(labkit.load_model("Qwen/Qwen2.5-32B-Instruct"), labkit.load_gpu("H100 SXM"), engine="vllm")
    ran = dataclasses.replace(sample_record(), plan=plan, config=plan.config, origin="measured", status="finished")
    assert not any(advice.cures for advice in advise(plan, record=ran))
    assert any(advice.cures for advice in advise(plan, record=dataclasses.replace(ran, origin="simulated")))


def test_several_changes_at_once_are_told_where_none_alone_helps():
    plan = labkit.plan(labkit.load_model("meta-llama/Llama-3.1-70B"), labkit.load_gpu("A10"), engine="vllm")
    assert not any(advice.cures for advice in advise(plan))
    (cure,) = cures(plan)
    assert set(cure.changes) == {"tensor_parallel_size", "max_model_len"}
    again = labkit.plan(plan.model, plan.gpu, EngineConfig(**cure.changes), engine="vllm")
    assert again.verdict == "fits"
    assert cure.text.startswith(f"--tensor-parallel-size {cure.changes['tensor_parallel_size']} --max-model-len ")


def test_cures_are_written_as_they_are_typed():
    plan = labkit.plan(labkit.load_model("Qwen/Qwen2.5-32B-Instruct"), labkit.load_gpu("H100 SXM"), engine="vllm")
    assert any(cure.text.startswith("--enforce-eager: fits then") for cure in cures(plan))
    assert cures(labkit.plan(labkit.load_model("Qwen/Qwen2-0.5B"), labkit.load_gpu("A10"), engine="vllm")) == ()


def test_a_card_too_small_for_16_bit_gets_a_4_bit_copy_and_a_command_for_the_model_that_was_asked_for():
    plan = labkit.plan(labkit.load_model("Qwen/Qwen2-7B"), labkit.load_gpu("T4"), engine="vllm")
    best = advise(plan)[0]
    assert (best.rule, best.cures, best.plan.verdict) == ("awq-weights", True, "fits")
    assert "made beforehand" in best.risk
    assert "a copy of the model made for --quantization awq: fits then" in cures(plan)[0].text
    found = recommend([plan])
    assert found.config.quantization is None
    assert found.config.tensor_parallel_size == 2
    assert "awq-weights" not in {item.rule for item in advise(plan_of(max_model_len=8192), what_if)}


def test_what_a_change_brings_with_it_is_among_its_risks():
    plan = labkit.plan(labkit.load_model("Qwen/Qwen2-7B"), labkit.load_gpu("A10"), engine="vllm")
    risk = next(item.risk for item in advise(plan) if item.rule == "fp8-kv")
    assert risk.endswith("A10 has no fp8 units: whether fp8 KV works depends on the attention backend.")


def test_graphs_are_not_given_up_where_nothing_waits_for_room():
    plan = plan_of(max_model_len=512, max_num_seqs=8)
    assert binding_limit(plan).name == "max_num_seqs"
    assert "eager" not in {advice.rule for advice in advise(plan, what_if)}


def test_a_cure_that_needs_another_card_comes_after_those_that_do_not():
    plan = labkit.plan(labkit.load_model("Qwen/Qwen3-8B"), labkit.load_gpu("A10"), engine="vllm")
    assert plan.verdict == "does not fit"
    cures = [advice for advice in advise(plan) if advice.cures]
    assert "tensor_parallel_size" in cures[-1].changes
    assert "tensor_parallel_size" not in cures[0].changes
    sure = [advice.plan.verdict == "fits" for advice in cures[:-1]]
    assert sure == sorted(sure, reverse=True)


@pytest.mark.parametrize(
    ("rate", "first"), [(1030.0, "shorter wait"), (1060.0, "more rate")], ids=["not told apart", "told apart"]
)
def test_a_rate_that_a_simulation_does_not_tell_apart_outranks_no_shorter_wait(rate, first):
    plan = plan_of(max_model_len=8192)
    room = {"fp8-kv": 2.0, "step-tokens": 1.0}
    speeds = {"fp8-kv": (rate, 0.4), "step-tokens": (990.0, 0.2)}

    def speed(rate, wait_s):
        return SimpleNamespace(
            rate=rate, unit="tok/s", basis="simulated", ttft_p99_s=None, inter_token_p99_s=wait_s
        )  # fmt: skip

    sample = advise(plan, what_if)[0]
    both = [
        dataclasses.replace(sample, rule=rule, cures=False, gain_share=room[rule], before=speed(1000.0, 0.4),
                            after=speed(*speeds[rule]))
        for rule in room
    ]  # fmt: skip
    ranked = sorted(both, key=_order)
    assert ranked[0].rule == {"shorter wait": "step-tokens", "more rate": "fp8-kv"}[first]
