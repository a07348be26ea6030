"""Two runs side by side: only what differs, the change with sign and word."""

from __future__ import annotations

import dataclasses

import pytest

from labkit.figures.compare import caption, get_compare_info, table
from labkit.specs.engine_config import EngineConfig
from tests.figures.samples import sample_record, sample_runs, state_records


def test_two_knobs_that_differ_are_two_rows_before_the_metrics():
    other = sample_record(EngineConfig(block_size=32, kv_cache_dtype="fp8"), name="fp8, block 32", slowness=2.0)
    info = get_compare_info(sample_record(), other)
    assert info.knobs == (("block_size", 16, 32), ("kv_cache_dtype", "auto", "fp8"))
    rows = list(table(info))
    assert [row[0] for row in rows[:2]] == ["block_size", "kv_cache_dtype"]
    assert len(rows) == 2 + len(info.metrics)
    assert "block_size 16 → 32, kv_cache_dtype auto → fp8" in caption(info)


def test_a_change_has_sign_percent_and_word_in_the_direction_that_counts():
    slow, fast, _ = sample_runs()
    changes = {metric.title: metric for metric in get_compare_info(slow, fast).metrics}
    rate, first = changes["output tokens a second"], changes["first token, p95"]
    assert rate.percent == pytest.approx(30, abs=0.5)
    assert rate.words == "▲ +30 % better"
    assert first.words == "▲ −23 % better"
    assert {metric.title: metric for metric in get_compare_info(fast, slow).metrics}["first token, p95"].words == (
        "▼ +30 % worse"
    )


def test_equal_settings_say_noise():
    record = sample_record()
    again = dataclasses.replace(record, run_id="again", duration_s=record.duration_s * 1.02)
    text = caption(get_compare_info(record, again))
    assert "same settings" in text
    assert "±2.0 %" in text
    assert [metric.words for metric in get_compare_info(record, record).metrics] == ["same"] * 5


def test_a_run_that_gave_nothing_has_dashes():
    info = get_compare_info(sample_record(), state_records()["failed"])
    assert all(metric.words == "–" for metric in info.metrics)
    assert [row[2] for row in table(info)][-5:] == ["–"] * 5


def test_energy_is_compared_where_a_card_gave_it():
    record = sample_record()
    tokens = sum(row.output_tokens for row in record.requests)
    title = "energy for each output token"
    without = get_compare_info(record, record)
    assert title not in [metric.title for metric in without.metrics]
    first, second = (dataclasses.replace(record, energy_j=joules * tokens) for joules in (0.2, 0.1))
    found = next(metric for metric in get_compare_info(first, second).metrics if metric.title == title)
    assert (found.before_text, found.after_text, found.words) == ("0.200 J", "0.100 J", "▲ −50 % better")
