"""Figures with equal names, many runs, near points and little room: nothing stands on something else."""

from __future__ import annotations

import dataclasses

import pytest

from labkit.figures import (
    block_map,
    compare,
    kv_over_time,
    l2,
    latency,
    memory_timeline,
    pareto,
    requests,
    tail_waste,
    throughput,
)
from labkit.figures.frame import wrapped
from labkit.figures.runs import comparable, distinctly_named
from labkit.specs.engine_config import EngineConfig
from tests.figures.samples import HOSTILE, sample_record, state_records

LONG = "fp8 KV, block 32, 128 requests at once, chunked prefill off, prefix caching off"


def runs(number: int, **options):
    return [
        sample_record(EngineConfig(), run_id=f"r{index}", slowness=1 + index / 100, **options)
        for index in range(number)
    ]


def along_block_size(sizes):
    return [sample_record(EngineConfig(block_size=size), run_id=f"r{at}") for at, size in enumerate(sizes)]


def test_bars_of_runs_with_one_name_stand_side_by_side():
    figure = l2.draw_l2(l2.get_l2_info(runs(3, name="the same")))
    assert list(figure.data[0].y) == [0, 1, 2]
    assert len(set(figure.layout.yaxis.ticktext)) == 1


@pytest.mark.parametrize("room", [throughput, latency])
def test_on_a_narrow_page_only_the_lowest_plot_names_a_common_axis(room):
    name = room.__name__.rpartition(".")[2]
    info = getattr(room, f"get_{name}_info")(along_block_size((8, 16)))
    draw = getattr(room, f"draw_{name}")
    narrow = draw(info, narrow=True).layout
    axes = [narrow[f"xaxis{number or ''}"] for number in ("", 2, 3) if f"xaxis{number or ''}" in narrow]
    assert [axis.showticklabels for axis in axes] == [False] * (len(axes) - 1) + [None]
    assert draw(info).layout.xaxis.showticklabels is None


@pytest.mark.parametrize("room", [throughput, latency, l2])
@pytest.mark.parametrize("number", [1, 2, 8])
@pytest.mark.parametrize("narrow", [False, True])
def test_runs_without_a_common_knob_lie_in_rows_with_their_names_at_the_left(room, number, narrow):
    name = room.__name__.rpartition(".")[2]
    records = distinctly_named(runs(number, name=LONG))
    layout = getattr(room, f"draw_{name}")(getattr(room, f"get_{name}_info")(records), narrow=narrow).layout
    axes = [layout[axis] for axis in sorted(map(str, layout)) if axis.startswith("yaxis")]
    assert [axis.showticklabels for axis in axes] == [True] + [narrow] * (len(axes) - 1)
    for axis in axes:
        assert len(axis.ticktext) == number
        assert axis.range[0] > number - 1, "the first run is on top and none is cut"
    assert len(set(axes[0].ticktext)) == number, "runs of one name are told apart"
    assert max(len(line) for text in axes[0].ticktext for line in text.split("<br>")) <= 26
    plots = len(axes) if narrow else 1
    assert layout.height >= plots * 48 * number


def test_a_knob_of_which_each_value_ran_once_has_a_line_and_repeats_have_none():
    once = throughput.draw_throughput(throughput.get_throughput_info(along_block_size((8, 16, 32))))
    assert once.data[0].mode == "lines+markers"
    twice = throughput.draw_throughput(throughput.get_throughput_info(along_block_size((8, 16, 16))))
    assert twice.data[0].mode == "markers"


def test_a_latency_that_one_run_lacks_leaves_the_others_in_their_rows():
    single = dataclasses.replace(runs(1)[0].requests[0], output_tokens=1, token_times_s=(0.1,))
    records = distinctly_named([*runs(1), dataclasses.replace(runs(1)[0], run_id="one", requests=(single,)), *runs(1)])
    figure = latency.draw_latency(latency.get_latency_info(records))
    between = next(trace for trace in figure.data if trace.name == "p50" and trace.xaxis == "x2")
    assert list(between.y) == [0, 1, 2]
    assert between.x[1] is None
    assert between.x[0] == between.x[2] > 0


def test_names_that_are_shared_get_numbers_and_others_stay():
    records = distinctly_named([*runs(2, name="a"), *runs(1, name="b"), *runs(1, name="a")])
    assert [record.name for record in records] == ["#1 a", "#2 a", "b", "#3 a"]
    assert distinctly_named(()) == ()


def test_runs_that_were_cut_short_are_compared_only_where_none_finished():
    states = [record for record in state_records().values() if record]
    assert {record.status for record in comparable(states)} == {"finished"}
    cut = [record for record in states if record.status != "finished"]
    assert comparable(cut) == tuple(cut)


def test_long_and_hostile_names_are_wrapped_and_shown_letter_by_letter():
    assert wrapped("block 16") == "block 16"
    assert wrapped(LONG, 14, 3) == "fp8 KV, block<br>32, 128<br>requests at…"
    assert "<img" not in wrapped(HOSTILE)
    assert wrapped("") == ""


