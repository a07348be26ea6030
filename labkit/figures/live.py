"""A run while it runs: output tokens a second, running and waiting requests, KV use, memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from labkit import format as fmt
from labkit.figures.frame import empty, panels
from labkit.figures.memory_timeline import TITLES, drawn, traces
from labkit.figures.palette import get_theme
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
    if not info.running.x:
        return empty(theme, "press Run: tokens a second, requests and KV use appear here while the run goes on", 360)
    rows = 4 if info.memory else 3
    figure = panels(theme, (), rows=rows, cols=1, height=120 * rows, shared_xaxes=True, vertical_spacing=0.24 / rows)
    first, second, third = get_theme(theme).lines[:3]
    series = (("output tok/s", "tokens_per_s", first, 1, 1), ("running", "running", first, 2, 1),
              ("waiting", "waiting", second, 2, 1), ("KV use", "kv_share", third, 3, 100))  # fmt: skip
    for title, name, style, row, scale in series:
        points: Thinned = getattr(info, name)
        figure.add_trace(
            go.Scatter(
                name=title,
                showlegend=row == 2,
                mode="lines",
                x=points.x,
                y=[scale * value for value in points.y],
                line={"color": style.color, "dash": style.dash, "width": 2},
                hovertemplate="%{x:.2f} s: %{y:,.3~r}<extra>" + title + "</extra>",
            ),
            row=row,
            col=1,
        )
    for row, title in enumerate(("output tok/s", "requests", "KV use (%)"), start=1):
        figure.update_yaxes(title_text=title, rangemode="tozero", row=row, col=1)
    figure.update_yaxes(range=[0, 104], row=3, col=1)
    if info.memory:
        _add_memory(figure, info, theme)
    figure.update_xaxes(rangemode="tozero")
    figure.update_xaxes(title_text="time (s)", row=rows, col=1)
    figure.update_layout(margin={"t": 16}, legend={"y": 1 - 1.08 / rows, "x": 1, "xanchor": "right"})
    return figure


def _add_memory(figure: go.Figure, info: LiveInfo, theme: str) -> None:
    """The fourth plot; its legend stands over it."""
    divisor, unit = fmt.memory_scale(max(max(points.y) for _, points in drawn(info.memory)))
    for trace in traces(info.memory, theme, divisor, unit):
        figure.add_trace(trace.update(legend="legend2"), row=4, col=1)
    figure.update_yaxes(title_text=f"memory ({unit})", rangemode="tozero", row=4, col=1)
    figure.update_layout(legend2={"orientation": "h", "y": 0.2, "yanchor": "bottom", "x": 1, "xanchor": "right"})


def caption(info: LiveInfo) -> str:
    """The newest values in words."""
    if not info.running.x:
        return "No step yet."
    notice = f" {info.running.notice.capitalize()}." if info.running.notice else ""
    return (
        f"{fmt.rate(info.last('tokens_per_s'))} of output, {fmt.count(info.last('running'))} running, "
        f"{fmt.count(info.last('waiting'))} waiting, KV {fmt.share(info.last('kv_share'), 1)}{_memory(info)}.{notice}"
    )


def _memory(info: LiveInfo) -> str:
    """The largest memory that is measured: the card's, else the worker's."""
    if not info.memory:
        return ""
    field, points = info.memory[0]
    return f", {TITLES[field]} {fmt.memory(points.y[-1])}"
