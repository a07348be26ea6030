"""Recommendations: the best run wins only by more than the noise, and every state has an answer."""

from __future__ import annotations

import dataclasses

import pytest
from samples import sample_plan, sample_record

from labkit.advice import noise_of, recommend
from labkit.errors import LabkitError
from labkit.measure.summary import summarize
from labkit.specs.engine_config import EngineConfig


def run(run_id, *, speed=1.0, status="finished", **config):
    record = sample_record(EngineConfig(**config), run_id=run_id, name=run_id, status=status)
    return dataclasses.replace(record, duration_s=record.duration_s / speed)


def test_a_clear_winner_is_recommended_with_its_gain():
    baseline, best = run("a", block_size=16), run("b", speed=1.5, block_size=32)
    found = recommend([], [baseline, best, run("c", speed=1.2, block_size=64)], what_if=sample_plan)
    assert (found.outcome, found.run_id, found.baseline_run_id) == ("change", "b", "a")
    assert found.config == best.config
    gain = found.gains[0]
    assert gain.after == summarize(best).output_tokens_per_s
    assert gain.words.startswith("+50 % (")
    assert gain.verdict == "better"
    assert "block_size 16 → 32" in found.sentence
    assert "--block-size 32" in found.command
    assert {reason.rule for reason in found.reasons} == {"baseline-limit", "limit"}
    assert all(reason.evidence and reason.at_most for reason in found.reasons)


@pytest.mark.parametrize(("speed", "outcome"), [(1.04, "no difference"), (1.06, "change"), (0.5, "no difference")])
def test_inside_the_assumed_noise_the_baseline_is_kept(speed, outcome):
    found = recommend([], [run("a"), run("b", speed=speed, block_size=32)], what_if=sample_plan)
    assert found.outcome == outcome
    if outcome == "no difference":
        assert found.run_id == "a"
        assert found.gains == ()
        assert found.sentence.startswith("No difference")


def test_repeats_measure_the_noise_and_raise_the_confidence():
    speeds = {"a": (1.0, 1.001, 0.999), "b": (1.02, 1.021, 1.019)}
    records = [
        run(f"{name}{index}", speed=speed, block_size=16 if name == "a" else 32)
        for name, group in speeds.items()
        for index, speed in enumerate(group)
    ]
    found = recommend([], records, what_if=sample_plan)
    assert found.outcome == "change"
    assert found.noise.repeats == 3
    assert found.confidence == "medium"  # 40 requests a run are too few for "high"
    wide = [run("x", speed=0.7), run("y", speed=1.3), run("z", speed=1.05, block_size=32)]
    assert recommend([], wide, what_if=sample_plan).outcome == "no difference"


def test_noise_is_twice_the_standard_error_of_a_difference():
    groups = {"a": [90.0, 110.0], "b": [210.0, 190.0]}
    assumed = 0.05 / 8**0.5
    variance = (2 * assumed**2 + 2 * 0.1**2 + 2 * 0.05**2) / (2 + 2)
    assert noise_of(groups).share == pytest.approx(2 * variance**0.5)
    many = {"a": [100.0 + (-1) ** index for index in range(400)]}
    assert noise_of(many).share == pytest.approx(2 * 0.01 * (2 / 400) ** 0.5, rel=0.02)


def test_only_the_compared_groups_need_their_repeats():
    groups = {"baseline": [100.0, 104.0], "best": [120.0, 124.0], "once": [90.0]}
    whole, compared = noise_of(groups), noise_of(groups, compared=("baseline", "best"))
    assert compared.share == pytest.approx(whole.share / 2**0.5)
    assert (whole.repeats, compared.repeats) == (1, 2)


def test_two_equal_runs_do_not_prove_that_there_is_no_noise():
    assert 0.03 < noise_of({"a": [100.0, 100.0], "b": [101.0]}).share < 0.05


def test_without_repeats_the_noise_is_assumed_and_said():
    assert noise_of({"a": [1.0]}).share == 0.05
    assert noise_of({"a": [1.0]}, simulated=True).share == 0.01
    assert noise_of({}).repeats == 1
    assert "differences under 5 % are not called" in noise_of({}).sentence


