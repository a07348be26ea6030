"""The accuracy claims are computed from the public runs, with the runs in question left out."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from labkit.engine.step_constants import load_constants
from labkit.experiments import simulation_bench as bench
from labkit.experiments.fit_constants import fit_constants
from labkit.experiments.public_runs import predict, public_runs

RESULTS = Path(__file__).parents[2] / "results" / "simulation.json"


def card_of(run):
    return run.gpu_name


def test_the_runs_that_are_used():
    runs = public_runs()
    assert len({run.run_id for run in runs}) > 1000
    assert {run.gpu_name for run in runs} == {"A100-40GB", "H100 SXM", "H200", "B200"}
    assert all(run.seconds > 0 and run.config.tensor_parallel_size >= 1 for run in runs)
    assert not any("Qwen3-235B" in run.model_name for run in runs)
    # Of 180 rows of gpt-oss, 24 do not say which vLLM it was, and 6 are those of 0.11.2 at a load of 512.
    assert sum("gpt-oss" in run.model_name for run in runs) == 150


@pytest.mark.parametrize(
    ("engine", "version", "moe", "bar"),
    [("V1", "0.19.0", False, 0.07), ("V1", "0.19.0", True, 0.15), ("V0", "0.6.0", False, 0.08)],
)
def test_shipped_constants_predict_the_runs_they_were_fitted_to(engine, version, moe, bar):
    runs = tuple(run for run in public_runs() if run.engine == engine and run.is_moe == moe)
    ratio = predict(runs, load_constants(version)) / bench.measured_s(runs)
    assert np.median(np.abs(ratio - 1)) < bar


def test_a_card_left_out_is_predicted_by_the_others():
    runs = tuple(run for run in public_runs() if run.model_name == "meta-llama/Llama-3.1-70B")
    errors = bench.left_out(runs, card_of, bench.fits_without(runs, card_of))
    assert np.median(np.abs(np.expm1(errors))) < 0.08


def test_leaving_out_does_not_see_what_it_predicts():
    runs = tuple(run for run in public_runs() if run.engine == "V0" and "8B" in run.model_name)
    from dataclasses import replace

    doubled = tuple(replace(run, seconds=2 * run.seconds) if run.gpu_name == "H100 SXM" else run for run in runs)
    is_h100 = np.array([run.gpu_name == "H100 SXM" for run in runs])
    honest, changed = (bench.left_out(group, card_of, bench.fits_without(group, card_of)) for group in (runs, doubled))
    assert changed[is_h100] == pytest.approx(honest[is_h100] - np.log(2))


def test_the_fit_finds_constants_that_made_the_times():
    runs = tuple(run for run in public_runs() if run.engine == "V0")[::6]
    prior = load_constants(level="data sheet")
    truth = prior.replace(step_s=0.002, bandwidth_efficiency=0.7)
    found = fit_constants(
        prior,
        lambda one: predict(runs, one),
        predict(runs, truth),
        {"step_s": 2.0, "bandwidth_efficiency": 1.0},
        noise=0.01,
    )
    assert found.step_s == pytest.approx(0.002, rel=0.01)
    assert found.bandwidth_efficiency == pytest.approx(0.7, rel=0.01)


def test_of_several_beginnings_the_best_fit_counts():
    """A time that is the longer of two: from the prior the shorter one moves nothing, from another start it does."""
    prior = load_constants(level="data sheet").replace(step_s=1e-3, request_s=1e-6)

    def longer(one):
        return np.maximum(np.full(4, one.step_s), one.request_s * np.array([1.0, 2.0, 3.0, 4.0]))

    measured = longer(prior.replace(step_s=1e-4, request_s=5e-3))
    sigmas = {"request_s": 10.0}
    assert fit_constants(prior, longer, measured, sigmas).request_s == pytest.approx(1e-6, rel=0.01)
    for starts in ([prior.replace(request_s=4e-3)], [prior.replace(request_s=2e-6), prior.replace(request_s=4e-3)]):
        assert fit_constants(prior, longer, measured, sigmas, starts=starts).request_s == pytest.approx(5e-3, rel=0.01)


def test_a_pair_in_the_wrong_order_counts():
    runs = [run for run in public_runs() if run.engine == "V1" and run.model_name.startswith("meta")]
    same = [
        run
        for run in runs
        if (run.input_tokens, run.gpu_name, run.weights) == (runs[0].input_tokens, runs[0].gpu_name, runs[0].weights)
    ]
    assert bench.right_order([(run, 0.0) for run in same]) == 100.0
    rates = [np.log(run.concurrency / run.seconds / run.config.tensor_parallel_size) for run in same]
    turned = [(run, 2 * rate) for run, rate in zip(same, rates, strict=True)]
    assert bench.right_order(turned) == 0.0


def test_intervals_hold_nine_in_ten_of_new_groups():
    rng = np.random.default_rng(3)
    inside = []
    for _ in range(200):
        groups = [rng.normal(rng.normal(0.1, 0.1), 0.1, 50) for _ in range(9)]
        low, high = bench.interval(groups[:8])
        inside.append(np.mean((low <= groups[8]) & (groups[8] <= high)))
    assert 0.85 < np.mean(inside) < 0.95


def test_the_results_file_says_what_the_code_gives():
    stored = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert set(stored["summary"]) >= {bench.DENSE_CARD, bench.DENSE_MODEL, bench.MOE_MODEL, bench.ORDER}
    dense = [
        row for row in stored["rows"] if row["check"] == "in sample" and row["group"] == "meta-llama/Llama-3.1-70B"
    ]
    runs = tuple(run for run in public_runs() if run.model_name == "meta-llama/Llama-3.1-70B")
    ratio = predict(runs, load_constants("0.19.0")) / bench.measured_s(runs)
    assert dense[0]["median_error_percent"] == pytest.approx(100 * np.median(np.abs(ratio - 1)), abs=0.01)
