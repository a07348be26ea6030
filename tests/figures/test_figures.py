"""Figures: the info steps by their values, the drawing steps by what is in the traces, every state without a blank."""

from __future__ import annotations

import dataclasses
import json

import pytest

from labkit.errors import UnknownNameError
from labkit.figures import block_map, kv_over_time, l2, latency, memory_breakdown, pareto, requests, throughput
from labkit.figures.palette import LIGHT, PART_COLORS, template
from labkit.figures.runs import knob_axis, varied_knob
from labkit.measure.run_record import Counters, RequestRow, StepRow
from labkit.memory.records import PARTS
from labkit.specs.engine_config import EngineConfig
from tests.figures.samples import (
    GIB,
    HOSTILE,
    sample_gpu,
    sample_measured,
    sample_plan,
    sample_record,
    sample_runs,
    state_records,
)

STATES = state_records()
PER_RUN = (kv_over_time, block_map)
COMPARING = (latency, throughput, pareto, l2, requests)


def step(room, what: str):
    return getattr(room, f"{what}_{room.__name__.rsplit('.', 1)[-1]}" if what != "info" else
                   f"get_{room.__name__.rsplit('.', 1)[-1]}_info")  # fmt: skip


def info_of(room, record):
    if room is memory_breakdown:
        return memory_breakdown.get_memory_breakdown_info(record.plan if record else None, record)
    if room in PER_RUN:
        return step(room, "info")(record)
    return step(room, "info")([record] if record else [])


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("room", [memory_breakdown, *PER_RUN, *COMPARING], ids=lambda room: room.__name__)
def test_every_state_gives_a_picture_or_a_sentence_and_a_table(room, state):
    info = info_of(room, STATES[state])
    figure = step(room, "draw")(info)
    has_marks = any(trace.x is not None or trace.type == "heatmap" for trace in figure.data)
    says_why = any(annotation.text for annotation in figure.layout.annotations)
    assert has_marks or says_why
    assert room.caption(info).endswith((".", "…"))
    assert room.table(info).columns
    assert figure.to_json()


@pytest.mark.parametrize("room", [memory_breakdown, *PER_RUN, *COMPARING], ids=lambda room: room.__name__)
def test_the_same_input_gives_the_same_bytes(room):
    record = STATES["finished"]
    assert step(room, "draw")(info_of(room, record)).to_json() == step(room, "draw")(info_of(room, record)).to_json()


@pytest.mark.parametrize("room", [memory_breakdown, *PER_RUN, *COMPARING], ids=lambda room: room.__name__)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_figure_has_labkit_s_template_and_nothing_of_plotly_s_own(room, theme):
    figure = step(room, "draw")(info_of(room, STATES["finished"]), theme)
    assert figure.layout.template.to_plotly_json() == template(theme)


@pytest.mark.parametrize("room", [memory_breakdown, *PER_RUN, *COMPARING], ids=lambda room: room.__name__)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_hostile_names_reach_no_markup(room, theme):
    figure = step(room, "draw")(info_of(room, STATES["hostile"]), theme)
    text = figure.to_json()
    assert "<img" not in text
    assert "\\u003cimg" not in text
    assert HOSTILE not in room.caption(info_of(room, STATES["hostile"]))


def test_the_memory_bar_has_every_byte_of_the_card():
    record = sample_record()
    info = memory_breakdown.get_memory_breakdown_info(record.plan, record, record)
    assert [bar.row for bar in info.bars] == ["predicted", "measured", "baseline"]
    for bar in info.bars:
        assert sum(size for _, size in bar.parts) == bar.total_bytes == 24 * GIB
    figure = memory_breakdown.draw_memory_breakdown(info)
    assert [trace.marker.color for trace in figure.data] == [PART_COLORS[part] for part in PARTS]
    assert sum(trace.x[0] for trace in figure.data) == pytest.approx(24.0, abs=1e-9)
    assert figure.layout.xaxis.title.text == "memory (GiB)"
    assert figure.layout.xaxis.range[0] == 0


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_json_of_the_memory_bar_is_what_plotly_checked(theme, narrow):
    """The panel sends it without building a figure; plotly refuses a wrong name or value and fills nothing in."""
    for record in (sample_record(), STATES["hostile"]):
        info = memory_breakdown.get_memory_breakdown_info(record.plan, record, record)
        drawn = memory_breakdown.memory_breakdown_json(info, theme, narrow)
        assert memory_breakdown.draw_memory_breakdown(info, theme, narrow).to_plotly_json() == drawn
        assert json.loads(json.dumps(drawn)) == drawn


