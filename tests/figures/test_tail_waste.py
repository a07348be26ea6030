"""The waste of a block size, worked out by hand."""

from __future__ import annotations

import dataclasses

import pytest

from labkit.figures.tail_waste import caption, draw_tail_waste, get_tail_waste_info, table
from labkit.measure.run_record import StepRow
from labkit.specs.engine_config import EngineConfig
from tests.figures.samples import sample_record, sample_runs, state_records


def run_with(block_size: int, blocks: int, stored: int, running: int):
    step = StepRow(0.0, 0.1, running, 0, running, running, 0, blocks, 0, stored)
    return sample_record(EngineConfig(block_size=block_size), run_id=f"b{block_size}", steps=(step,))


def test_waste_is_what_the_fullest_step_reserves_and_does_not_store():
    info = get_tail_waste_info([run_with(64, 10, 480, 5), run_with(8, 62, 488, 5)])
    small, large = info.points
    assert (small.block_size, large.block_size) == (8, 64)
    assert (large.reserved_tokens, large.waste_share) == (640, pytest.approx(160 / 640))
    assert large.expected_waste_share == pytest.approx(5 * 31.5 / 640)
    assert small.waste_share == pytest.approx(8 / 496)
    assert "goes from 1.6 % to 25 %" in caption(info)
    assert "half a block a request would be 25 %" in caption(info)
    assert [row[2] for row in table(info)] == ["1.6 %", "25 %"]
    assert list(draw_tail_waste(info).data[0].y) == pytest.approx([100 * 8 / 496, 25.0])


def test_equal_runs_are_one_point_and_their_spread_is_the_noise():
    once, again = sample_record(run_id="a"), sample_record(run_id="b")
    again = dataclasses.replace(again, duration_s=once.duration_s * 1.25)
    larger = sample_record(EngineConfig(block_size=64), run_id="c")
    info = get_tail_waste_info([once, again, larger])
    small = info.points[0]
    assert (len(info.points), small.num_runs, info.points[1].num_runs) == (2, 2, 1)
    assert small.rate_spread == pytest.approx(2 / 9)
    assert "no more than equal runs differ (22 %)" in caption(info)
    assert "how much of it is noise is unknown" in caption(get_tail_waste_info([once, larger]))


def test_runs_that_reserved_nothing_are_counted():
    info = get_tail_waste_info([*sample_runs(), state_records()["failed"]])
    assert (len(info.points), info.num_without) == (3, 1)


@pytest.mark.parametrize("records", [[], [state_records()["failed"]], [sample_record()]])
def test_none_and_one_run_have_a_sentence(records):
    info = get_tail_waste_info(records)
    assert caption(info).endswith(".")
    assert draw_tail_waste(info).to_json()
