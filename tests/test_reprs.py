"""What a notebook's cell shows of a record is one line, however many requests and layers it holds."""

from __future__ import annotations

import pytest

import labkit
from labkit.experiments.virtual_run import simulate

LONGEST = 500


@pytest.fixture(scope="module")
def record():
    traffic = labkit.load_workload("azure-2023-conv", limit=300)
    model, card = labkit.load_model("qwen3-8b"), labkit.load_gpu("L40S")
    return simulate(model, card, traffic, labkit.EngineConfig(max_model_len=8192))


def test_a_run_is_one_line_with_its_name_and_outcome(record):
    assert len(record.steps) > 300
    shown = repr(record)
    assert len(shown) < LONGEST
    assert "\n" not in shown
    for part in ("RunRecord(", record.run_id, "'finished'", "'simulated'", "'Qwen/Qwen3-8B'", "'L40S'"):
        assert part in shown
    assert "num_requests=300" in shown
    assert f"num_steps={len(record.steps)}" in shown


def test_a_plan_is_one_line_with_its_verdict(record):
    shown = repr(record.plan)
    assert len(shown) < LONGEST
    assert "\n" not in shown
    assert "verdict='fits'" in shown
    assert f"kv_cache_tokens={record.plan.kv_cache_tokens}" in shown


def test_models_and_traffic_are_one_line():
    model, traffic = labkit.load_model("gpt-oss-120b"), labkit.load_workload("azure-2023-conv")
    assert len(repr(model)) < LONGEST
    assert "num_layers=36" in repr(model)
    assert len(repr(traffic)) < LONGEST
    assert "num_requests=19366" in repr(traffic)


def test_what_advice_shows_of_its_plans_is_short(record):
    from labkit.advice import advise

    assert len(repr(advise(record.plan))) < 20_000


def test_completion_offers_the_public_names_and_rooms():
    assert set(labkit.__all__) < set(dir(labkit))
    assert "widgets" in dir(labkit)
    assert not {"Any", "lazy_attribute", "annotations"} & set(dir(labkit))
    assert all(hasattr(labkit, name) for name in dir(labkit))