def test_an_overrun_bar_is_longer_than_the_card_and_says_by_how_much():
    plan = sample_plan(EngineConfig(cpu_memory_gib=0.25), gpu=sample_gpu(1.0, "cpu"))
    over = plan.breakdown.used_bytes - plan.breakdown.total_bytes
    assert over > 0
    info = memory_breakdown.get_memory_breakdown_info(plan)
    assert info.scale_bytes == plan.breakdown.used_bytes
    assert "overrun by" in memory_breakdown.caption(info)
    assert memory_breakdown.draw_memory_breakdown(info).data[-1].name.startswith("overrun by ")
    figure = memory_breakdown.draw_memory_breakdown(info)
    assert min(min(trace.x) for trace in figure.data) >= 0
    assert figure.layout.shapes[0].x0 == pytest.approx(256.0)


def test_formula_and_uncertainty_are_on_the_hover_and_errors_in_the_table():
    record = sample_record()
    info = memory_breakdown.get_memory_breakdown_info(record.plan, record)
    figure = memory_breakdown.draw_memory_breakdown(info)
    activation = figure.data[PARTS.index("activation")]
    assert "2048 tokens × 49,152 logits × 2 bytes" in activation.hovertext[0]
    assert "± 19.2 MiB" in activation.hovertext[0]
    rows = {row[0]: row for row in memory_breakdown.table(info)}
    assert rows["weights"][-1] == "+1.0 % (+2.57 MiB)"
    assert rows["activation peak"][-1].startswith("−2.0 %")
    assert rows["CUDA graphs"][-1] == "equal"
    assert rows["total"][1] == "24.0 GiB"


def test_without_a_run_there_is_no_error_column():
    table = memory_breakdown.table(memory_breakdown.get_memory_breakdown_info(sample_plan()))
    assert table.columns == ("part", "predicted")


def test_predicted_and_measured_differ_in_pattern_not_in_colour():
    record = sample_record()
    figure = memory_breakdown.draw_memory_breakdown(memory_breakdown.get_memory_breakdown_info(record.plan, record))
    for part, trace in zip(PARTS, figure.data, strict=True):
        predicted, measured = trace.marker.pattern.shape
        assert (predicted != measured) == (part not in ("outside", "free")), part


def test_runs_stand_in_the_order_of_the_knob_that_varies():
    runs = tuple(reversed(sample_runs()))
    axis = knob_axis(runs)
    assert (axis.knob, axis.title, axis.values) == ("block_size", "block_size (tokens)", ("8", "16", "64"))
    assert varied_knob(runs[:1]) is None
    assert knob_axis(runs[:1]).values == ("block 64",)
    assert knob_axis([]).runs == ()


def test_an_unknown_knob_names_the_nearest():
    with pytest.raises(UnknownNameError) as caught:
        knob_axis(sample_runs(), "blocksize")
    assert caught.value.works == "block_size"


def request(number: int, arrival: float, first: float, *gaps: float) -> RequestRow:
    times = [first]
    for gap in gaps:
        times.append(times[-1] + gap)
    return RequestRow(number, arrival, first, times[-1], 8, len(times), finish_reason="length",
                      token_times_s=tuple(times))  # fmt: skip


def test_latencies_are_those_of_the_requests():
    rows = (request(0, 0.0, 0.1, 0.02, 0.04), request(1, 1.0, 1.3, 0.06))
    info = latency.get_latency_info([sample_record(requests=rows)])
    point = info.points[0]
    assert point.ttft_s.p50 == pytest.approx(0.2)
    assert point.inter_token_s.p50 == pytest.approx(0.04)
    assert point.e2e_s.p50 == pytest.approx((0.16 + 0.36) / 2)
    figure = latency.draw_latency(info)
    assert len(figure.data) == 9
    assert figure.data[0].x[0] == pytest.approx(200.0)
    assert figure.layout.xaxis.title.text == "ms"
    assert figure.layout.xaxis.rangemode == "tozero"


def test_latency_lines_differ_in_dash_and_marker():
    figure = latency.draw_latency(latency.get_latency_info(sample_runs()))
    assert len({(trace.line.dash, trace.marker.symbol) for trace in figure.data[:3]}) == 3


def test_runs_without_a_token_are_counted_not_drawn():
    info = latency.get_latency_info([*sample_runs(), STATES["failed"]])
    assert (len(info.points), info.num_without) == (3, 1)
    assert "1 run without a first token not shown" in latency.caption(info)


def test_throughput_is_tokens_over_the_run_s_time():
    rows = (request(0, 0.0, 0.5, 0.5), request(1, 0.0, 1.0, 0.5, 0.5))
    info = throughput.get_throughput_info([sample_record(requests=rows, duration_s=2.0)])
    assert (info.points[0].output_tokens_per_s, info.points[0].requests_per_s) == (2.5, 1.0)


def test_the_best_run_is_named_with_its_gain():
    text = throughput.caption(throughput.get_throughput_info(sample_runs()))
    assert "with block 16" in text
    assert "against block 8" in text