def test_among_equals_the_shorter_first_token_wins():
    slow_start = sample_record(EngineConfig(block_size=32), run_id="slow", slowness=2.0)
    quick_start = sample_record(EngineConfig(block_size=64), run_id="quick", slowness=1.0)
    baseline = run("a", speed=0.5)
    same = [dataclasses.replace(record, duration_s=4.0) for record in (slow_start, quick_start)]
    assert recommend([], [baseline, *same], what_if=sample_plan).run_id == "quick"


def test_unfinished_runs_never_win_and_are_counted():
    records = [run("a"), run("b", speed=3.0, status="failed", block_size=32), run("c", status="cancelled")]
    found = recommend([], records, what_if=sample_plan)
    assert (found.outcome, found.run_id) == ("one run", "a")
    assert "2 unfinished runs are left out" in found.confidence_reason


def test_a_metric_that_became_worse_is_said():
    slower_start = sample_record(EngineConfig(block_size=32), run_id="b", slowness=1.5)
    found = recommend([], [run("a"), dataclasses.replace(slower_start, duration_s=2.0)], what_if=sample_plan)
    verdicts = {gain.metric: gain.verdict for gain in found.gains}
    assert verdicts["time to first token, p95"] == "worse"
    assert "time to first token, p95 +50 %" in found.reasons[-1].risk


def test_from_plans_alone_the_roomiest_that_fits_is_taken():
    small, large = sample_plan(EngineConfig()), sample_plan(EngineConfig(kv_cache_dtype="fp8"))
    found = recommend([small, large], what_if=sample_plan)
    assert (found.outcome, found.config, found.run_id) == ("plan only", large.config, None)
    assert found.confidence == "low"
    assert recommend([small], what_if=sample_plan).config == small.config


def test_when_nothing_fits_the_cure_is_recommended():
    plan = sample_plan(EngineConfig(max_model_len=8192, num_gpu_blocks_override=100))
    found = recommend([plan], what_if=sample_plan)
    assert found.outcome == "nothing fits"
    assert found.sentence.startswith("Does not fit: KV blocks bind: one request of 8,192 tokens")
    assert found.plan.verdict == "fits"
    assert found.limit.sentence != found.reasons[0].sentence
    assert found.limit.sentence in found.reasons[1].sentence


def test_nothing_at_all_and_an_unknown_baseline_are_clear_errors():
    with pytest.raises(LabkitError, match="nothing to recommend from"):
        recommend([], [])
    with pytest.raises(LabkitError, match="no finished run has the id 'zz'"):
        recommend([], [run("a")], baseline_run_id="zz", what_if=sample_plan)


def test_another_baseline_can_be_named():
    records = [run("a"), run("b", speed=2.0, block_size=32)]
    found = recommend([], records, baseline_run_id="b", what_if=sample_plan)
    assert (found.outcome, found.baseline_run_id) == ("no difference", "b")


def test_a_recommendation_says_whose_speeds_it_rests_on_and_how_they_were_got():
    record = sample_record()
    found = recommend([], [record])
    assert "the speeds are those of labkit's engine, not of vLLM" in found.confidence_reason
    vllm = dataclasses.replace(record, plan=dataclasses.replace(record.plan, engine="vllm"), origin="simulated")
    assert "labkit's engine" not in recommend([], [vllm]).confidence_reason
    pair = [dataclasses.replace(one, origin="simulated") for one in (run("a"), run("b", speed=1.5, block_size=32))]
    found = recommend([], pair, what_if=sample_plan)
    assert found.outcome == "change"
    assert any(reason.risk.startswith("Simulated on this workload") for reason in found.reasons)
    assert not any("easured" in reason.risk for reason in found.reasons)


@pytest.mark.parametrize("origin", ["measured", "simulated"])
def test_the_sentence_says_how_the_rates_were_got(origin):
    made = run("a"), run("b", block_size=8), run("c", speed=1.5, block_size=32)
    slow, equal, fast = (dataclasses.replace(record, origin=origin) for record in made)
    for runs in ([slow], [slow, equal], [slow, fast]):
        assert origin in recommend([], runs, what_if=sample_plan).sentence.split("(simulated runs repeat")[0]
