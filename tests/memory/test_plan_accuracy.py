"""The planner against real start-ups, also with whole models and whole settings left out of the fit."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

import labkit.memory.budget as budget
from labkit.memory.fit import fit_constants, write_constants
from labkit.memory.planner_bench import bench_planner
from labkit.memory.run_files import load_runs


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return bench_planner(tmp_path_factory.mktemp("bench") / "planner.json")


def test_every_number_asked_for(result):
    summary = result["summary"]
    assert not [name for name, entry in summary.items() if not entry["ok"] and "ms]" not in name]
    assert {"H100 pool, mean absolute [%]", "H200 graphs, largest [GiB]", "false fits"} <= summary.keys()


def test_the_result_file_in_the_project_says_the_same(result):
    kept = json.loads((Path(__file__).parents[2] / "results" / "planner.json").read_text())
    for name in ("golden_table", "public_reports", "verdicts", "h100_vllm_0_19", "h200_vllm_0_25"):
        assert kept[name] == result[name], f"run `labkit bench planner`: {name} changed"


@pytest.mark.parametrize("group", ["leaving_out_whole_models", "leaving_out_whole_settings"])
def test_left_out_runs_are_within_what_was_asked(result, group):
    h100, h200 = result[group]["h100_vllm_0_19"], result[group]["h200_vllm_0_25"]
    assert h100["pool_percent"]["mean_absolute"] <= 1
    assert h100["tokens_percent"]["mean_absolute"] <= 2
    assert h100["activation_percent"]["mean_absolute"] <= 10
    assert h200["pool_percent"]["mean_absolute"] <= 1
    assert h200["tokens_percent"]["mean_absolute"] <= 2
    assert abs(h200["activation_gib"]["largest"]) <= 0.3
    assert h200["graphs_gib"]["mean_absolute"] <= 0.3


def test_activations_of_model_families_that_were_never_fitted(result):
    found = result["activations_of_families_not_in_the_fit"]
    assert len(found["percent"]) == 8
    assert found["mean_absolute_percent"] <= 5
    assert all(abs(value) <= 10 for value in found["percent"].values())


def test_no_run_that_started_is_refused(result):
    assert result["verdicts"]["false_refusals"] == result["verdicts"]["false_fits"] == []


def test_the_constants_in_the_project_are_the_fit(tmp_path):
    written = tmp_path / "constants.json"
    write_constants(written)
    assert json.loads(written.read_text()) == json.loads(
        Path(budget.__file__).with_name("vllm_constants.json").read_text()
    )


def test_the_fit_finds_constants_that_made_the_data():
    truth = dataclasses.replace(fit_constants(load_runs()).first, sampler_bytes=12.0, hidden_copies=1.0)
    made = [
        dataclasses.replace(
            run,
            activation_gib=budget.activation_with(
                truth,
                run.model,
                run.config,
                _first_stage(run),
                "bfloat16" if run.config.dtype == "auto" else run.config.dtype,
            )
            / 2**30,
        )
        for run in load_runs()
    ]
    assert fit_constants(made).first.sampler_bytes == pytest.approx(12.0, rel=0.02)


def _first_stage(run):
    from labkit.memory.fit import first_stage

    return first_stage(run)