def test_pareto_labels_of_near_points_stand_on_different_sides():
    near = [pareto.ParetoPoint(f"run {i}", f"run {i}", 0.2 + 0.01 * i, 40.0 + i, True) for i in range(3)]
    far = pareto.ParetoPoint("far", "far", 1.0, 41.0, True)
    info = pareto.ParetoInfo("inter_token_s", (*near, far))
    (trace,) = [trace for trace in pareto.draw_pareto(info).data if trace.mode and "text" in trace.mode]
    sides = dict(zip(trace.customdata, trace.textposition, strict=True))
    assert len({sides[point.run_id] for point in near}) == 3
    assert sides["far"] == "top center"


def test_pareto_marks_the_runs_that_none_beats():
    fast = sample_record(run_id="fast", name="fast", requests=(request(0, 0, 0.1, 0.01),), duration_s=2.0)
    strong = sample_record(run_id="strong", name="strong", requests=(request(0, 0, 0.1, 0.05, 0.05),), duration_s=1.0)
    beaten = sample_record(run_id="beaten", name="beaten", requests=(request(0, 0, 0.1, 0.06),), duration_s=1.0)
    info = pareto.get_pareto_info([beaten, strong, fast])
    assert [(point.run_id, point.on_front) for point in info.points] == [
        ("fast", True), ("strong", True), ("beaten", False),
    ]  # fmt: skip
    figure = pareto.draw_pareto(info)
    assert figure.data[1].marker.symbol.endswith("-open")
    assert list(figure.data[0].customdata) == ["fast", "strong"]


def test_two_equal_runs_are_both_on_the_front():
    twins = [sample_record(run_id=name) for name in ("a", "b")]
    assert all(point.on_front for point in pareto.get_pareto_info(twins).points)


def test_a_hit_rate_never_stands_without_bandwidth_and_method():
    runs = [sample_record(), dataclasses.replace(sample_record(run_id="m"),
            counters=Counters("measured (Nsight Compute)", "L4", 0.5, 1e9, 250e9, 0.01))]  # fmt: skip
    info = l2.get_l2_info(runs)
    figure = l2.draw_l2(info)
    assert list(figure.data[0].x) == pytest.approx([41.2, 50.0])
    assert list(figure.data[1].x) == pytest.approx([180.5, 250.0])
    assert "dashed: data sheet 300 GB/s" in figure.layout.xaxis2.title.text
    assert list(figure.data[0].marker.pattern.shape) == [".", ""]
    assert "simulated" in figure.layout.yaxis.ticktext[0]
    assert all("GB/s" in row[2] for row in l2.table(info))
    assert "250 GB/s" in l2.caption(info)
    assert "measured (Nsight Compute)" in l2.caption(info)
    assert "Near zero" not in l2.caption(info)


def test_a_whole_step_stands_beside_its_attention():
    attention = Counters("measured (CUPTI range profiler)", "H200", 0.01, 1e9, 4e12, 1e-3, "attention of a step")
    step = Counters("measured (CUPTI range profiler)", "H200", 0.4, 9e9, 3e12, 3e-3, "a step, all kernels")
    info = l2.get_l2_info([dataclasses.replace(sample_record(), counters=attention, step_counters=step)])
    assert [bar.scope for bar in info.bars] == ["attention of a step", "a step, all kernels"]
    names = l2.draw_l2(info).layout.yaxis.ticktext
    assert names[0].endswith("<br>measured, H200")
    assert names[1].endswith("<br>measured, H200, whole step")
    assert l2.sentence(attention) == (
        "L2 hit rate 1.0 % at 4.00 TB/s from DRAM (attention of a step): measured (CUPTI range profiler), H200."
    )


def test_few_hits_are_explained_and_a_simulated_bandwidth_is_called_a_bound():
    counters = Counters("simulated (LRU)", "H100 SXM", 0.0, 3.2e9, 3.17e12, 0.001)
    text = l2.caption(l2.get_l2_info([dataclasses.replace(sample_record(), counters=counters)]))
    assert "0.0 %" in text
    assert "each block of KV is read once in a step" in text
    assert "not a measurement" in text


def make_steps(*used: int) -> tuple[StepRow, ...]:
    return tuple(StepRow(float(at), 0.5, 4, 0, 4, 4, 0, blocks, 2, blocks * 12, num_preemptions=int(blocks == 40))
                 for at, blocks in enumerate(used))  # fmt: skip


def test_kv_over_time_is_blocks_times_bytes():
    record = sample_record(EngineConfig(num_gpu_blocks_override=40), steps=make_steps(10, 40, 20))
    info = kv_over_time.get_kv_over_time_info(record)
    block = record.plan.block_bytes
    assert info.reserved.y == (10 * block, 40 * block, 20 * block)
    assert info.stored.y == pytest.approx([10 * block * 0.75, 40 * block * 0.75, 20 * block * 0.75])
    assert info.preemptions == ((1.0, 40 * block, 1),)
    assert "1.00 s into the run" in kv_over_time.caption(info)
    assert "100 %" in kv_over_time.caption(info)