def test_every_figure_says_whether_it_is_measured_or_simulated():
    simulated = dataclasses.replace(sample_record(), origin="simulated")
    for room in (throughput, latency, pareto):
        name = room.__name__.rpartition(".")[2]
        info = getattr(room, f"get_{name}_info")([simulated, sample_record(run_id="m", slowness=2.0)])
        assert "(simulated)" in room.caption(info)
        method = [str(entry) for entry in room.table(info).columns].index("method")
        assert {row[method] for row in room.table(info)} == {"simulated", "measured"}
    for room in (kv_over_time, block_map, memory_timeline):
        name = room.__name__.rpartition(".")[2]
        for origin, record in (("simulated", simulated), ("measured", sample_record())):
            info = getattr(room, f"get_{name}_info")(record)
            assert room.caption(info).startswith(f"{origin.capitalize()}: ")
            assert room.table(info).caption.endswith(f", {origin}")
    names = [trace.name for trace in requests.draw_requests(requests.get_requests_info([simulated])).data]
    assert set(names) == {"block 16 (simulated)"}
    assert requests.table(requests.get_requests_info([simulated])).caption == "Requests of the run, simulated"
    compared = compare.get_compare_info(sample_record(), dataclasses.replace(simulated, name="other"))
    assert compare.table(compared).columns[1:3] == ("block 16 (measured)", "other (simulated)")
    wasted = tail_waste.get_tail_waste_info([simulated])
    assert tail_waste.caption(wasted).startswith("Simulated: ")
    assert "simulated" in tail_waste.draw_tail_waste(wasted).data[0].name


def test_fifty_runs_stand_in_close_rows_of_one_line():
    runs = [sample_record(EngineConfig(block_size=16 * (1 + at % 2), max_num_seqs=8 + at), run_id=f"r{at}", name=LONG)
            for at in range(50)]  # fmt: skip
    figure = throughput.draw_throughput(throughput.get_throughput_info(runs))
    assert figure.layout.height < 1400
    assert len(figure.data[0].x) == 50
    bars = l2.draw_l2(l2.get_l2_info(runs))
    assert bars.layout.height == figure.layout.height
    for drawn in (figure, bars):
        assert not any("<br>" in name for name in drawn.layout.yaxis.ticktext)


def test_the_planned_pool_and_use_stand_beside_what_was_measured():
    record = sample_record()
    info = kv_over_time.get_kv_over_time_info(record)
    assert kv_over_time.pool_words(info) == "pool: planned 21.0 GiB, measured equal"
    other = dataclasses.replace(record.measured, kv_cache_bytes=20 * 2**30)
    info = kv_over_time.get_kv_over_time_info(dataclasses.replace(record, measured=other))
    assert kv_over_time.pool_words(info) == "pool: planned 21.0 GiB, measured 20.0 GiB"
    lines = [shape.y0 for shape in kv_over_time.draw_kv_over_time(info).layout.shapes]
    assert lines == pytest.approx([info.pool_bytes / 2**30, 20.0])
    assert kv_over_time.pool_words(
        kv_over_time.get_kv_over_time_info(dataclasses.replace(record, measured=None))
    ) == "pool: planned 21.0 GiB"  # fmt: skip
    memory = memory_timeline.get_memory_timeline_info(record)
    assert memory.planned_bytes == record.plan.breakdown.used_bytes
    assert "the plan has 22.5 GiB (94 %) in use" in memory_timeline.caption(memory)
    shown = [shape.y0 for shape in memory_timeline.draw_memory_timeline(memory).layout.shapes]
    assert shown == pytest.approx([24.0, record.plan.breakdown.used_bytes / 2**30])


def test_large_pools_have_an_axis_of_thousands_or_millions():
    info = block_map.get_block_map_info(sample_record())
    figure = block_map.draw_block_map(info)
    total = sum(size for _, size in info.shares)
    assert figure.layout.xaxis2.title.text == "thousand tokens"
    assert sum(trace.x[0] for trace in figure.data[1:]) == pytest.approx(total / 1000)
    many = dataclasses.replace(info, shares=tuple((what, 100 * size) for what, size in info.shares))
    assert block_map.draw_block_map(many).layout.xaxis2.title.text == "million tokens"


def test_of_many_near_points_only_the_ends_are_named_and_the_slowest_has_room():
    figure = pareto.draw_pareto(pareto.get_pareto_info(runs(6)))
    texts = [text for trace in figure.data if "text" in (trace.mode or "") for text in trace.text]
    assert len(texts) == 6
    assert sum(bool(text) for text in texts) == 2
    slowest = max(value for trace in figure.data for value in trace.x)
    assert figure.layout.xaxis.range[1] == pytest.approx(1.2 * slowest)
    narrow = pareto.draw_pareto(pareto.get_pareto_info(runs(6)), narrow=True)
    assert not any("text" in trace.mode for trace in narrow.data)
