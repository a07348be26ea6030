"""Settings for common cards are the best of what was simulated, and the page shows the results file."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from labkit.advice import check_command
from labkit.advice.card_settings import (
    CARDS,
    MODELS,
    TRACES,
    VERSION,
    best_settings,
    card_traffic,
    settings_table,
)
from labkit.experiments.virtual_run import VirtualOptions, simulate
from labkit.measure.summary import summarize
from labkit.specs import load_gpu, load_model, load_workload

ROOT = Path(__file__).parents[2]


def test_no_configuration_of_the_grid_is_more_than_two_percent_better():
    model, gpu, traffic = load_model("Qwen/Qwen3-8B"), load_gpu("A10"), load_workload("azure-2023-conv", limit=30)
    best = best_settings(model, gpu, traffic)
    for seqs, tokens in ((32, 2048), (32, 8192), (128, 2048), (256, 8192)):
        other = best.config.replace(max_num_seqs=seqs, max_num_batched_tokens=tokens)
        record = simulate(model, gpu, traffic, other, options=VirtualOptions(arrival_scale=0.0))
        assert (summarize(record).requests_per_s or 0.0) <= 1.02 * best.summary.requests_per_s


def one_row(card: str, model: str, limit: int = 5):
    return next(settings_table(cards=(card,), models=(model,), traces=("azure-2023-conv",), limit=limit))


def test_what_one_card_cannot_hold_takes_the_fewest_that_can():
    # 32.8e9 weights of two bytes are 61 GiB: more than two A10 of 22 GiB hold, and less than four.
    row = one_row("A10", "Qwen/Qwen2.5-32B-Instruct")
    assert row["num_cards"] == 4
    assert "--tensor-parallel-size 4" in row["command"]
    assert one_row("A100-80GB", "Qwen/Qwen2.5-32B-Instruct")["num_cards"] == 1
    assert one_row("L4", "Qwen/Qwen2.5-72B-Instruct")["command"] == "does not fit on 4 cards"


def test_an_embedding_model_serves_prompts_only():
    assert {one.output_tokens for one in card_traffic(load_model(MODELS[0]), TRACES[0]).requests} == {1}
    assert max(one.output_tokens for one in card_traffic(load_model(MODELS[1]), TRACES[0]).requests) > 100


def test_the_table_is_whole_and_its_commands_parse():
    stored = json.loads((ROOT / "results" / "card-settings.json").read_text(encoding="utf-8"))
    keys = [(row["model"], row["trace"], row["card"]) for row in stored["rows"]]
    assert keys == [(model, trace, card) for model in MODELS for trace in TRACES for card in CARDS]
    for row in stored["rows"]:
        if "requests_per_s" in row:
            assert check_command(row["command"], VERSION) == ()
            assert row["low"] < row["requests_per_s"] < row["high"]


def test_the_page_is_made_of_the_results():
    stored = json.loads((ROOT / "results" / "card-settings.json").read_text(encoding="utf-8"))
    spec = importlib.util.spec_from_file_location("make_card_settings", ROOT / "tools" / "make_card_settings.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert (ROOT / "docs" / "card-settings.md").read_text(encoding="utf-8") == tool.page(stored)


def test_a_row_of_the_results_can_be_made_again():
    stored = json.loads((ROOT / "results" / "card-settings.json").read_text(encoding="utf-8"))
    wanted = next(row for row in stored["rows"] if row["card"] == "L40S" and row["model"] == "Qwen/Qwen3-8B")
    again = next(settings_table(cards=("L40S",), models=("Qwen/Qwen3-8B",), traces=(wanted["trace"],)))
    assert again["command"] == wanted["command"]
    assert again["requests_per_s"] == pytest.approx(wanted["requests_per_s"], rel=0.02)
