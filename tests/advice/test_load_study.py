"""What a change would buy on a traffic: the simulated rates and p99 of both settings, and what came of it."""

from __future__ import annotations

import dataclasses

import pytest
from samples import sample_plan, sample_record

import labkit
from labkit.advice import Applied, SpeedBook, binding_limit, follow_up, headline, speed_of, study_load
from labkit.advice.advise import WORTH_SPEED_SHARE
from labkit.advice.load_study import check_goal
from labkit.advice.speed import MAX_REQUESTS, Scale, scale_of
from labkit.experiments.virtual_run import VirtualOptions, simulate
from labkit.measure.summary import summarize
from labkit.memory import plan as make_plan
from labkit.specs import get_preset, synthetic_workload
from labkit.specs.engine_config import EngineConfig

MODEL, CARD = labkit.load_model("Qwen/Qwen3-8B"), labkit.load_gpu("L40S")
TRAFFIC = synthetic_workload(30, input_lengths=600, output_lengths=40, arrivals="poisson:20", seed=5)
BASE = EngineConfig(max_model_len=4096, max_num_seqs=8)


def plan_of(config: EngineConfig = BASE, **changes):
    return make_plan(MODEL, CARD, config.replace(**changes), engine="vllm")


def served(config: EngineConfig, scale: float):
    options = VirtualOptions(arrival_scale=scale, has_server=scale > 0)
    return summarize(simulate(MODEL, CARD, TRAFFIC, config, options=options))


@pytest.fixture(scope="module")
def study():
    return study_load(plan_of(), TRAFFIC, lambda config: make_plan(MODEL, CARD, config, engine="vllm"))


def test_rate_is_that_of_waiting_requests_and_p99_that_of_the_load():
    speed = speed_of(plan_of(), TRAFFIC)
    assert speed.rate == pytest.approx(served(BASE, 0.0).output_tokens_per_s)
    loaded = served(BASE, 1.0)
    assert speed.ttft_p99_s == pytest.approx(loaded.ttft_s.p99)
    assert speed.inter_token_p99_s == pytest.approx(loaded.inter_token_s.p99)
    assert (speed.unit, speed.basis) == ("tok/s", "simulated")


def test_embeddings_count_requests():
    embed = make_plan(labkit.load_model("Qwen/Qwen3-Embedding-0.6B"), CARD, BASE, engine="vllm")
    traffic = synthetic_workload(10, input_lengths=300, output_lengths=1)
    speed = speed_of(embed, traffic)
    assert speed.unit == "req/s"
    assert speed.inter_token_p99_s is None


def test_a_run_scales_what_is_simulated():
    record = simulate(MODEL, CARD, TRAFFIC, BASE)
    slower = dataclasses.replace(record, origin="measured", duration_s=record.duration_s * 2, requests=tuple(
        dataclasses.replace(row, token_times_s=tuple(2 * time for time in row.token_times_s)) for row in record.requests
    ))  # fmt: skip
    scale = scale_of(slower)
    assert scale == Scale(pytest.approx(0.5, rel=0.02), pytest.approx(2.0, rel=0.02))
    assert scale_of(record) is None
    plain, scaled = speed_of(plan_of(), TRAFFIC), speed_of(plan_of(), TRAFFIC, Scale(0.5, 2.0))
    assert scaled.rate == pytest.approx(plain.rate / 2)
    assert scaled.ttft_p99_s == pytest.approx(2 * plain.ttft_p99_s)
    assert "scaled to a run" in scaled.basis


def test_only_the_beginning_of_a_long_traffic_is_simulated():
    long = synthetic_workload(MAX_REQUESTS + 50, input_lengths=100, output_lengths=4)
    speed = speed_of(plan_of(), long)
    assert len(speed.record.requests) == MAX_REQUESTS
    assert speed.basis == f"simulated on {MAX_REQUESTS} requests", "a rate of a part of the traffic says so"
    assert speed_of(plan_of(), long, Scale(0.5, 2.0)).basis.endswith("requests, scaled to a run")


@pytest.mark.parametrize("plan", [sample_plan(), plan_of(max_model_len=200_000)])
def test_without_figures_or_room_nothing_is_told(plan):
    assert speed_of(plan, TRAFFIC) is None
    assert study_load(plan, TRAFFIC) is None
    assert speed_of(plan_of(), TRAFFIC.with_requests((), "none")) is None


def test_the_limit_is_that_of_the_traffic_and_the_best_change_comes_first(study):
    assert (study.limit.name, study.limit.basis) == ("max_num_seqs", "simulated")
    best = study.advice[0]
    shares = [advice.rate_share for advice in study.advice if abs(advice.rate_share) >= WORTH_SPEED_SHARE]
    assert shares == sorted(shares, reverse=True)
    assert {"more-seqs", "fp8-weights"} <= {advice.rule for advice in study.advice}
    after = served(BASE.replace(**best.changes), 0.0).output_tokens_per_s
    assert best.after.rate == pytest.approx(after)
    assert best.gain.startswith("at most +")
    assert f"{best.rate_share * 100:.0f} %" in best.gain
    assert best.gain in headline(plan_of(), study.limit, best)


