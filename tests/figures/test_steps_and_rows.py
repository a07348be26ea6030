"""What a step of a knob buys, what its help says, and the rows of the run table."""

from __future__ import annotations

import dataclasses

import pytest

from labkit.errors import DoesNotFitError
from labkit.figures.next_steps import get_next_steps_info, help_lines, neighbours, shown
from labkit.figures.run_table import get_run_table_info, sort_keys, table
from labkit.specs.engine_config import EngineConfig
from tests.figures.samples import sample_gpu, sample_plan, sample_record, sample_runs, state_records

KNOBS = {knob.name: knob for knob in EngineConfig.knobs()}
CPU = sample_gpu(1.0, "cpu")


def plan_of(config: EngineConfig):
    return sample_plan(config, gpu=CPU)


@pytest.mark.parametrize(
    ("knob", "value", "expected"),
    [
        ("block_size", 16, {"down": 8, "up": 32}),
        ("block_size", 24, {"down": 16, "up": 32}),
        ("block_size", 1, {"up": 2}),
        ("block_size", 8192, {"down": 4096}),
        ("max_model_len", None, {}),
        ("enforce_eager", False, {"up": True}),
        ("enforce_eager", True, {"down": False}),
        ("kv_cache_dtype", "auto", {"up": "float16"}),
        ("gpu_memory_utilization", 0.92, {"down": 0.91, "up": 0.93}),
        ("gpu_memory_utilization", 1.0, {"down": 0.99}),
        ("cpu_memory_gib", 2.0, {"down": 1.0, "up": 4.0}),
        ("swap_space", 0.0, {"up": 1.0}),
    ],
)
def test_a_step_stays_inside_the_range(knob, value, expected):
    assert neighbours(KNOBS[knob], value) == expected


def test_a_step_buys_the_difference_of_two_plans():
    config = EngineConfig(cpu_memory_gib=1.0)
    plan = plan_of(config)
    down, up = get_next_steps_info(KNOBS["cpu_memory_gib"], plan, config, plan_of)
    bigger = plan_of(EngineConfig(cpu_memory_gib=2.0))
    assert up.value == 2.0
    assert up.kv_tokens == bigger.kv_cache_tokens - plan.kv_cache_tokens > 0
    assert up.kv_bytes == bigger.breakdown.kv_cache_bytes - plan.breakdown.kv_cache_bytes
    assert up.words.startswith("▲ 2: +1,0")
    assert f"+{up.kv_tokens:,} tokens" in up.words
    assert down.words == "▼ 0.5: does not fit"
    assert down.kv_bytes < 0


def test_a_step_that_cannot_be_planned_says_why():
    def refuse(config):
        raise DoesNotFitError("weights alone need more")

    plan = plan_of(EngineConfig())
    (up,) = get_next_steps_info(KNOBS["enforce_eager"], plan, EngineConfig(), refuse)
    assert up.words == "▲ on: weights alone need more"


def test_a_step_that_changes_nothing_says_so():
    config = EngineConfig()
    (down,) = get_next_steps_info(KNOBS["enable_prefix_caching"], plan_of(config), config, plan_of)
    assert down.words == "▼ off: same KV"


@pytest.mark.parametrize("knob", KNOBS.values(), ids=lambda knob: knob.name)
def test_every_knob_explains_itself(knob):
    lines = help_lines(knob, sample_plan())
    assert lines[0] == knob.help
    assert "default" in lines[1]
    assert (knob.flag or "no such flag") in lines[1]


def test_the_help_carries_the_plan_s_own_numbers():
    assert "Now: 4096 tokens × 49,152 logits × 2 bytes." in help_lines(
        KNOBS["max_num_batched_tokens"], sample_plan(EngineConfig(max_num_batched_tokens=4096))
    )


@pytest.mark.parametrize(
    ("value", "text"), [(None, "auto"), (True, "on"), (False, "off"), (8192, "8,192"), (0.92, "0.92"), ("fp8", "fp8")]
)
def test_values_as_they_are_shown(value, text):
    assert shown(value) == text


def test_rows_say_what_differs_and_how_far_each_is_from_the_baseline():
    runs = sample_runs()
    info = get_run_table_info(runs, baseline_id="run-16")
    rows = [list(row) for row in table(info).rows]
    assert info.baseline_index == 1
    assert [row[-1] for row in rows] == ["block_size 8", "block_size 16", "block_size 64"]
    assert rows[1][2] == "133"
    assert table(info).caption == "Runs; ▲ better, ▼ worse than the baseline"
    assert table(get_run_table_info(runs)).caption == "Runs"
    assert "▼ −" in rows[0][2]
    base, other = info.rows[1].summary.output_tokens_per_s, info.rows[0].summary.output_tokens_per_s
    assert f"{100 * (base - other) / base:.0f} %" in rows[0][2]
    before, after = info.rows[1].summary.inter_token_s.p95, info.rows[0].summary.inter_token_s.p95
    assert f"(▼ +30 %, +{1e3 * (after - before):.1f} ms)" in rows[0][4]


def test_pins_follow_the_baseline_and_deltas_can_be_off():
    runs = sample_runs()
    info = get_run_table_info(runs, "run-16", ("run-64", "gone", "run-16", "run-8"), deltas=False)
    assert info.pinned == (1, 2, 0)
    assert all("▲" not in cell and "▼" not in cell for row in table(info).rows for cell in row)
    assert get_run_table_info(runs).pinned == ()


def test_rows_of_runs_that_gave_nothing_have_dashes_and_sort_last():
    info = get_run_table_info([sample_record(), state_records()["failed"]])
    assert [row[2] for row in table(info).rows] == ["133", "–"]
    assert sort_keys(info)[1][2] > sort_keys(info)[0][2]


def test_no_run_no_rows():
    assert table(get_run_table_info([])).rows == ()
    assert get_run_table_info([], "gone").baseline_index is None


def test_a_removed_baseline_is_no_baseline():
    info = get_run_table_info([dataclasses.replace(sample_record(), run_id="x")], "gone")
    assert (info.baseline_index, info.rows[0].baseline) == (None, None)


def test_the_help_says_how_sizes_may_be_typed():
    assert any("8k is 8,000 and 8K is 8,192" in line for line in help_lines(KNOBS["max_model_len"], None))
    assert not any("8k" in line for line in help_lines(KNOBS["max_num_seqs"], None))
