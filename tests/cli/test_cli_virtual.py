"""`labkit simulate` and `labkit claims` as a user types them."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from labkit.cli import app
from labkit.experiments import virtual_sweep


def run(*words: str):
    return CliRunner().invoke(app, list(words))


def test_simulate_prints_speed_and_how_sure_it_is():
    result = run("simulate", "--model", "Qwen/Qwen3-8B", "--gpu", "L40S", "--limit", "10", "--max-model-len", "8192")
    assert result.exit_code == 0
    assert "10 of 10 requests" in result.output
    assert "simulated" in result.output
    assert "Nine in ten" in result.output.replace("\n", " ")


def test_simulate_gives_the_record_as_json():
    result = run("simulate", "--model", "Qwen/Qwen3-8B", "--gpu", "A10", "--limit", "3", "--engine", "labkit", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["record"]["origin"] == "simulated"


def test_claims_by_name_as_text_and_json():
    text = run("claims", "C06")
    assert text.exit_code == 0
    assert text.output.startswith("C06 WRONG")
    rows = json.loads(run("claims", "c10", "C06", "--json").stdout)
    assert [row["claim"] for row in rows] == ["C10", "C06"]


def test_a_claims_file(tmp_path):
    path = tmp_path / "claims.json"
    assert run("claims", "C06", "--out", str(path)).exit_code == 0
    assert json.loads(path.read_text())["rows"][0]["claim"] == "C06"


@pytest.mark.parametrize("words", [("claims", "C99"), ("simulate", "--gpu", "cpu", "--limit", "2")])
def test_what_cannot_be_is_refused(words):
    result = run(*words)
    assert result.exit_code != 0
    assert type(result.exception).__name__ in ("UnknownNameError", "UnsupportedError")


def test_a_preset_fills_what_is_not_said():
    command = ("simulate", "--preset", "embedding", "--model", "Qwen/Qwen3-Embedding-0.6B", "--gpu", "L40S", "--json")
    row = json.loads(run(*command, "--limit", "3", "--max-num-seqs", "7").stdout)["record"]
    assert row["workload"]["name"] == "azure-2023-code"
    assert len(row["requests"]) == 3
    assert {one["output_tokens"] for one in row["requests"]} == {1}
    assert (row["config"]["max_num_seqs"], row["config"]["max_model_len"]) == (7, 8192)
    assert "most requests per second" in run("presets").stdout


def test_advise_prints_the_limit_and_what_each_change_would_buy():
    result = run("advise", "--model", "Qwen/Qwen3-8B", "--gpu", "L40S", "--limit", "4", "--max-model-len", "8192")
    assert result.exit_code == 0
    text = result.output.replace("\n", " ")
    for part in ("binds", "Store the weights in fp8", "KV cache:", "KV tokens:", "tok/s", "p99 first token", "risk:"):
        assert part in text
    from_plan = run("advise", "--gpu", "cpu", "--limit", "2")
    assert from_plan.exit_code == 0
    assert "tok/s" not in from_plan.output


SWEEP = ("simulate", "--model", "Qwen/Qwen3-8B", "--gpu", "L4", "--limit", "6", "--max-model-len", "4096")


def test_a_sweep_serves_every_combination_and_shows_the_best_first():
    found = run(*SWEEP, "--sweep", "max_num_seqs=1,8", "--sweep", "--kv-cache-dtype=auto,fp8")
    assert found.exit_code == 0, found.output
    lines = found.stdout.splitlines()
    assert lines[0] == "4 of 4 combinations are served, the best first"
    rates = [float(line.split()[0]) for line in lines[2:6]]
    assert rates == sorted(rates, reverse=True)
    settings = {line.split("  ")[-1] for line in lines[2:6]}
    assert settings == {f"max_num_seqs={seqs} kv_cache_dtype={kv}" for seqs in (1, 8) for kv in ("auto", "fp8")}
    assert lines[6].startswith(f"the best: {lines[2].split('  ')[-1]}")
    assert lines[7].startswith("vllm serve Qwen/Qwen3-8B --max-model-len 4096")


def test_a_sweep_says_what_is_refused_and_what_would_do():
    found = run(*SWEEP, "--sweep", "gpu_memory_utilization=0.5,0.9", "--json")
    rows = json.loads(found.stdout)
    assert [row["knobs"]["gpu_memory_utilization"] for row in rows] == [0.9, 0.5]
    assert [row["status"] for row in rows] == ["finished", "failed"]
    assert "turn: gpu_memory_utilization" in rows[1]["error"]
    text = run(*SWEEP, "--sweep", "gpu_memory_utilization=0.5").stdout
    assert text.startswith("0 of 1 combinations are served")
    assert "1 refused: Qwen/Qwen3-8B does not fit L4" in text


@pytest.mark.parametrize(("word", "error"), [("max_num_seqs", "FileFormatError"), ("no_knob=1", "UnknownNameError"),
                                             ("block_size=0", "OutOfRangeError")])  # fmt: skip
def test_a_sweep_over_what_is_no_knob_or_value_is_refused(word, error):
    assert type(run(*SWEEP, "--sweep", word).exception).__name__ == error


def test_ctrl_c_ends_a_sweep_and_shows_what_was_done(monkeypatch):
    sweep = virtual_sweep.simulate_sweep

    def interrupted(*words, **settings):
        yield next(sweep(*words, **settings))
        raise KeyboardInterrupt

    monkeypatch.setattr(virtual_sweep, "simulate_sweep", interrupted)
    found = run(*SWEEP, "--sweep", "max_num_seqs=1,8")
    assert found.exit_code == 130
    assert "1 of 1 combinations are served" in found.stdout


def test_embeddings_are_counted_in_requests():
    found = run("simulate", "--preset", "embedding", "--model", "Qwen/Qwen3-Embedding-0.6B", "--gpu", "A10",
                "--limit", "5")  # fmt: skip
    assert "req/s, 5 of 5 requests" in found.output
    assert "whole request: p50" in found.output
    assert "tok/s" not in found.output
    assert "decode" not in found.output, "no step of it decodes"


def test_a_plan_says_how_many_requests_of_a_trace_it_holds():
    found = run("plan", "--model", "Qwen/Qwen3-8B", "--gpu", "L40S", "--max-model-len", "8192", "--workload",
                "azure-2023-conv")  # fmt: skip
    assert "requests of azure-2023-conv at once, by their own lengths: " in found.output
