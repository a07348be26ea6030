"""The fit check of the preflight says what the plan says."""

from __future__ import annotations

import dataclasses

from labkit.doctor.preflight import check_fit
from labkit.memory.questions import Question
from labkit.specs import load_gpu, load_model
from labkit.specs.engine_config import EngineConfig

GIB = 2**30


def checked(model, gpu, **knobs):
    question = Question(load_model(model), gpu, EngineConfig(**knobs))
    return check_fit(question.plan(), question)


def test_a_doubt_is_the_plan_s():
    """± 1.04 GiB, not the sum of all parts' uncertainties."""
    found = checked("google/gemma-3-27b-it", load_gpu("H100 SXM"), max_model_len=131072)
    assert found.status == "warning"
    assert found.cause.startswith("one request of 131,072 tokens leaves")
    assert "± 1.0" in found.cause


def test_a_busy_card_is_a_problem_though_the_kv_would_do():
    """20 of 80 GiB are free; 0.92 asks for 73.6."""
    busy = dataclasses.replace(load_gpu("H100 SXM"), total_bytes=80 * GIB, free_bytes=20 * GIB)
    found = checked("Qwen/Qwen3-0.6B", busy)
    assert found.status == "problem"
    assert "more than is free on the card: 20.0 GiB" in found.evidence
    assert "--gpu-memory-utilization 0.25" in found.fix


def test_a_plan_that_fits_is_well():
    assert checked("Qwen/Qwen3-0.6B", load_gpu("H200")).status == "ok"
