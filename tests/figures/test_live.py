"""The live chart: what a run's events become, and that an hour of them is as light as a minute."""

from __future__ import annotations

import itertools
import json

import pytest

from labkit.figures.live import LiveRun, caption, draw_live, live_json


def event(time_s: float, rate: float = 100.0, running: int = 4, waiting: int = 2, used: int = 30) -> dict:
    return {"type": "step", "time_s": time_s, "output_tokens_per_s": rate, "num_running": running,
            "num_waiting": waiting, "num_blocks_used": used, "num_gpu_blocks": 120}  # fmt: skip


def test_events_become_the_four_series():
    run = LiveRun()
    run.add(event(0.5, rate=80.0))
    run.add(event(1.0, rate=120.0, used=60))
    info = run.info()
    assert info.tokens_per_s.x == (0.5, 1.0)
    assert info.tokens_per_s.y == (80.0, 120.0)
    assert info.kv_share.y == (0.25, 0.5)
    assert caption(info) == "Measured: 120 tok/s of output, 4 running, 2 waiting, KV 50 %."
    assert list(draw_live(info).data[-1].y) == [25.0, 50.0]


def test_memory_is_a_fourth_plot_where_it_is_measured():
    memory = {"time_s": 0.5, "kv_used_bytes": 2**30, "reserved_bytes": 3 * 2**30, "device_used_bytes": None}
    run = LiveRun()
    run.add({**event(0.5), "memory": memory})
    info = run.info()
    assert [field for field, _ in info.memory] == ["reserved_bytes", "kv_used_bytes"]
    figure = draw_live(info)
    assert [trace.name for trace in figure.data[-2:]] == ["reserved by torch", "KV that requests hold"]
    assert [list(trace.y) for trace in figure.data[-2:]] == [[3.0], [1.0]]
    assert figure.layout.yaxis4.title.text == "memory (GiB)"
    assert caption(info).endswith("KV 25 %, reserved by torch 3.00 GiB.")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_json_is_what_plotly_checked(theme):
    """The panel sends it without building a figure; plotly refuses a wrong name or value and fills nothing in."""
    run = LiveRun()
    for memory in ({}, {"memory": {"kv_used_bytes": 2**30, "reserved_bytes": 3 * 2**30}}):
        info = run.info()
        assert draw_live(info, theme).to_plotly_json() == live_json(info, theme)
        run.add({**event(0.5), **memory})
    layout = live_json(run.info(), theme)["layout"]
    domains = [layout[f"yaxis{row}"]["domain"] for row in ("", 2, 3, 4)]
    assert domains[0][1] == 1.0
    assert domains[3][0] == 0.0
    assert all(upper[0] - lower[1] == pytest.approx(0.06) for upper, lower in itertools.pairwise(domains))
    assert [layout[f"xaxis{row}"].get("matches") for row in ("", 2, 3, 4)] == ["x4"] * 3 + [None]


def test_before_the_first_event_there_is_a_sentence():
    info = LiveRun().info()
    assert caption(info) == "No step yet."
    assert "press Run" in draw_live(info).layout.annotations[0].text
    assert info.last("running") is None


def test_a_pool_without_blocks_divides_by_nothing():
    run = LiveRun()
    run.add({**event(1.0), "num_gpu_blocks": 0})
    assert run.info().kv_share.y == (0.0,)


def test_an_hour_is_as_light_as_a_minute_and_keeps_its_extremes():
    run, sizes = LiveRun(limit=400), []
    for index in range(8 * 3600):
        rate = 9999.0 if index == 12_345 else 1.0 if index == 20_000 else 100.0 + index % 7
        run.add(event(index / 8, rate=rate))
        if index in (8 * 60, 8 * 600, 8 * 3600 - 1):
            sizes.append(len(json.dumps(draw_live(run.info()).to_plotly_json()["data"])))
    series = run.info().tokens_per_s
    assert (max(series.y), min(series.y), series.num_points) == (9999.0, 1.0, 8 * 3600)
    assert max(sizes) < 2.2 * min(sizes)
    assert max(sizes) < 60_000
    assert "points shown, extremes kept" in caption(run.info())