def test_a_long_run_is_thinned_with_a_notice():
    info = kv_over_time.get_kv_over_time_info(sample_record(num_steps=9000))
    assert max(len(trace.x) for trace in kv_over_time.draw_kv_over_time(info).data) <= 2000
    assert "points shown, extremes kept" in kv_over_time.caption(info)


def test_tail_waste_is_what_reserved_blocks_do_not_store():
    record = sample_record(EngineConfig(num_gpu_blocks_override=50), steps=make_steps(10, 40, 20),
                           block_map=(0,) * 25 + (1,) * 15 + (-2,) * 2 + (-1,) * 8)  # fmt: skip
    info = block_map.get_block_map_info(record)
    assert dict(info.shares) == {"stored tokens": 480, "tail waste": 160, "cached": 32, "free": 128}
    assert (info.num_requests, info.blocks_per_cell, len(info.owners)) == (2, 1, 50)
    assert "160 of those (25 %) hold no token" in block_map.caption(info)


def test_a_large_pool_shows_the_owner_of_most_blocks_of_each_cell():
    owners = (7, 7, -1) * 4096
    info = block_map.get_block_map_info(sample_record(block_map=owners))
    assert info.blocks_per_cell == 3
    assert set(info.owners) == {7}
    assert len(info.owners) == 4096


def test_requests_are_listed_with_how_they_ended():
    refused = RequestRow(9, 0.0, None, None, 9000, 0, finish_reason="refused: longer than the pool")
    info = requests.get_requests_info([sample_record(requests=(request(0, 0, 0.1, 0.1), refused))])
    assert "1 of 2 requests finished" in requests.caption(info)
    assert "1 were refused" in requests.caption(info)
    rows = list(requests.table(info))
    assert rows[1][2] == "–"
    assert rows[1][-1] == "refused: longer than the pool"


def test_a_cumulative_share_ends_at_one():
    info = requests.get_requests_info(sample_runs())
    for run in info.runs:
        for _, curve in run.curves:
            assert list(curve.y) == sorted(curve.y)
            assert curve.y[-1] == 1.0


def test_measured_parts_sum_to_the_card_as_predicted_ones_do():
    plan = sample_plan()
    measured = sample_measured(plan)
    assert sum(measured.parts().values()) == plan.breakdown.total_bytes


def test_the_better_colour_is_never_a_memory_part_s_error_colour():
    assert LIGHT.worse not in PART_COLORS.values()


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("room", COMPARING, ids=lambda room: room.__name__)
def test_no_two_lines_of_a_plot_look_alike_without_colour(room, theme):
    figure = step(room, "draw")(step(room, "info")(sample_runs()), theme)
    looks = [(trace.xaxis, trace.line.dash, trace.marker.symbol) for trace in figure.data if trace.type == "scatter"]
    assert len(set(looks)) == len(looks)


def test_a_map_and_a_long_list_stay_small():
    many = sample_record(num_requests=3000, block_map=(3,) * 10**6)
    assert len(requests.table(requests.get_requests_info([many]))) == requests.MAX_ROWS
    assert "the first 200 of 3,000" in requests.table(requests.get_requests_info([many])).caption
    assert len(block_map.get_block_map_info(many).owners) <= block_map.MAX_CELLS
    for trace in requests.draw_requests(requests.get_requests_info([many])).data:
        assert len(trace.x) <= 2000


def test_a_run_with_the_same_rate_and_more_latency_is_beaten():
    fast = sample_record(run_id="fast", requests=(request(0, 0, 0.1, 0.01),), duration_s=1.0)
    slow = sample_record(run_id="slow", requests=(request(0, 0, 0.1, 0.02),), duration_s=1.0)
    assert [point.on_front for point in pareto.get_pareto_info([slow, fast]).points] == [True, False]


def test_the_measured_parts_stand_beside_what_nvml_says():
    from labkit.measure.nvml_sampler import NvmlSample, summarize_samples

    record = sample_record()
    used = record.measured.used_bytes
    nvml = summarize_samples((NvmlSample(0.0, memory_used_bytes=int(used / 1.005)),))
    info = memory_breakdown.get_memory_breakdown_info(record.plan, dataclasses.replace(record, nvml=nvml))
    row = memory_breakdown.table(info).rows[-1]
    assert row[0] == "in use, by NVML"
    assert row[1] == "–"
    assert "parts: +0.5 %" in row[2]
    without = memory_breakdown.get_memory_breakdown_info(record.plan, record)
    assert memory_breakdown.table(without).rows[-1][0] == "total"
