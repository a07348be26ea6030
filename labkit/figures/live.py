"""A run while it runs: output tokens a second, running and waiting requests, KV use, memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from labkit import format as fmt
from labkit.figures.frame import empty
from labkit.figures.memory_timeline import TITLES, drawn, traces
from labkit.figures.palette import LineStyle, get_theme, template
from labkit.figures.thinning import MAX_POINTS, Thinned, thin


class LiveSeries:
    """A growing series that holds at most `limit` points, whatever its length; its extremes survive."""

    def __init__(self, limit: int = MAX_POINTS) -> None:
        self._limit, self._x, self._y, self._count = limit, [], [], 0  # type: ignore[var-annotated]

    def add(self, x: float, y: float) -> None:
        """Append one point; at the limit the older points are thinned to half."""
        self._x.append(x)
        self._y.append(y)
        self._count += 1
        if len(self._x) > self._limit:
            thinned = thin(self._x, self._y, self._limit // 2)
            self._x, self._y = list(thinned.x), list(thinned.y)

    def now(self) -> Thinned:
        """The series as it is drawn."""
        return Thinned(tuple(self._x), tuple(self._y), self._count)


@dataclass(frozen=True)
class LiveInfo:
    """What a running run shows; shares in 0 to 1, times in seconds from the start of the run.

    `memory` are bytes by field of `MemorySample`, of what is measured here.
    """

    tokens_per_s: Thinned
    running: Thinned
    waiting: Thinned
    kv_share: Thinned
    memory: tuple[tuple[str, Thinned], ...] = ()

    def last(self, name: str) -> float | None:
        """The newest value of a series, None before the first step."""
        series: Thinned = getattr(self, name)
        return series.y[-1] if series.y else None


class LiveRun:
    """Collects step events; `info()` is what to draw. Cost and size do not grow with the length of the run."""

    def __init__(self, limit: int = MAX_POINTS) -> None:
        self._limit = limit
        self._series = {name: LiveSeries(limit) for name in ("tokens_per_s", "running", "waiting", "kv_share")}
        self._memory: dict[str, LiveSeries] = {}

    def add(self, event: Mapping[str, Any]) -> None:
        """One "step" event of a run: time, output rate since the last one, requests and blocks at that moment."""
        time_s, num_blocks = float(event["time_s"]), event["num_gpu_blocks"]
        self._series["tokens_per_s"].add(time_s, float(event["output_tokens_per_s"]))
        self._series["running"].add(time_s, event["num_running"])
        self._series["waiting"].add(time_s, event["num_waiting"])
        self._series["kv_share"].add(time_s, event["num_blocks_used"] / num_blocks if num_blocks else 0.0)
        for field, value in event.get("memory", {}).items():
            if field in TITLES and value is not None:
                self._memory.setdefault(field, LiveSeries(self._limit)).add(time_s, value)

    def info(self) -> LiveInfo:
        """The picture so far."""
        memory = tuple((field, self._memory[field].now()) for field in TITLES if field in self._memory)
        return LiveInfo(**{name: series.now() for name, series in self._series.items()}, memory=memory)


def draw_live(info: LiveInfo, theme: str = "light") -> go.Figure:
    """Three plots on one time axis, and memory as a fourth where it is measured."""
    return go.Figure(live_json(info, theme))


def live_json(info: LiveInfo, theme: str = "light") -> dict[str, Any]:
    """What `draw_live` draws, as plotly's JSON: it is redrawn eight times a second beside the run that it shows, and
    go.Figure would take most of a core to check it."""
    if not info.running.x:
        text = "press Run: tokens a second, requests and KV use appear here while the run goes on"
        return empty(theme, text, 360).to_plotly_json()
    first, second, third = get_theme(theme).lines[:3]
    data = [
        _line("output tok/s", info.tokens_per_s, first, 1),
        _line("running", info.running, first, 2),
        _line("waiting", info.waiting, second, 2),
        _line("KV use", info.kv_share, third, 3, scale=100, unit=" %"),
    ]
    titles, legends = ["output tok/s", "requests", "KV use (%)"], {}
    if info.memory:
        divisor, unit = fmt.memory_scale(max(max(points.y) for _, points in drawn(info.memory)))
        place = {"legend": "legend2", "xaxis": "x4", "yaxis": "y4"}
        data += [{**trace, **place} for trace in traces(info.memory, theme, divisor, unit)]
        titles.append(f"memory ({unit})")
        # Over the fourth plot.
        legends["legend2"] = {"orientation": "h", "y": 0.2, "yanchor": "bottom", "x": 1, "xanchor": "right"}
    layout = {
        "template": template(theme), "height": 120 * len(titles), "margin": {"t": 16}, **_axes(titles), **legends,
        "legend": {"y": 1 - 1.08 / len(titles), "x": 1, "xanchor": "right"},
    }  # fmt: skip
    layout["yaxis3"]["range"] = [0, 104]
    return {"data": data, "layout": layout}


def _line(title: str, points: Thinned, style: LineStyle, row: int, scale: float = 1, unit: str = "") -> dict[str, Any]:
    place = "" if row == 1 else str(row)
    return {
        "type": "scatter", "name": title, "showlegend": row == 2, "mode": "lines",
        "x": list(points.x), "y": [scale * value for value in points.y],
        "line": {"color": style.color, "dash": style.dash, "width": 2},
        "hovertemplate": "%{x:.2f} s: %{y:,.3~r}" + unit + "<extra>" + title + "</extra>",
        "xaxis": f"x{place}", "yaxis": f"y{place}",
    }  # fmt: skip


def _axes(titles: Sequence[str]) -> dict[str, Any]:
    """Plots one under the other on one time axis, from zero."""
    rows = len(titles)
    gap = 0.24 / rows
    height = (1 - gap * (rows - 1)) / rows
    layout: dict[str, Any] = {}
    for row, title in enumerate(titles, start=1):
        place, top = "" if row == 1 else str(row), 1 - (row - 1) * (height + gap)
        shared = {"matches": f"x{rows}", "showticklabels": False} if row < rows else {"title": {"text": "time (s)"}}
        layout[f"xaxis{place}"] = {"anchor": f"y{place}", "domain": [0.0, 1.0], "rangemode": "tozero", **shared}
        layout[f"yaxis{place}"] = {
            "anchor": f"x{place}", "domain": [max(0.0, top - height), top], "rangemode": "tozero",
            "title": {"text": title},
        }  # fmt: skip
    return layout


def caption(info: LiveInfo) -> str:
    """The newest values in words."""
    if not info.running.x:
        return "No step yet."
    notice = f" {info.running.notice.capitalize()}." if info.running.notice else ""
    return (
        f"Measured: {fmt.rate(info.last('tokens_per_s'))} of output, {fmt.count(info.last('running'))} running, "
        f"{fmt.count(info.last('waiting'))} waiting, KV {fmt.share(info.last('kv_share'), 1)}{_memory(info)}.{notice}"
    )


def _memory(info: LiveInfo) -> str:
    """The largest memory that is measured: the card's, else the worker's."""
    if not info.memory:
        return ""
    field, points = info.memory[0]
    return f", {TITLES[field]} {fmt.memory(points.y[-1])}"