def test_every_change_says_gib_tokens_rate_and_p99(study):
    for advice in study.advice:
        labels = " ".join(entry.label for entry in advice.evidence)
        for part in ("KV cache", "KV tokens", "rate when all requests wait", "p99 first token", "p99 between tokens"):
            assert part in labels
        assert "at most" in advice.gain or "which costs" in advice.gain
        assert advice.risk


def test_what_makes_it_slower_is_no_advice(study):
    assert all(advice.rate_share > -WORTH_SPEED_SHARE or advice.p99_share < 0 for advice in study.advice)


def test_eager_mode_is_found_where_it_costs():
    model = labkit.load_model("Qwen/Qwen2-0.5B")
    found = make_plan(model, CARD, BASE.replace(enforce_eager=True), engine="vllm")
    study = study_load(found, synthetic_workload(4, input_lengths=100, output_lengths=40))
    assert study.advice[0].rule == "graphs"
    assert study.advice[0].rate_share > 0.2


def test_prompts_that_stall_answers_call_for_shorter_steps():
    traffic = synthetic_workload(16, input_lengths=3000, output_lengths=30, arrivals="poisson:6", seed=2)
    study = study_load(plan_of(EngineConfig(max_model_len=4096)), traffic)
    shorter = next(advice for advice in study.advice if advice.rule == "shorter-steps")
    assert shorter.changes == {"max_num_batched_tokens": 1024}
    assert shorter.after.inter_token_p99_s < shorter.before.inter_token_p99_s
    assert "p99 between tokens" in shorter.gain


def test_a_study_that_nobody_waits_for_ends():
    asked = []

    def is_stale() -> bool:
        asked.append(1)
        return len(asked) > 2

    assert study_load(plan_of(), TRAFFIC, is_stale=is_stale) is None
    assert study_load(plan_of(), TRAFFIC, is_stale=lambda: True) is None


def test_a_book_simulates_each_setting_once():
    book = SpeedBook(TRAFFIC)
    assert book.speed(plan_of()) is book.speed(plan_of())
    assert book.scale(None) is None


def records_of(study, *configs):
    return [simulate(MODEL, CARD, TRAFFIC, config, options=VirtualOptions(arrival_scale=0.0), run_id=str(index))
            for index, config in enumerate(configs)]  # fmt: skip


def test_estimated_against_got(study):
    advice = study.advice[0]
    after = BASE.replace(**advice.changes)
    applied = Applied(advice, BASE, after, plan_of())
    before_run, after_run = records_of(study, BASE, after)
    assert follow_up(applied, [before_run]) is None
    found = follow_up(applied, [before_run, after_run])
    rows = {row[0]: row[1:] for row in found.rows}
    assert rows["KV tokens"][0] == rows["KV tokens"][1] == f"{advice.plan.kv_cache_tokens:,}"
    old, new = (summarize(run).output_tokens_per_s for run in (before_run, after_run))
    assert f"got +{100 * (new / old - 1):.0f} %" in found.sentence
    assert advice.gain in found.sentence
    alone = follow_up(applied, [after_run])
    assert "no run with the settings before" in alone.sentence


def test_a_run_elsewhere_is_not_compared(study):
    advice = study.advice[0]
    after = BASE.replace(**advice.changes)
    applied = Applied(advice, BASE, after, plan_of())
    elsewhere = dataclasses.replace(sample_record(), config=after)
    found = follow_up(applied, [elsewhere])
    assert found.rows == ()
    assert "not compared" in found.sentence


def test_a_failed_run_is_no_result(study):
    advice = study.advice[0]
    after = BASE.replace(**advice.changes)
    failed = dataclasses.replace(records_of(study, after)[0], status="failed")
    assert follow_up(Applied(advice, BASE, after, plan_of()), [failed]) is None


def test_a_measured_run_gives_the_limit():
    record = dataclasses.replace(simulate(MODEL, CARD, TRAFFIC, BASE), origin="measured")
    study = study_load(record.plan, TRAFFIC, record=record)
    assert study.limit == binding_limit(record.plan, record)
    assert study.limit.basis == "measured"


def test_a_goal_is_checked_against_the_p99_of_the_load():
    task, speed = get_preset("chat"), speed_of(plan_of(), TRAFFIC)
    found = check_goal(task, dataclasses.replace(speed, inter_token_p99_s=0.099))
    assert found.is_met
    assert "p99 99.0 ms of the 100 ms that the task allows: within its goal" in found.sentence
    assert not check_goal(task, dataclasses.replace(speed, inter_token_p99_s=0.101)).is_met
    assert check_goal(get_preset("batch"), speed).is_met
    whole = check_goal(get_preset("embedding"), speed)
    assert whole.is_met == (summarize(speed.record).e2e_s.p99 <= 1.0)
