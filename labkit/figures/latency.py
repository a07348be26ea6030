"""Latency against a knob: time to first token, between tokens, and end to end, each at p50, p95 and p99."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from labkit import format as fmt
from labkit.figures.frame import empty, joined, position
from labkit.figures.palette import LineStyle, get_theme, label
from labkit.figures.run_axis import along, name_runs, name_values, plots_of_runs
from labkit.figures.runs import knob_axis
from labkit.figures.tables import Table, make_table
from labkit.measure.run_record import RunRecord
from labkit.measure.summary import Percentiles, summarize
from labkit.text import plain

METRICS = {"ttft_s": "time to first token", "inter_token_s": "between tokens", "e2e_s": "end to end"}
LEVELS = ("p50", "p95", "p99")


@dataclass(frozen=True)
class LatencyPoint:
    """One run: its place on the knob's axis and a distribution for each of `METRICS`, None where it gave none."""

    run_id: str
    name: str
    value: str
    ttft_s: Percentiles | None
    inter_token_s: Percentiles | None
    e2e_s: Percentiles | None
    origin: str = "measured"


@dataclass(frozen=True)
class LatencyInfo:
    """Points in the order of the knob's values; runs without any finished request are only counted."""

    axis_title: str
    knob: str | None
    points: tuple[LatencyPoint, ...]
    num_without: int = 0


def get_latency_info(records: Sequence[RunRecord], knob: str | None = None) -> LatencyInfo:
    """Latencies of `records` along `knob`, by default the knob that varies most."""
    axis = knob_axis(records, knob)
    points = []
    for record, value in zip(axis.runs, axis.values, strict=True):
        numbers = summarize(record)
        if numbers.ttft_s is not None:
            points.append(LatencyPoint(record.run_id, record.name, value, numbers.ttft_s, numbers.inter_token_s,
                                       numbers.e2e_s, record.origin))  # fmt: skip
    return LatencyInfo(axis.title, axis.knob, tuple(points), len(records) - len(points))


def draw_latency(info: LatencyInfo, theme: str = "light", narrow: bool = False) -> go.Figure:
    """Three plots side by side, p50, p95 and p99 as lines of their own colour, dash and marker; axes from zero.

    Runs without a common knob lie in rows.
    """
    if not info.points:
        return empty(theme, "no latency yet: no run has given a first token")
    figure = plots_of_runs(info, theme, tuple(METRICS.values()), narrow)
    for index, metric in enumerate(METRICS):
        place = position(index, narrow)
        scale, unit = _scale(info, metric)
        for level, style in zip(LEVELS, get_theme(theme).lines, strict=False):
            figure.add_trace(_line(info, metric, level, style, scale), **place)
        name_values(figure, info.knob, unit, place)
    name_runs(figure, info, len(METRICS), narrow)
    # From the figure's upper edge: a share of the plots' height would meet the titles of low ones.
    figure.update_layout(
        legend={"xref": "container", "yref": "container", "y": 1.0, "yanchor": "top", "entrywidth": 36}
    )
    return figure


def _scale(info: LatencyInfo, metric: str) -> tuple[float, str]:
    known = [getattr(point, metric) for point in info.points if getattr(point, metric) is not None]
    return (1e3, "ms") if max((entry.p99 for entry in known), default=0.0) < 1 else (1.0, "s")


def _line(info: LatencyInfo, metric: str, level: str, style: LineStyle, scale: float) -> go.Scatter:
    times = [getattr(point, metric) for point in info.points]
    values = [None if entry is None else getattr(entry, level) for entry in times]
    return go.Scatter(
        name=level,
        legendgroup=level,
        showlegend=metric == "ttft_s",
        mode=joined([point.value for point in info.points], info.knob is not None),
        **along(
            info.knob,
            [label(point.value) for point in info.points],
            [None if value is None else value * scale for value in values],
        ),
        connectgaps=True,
        line={"color": style.color, "dash": style.dash, "width": 2},
        marker={"symbol": style.marker, "size": 9, "color": style.color},
        customdata=[point.run_id for point in info.points],
        hovertext=[
            f"<b>{label(point.name)}</b> ({point.origin})<br>{METRICS[metric]}, {level}: {fmt.duration(value)}"
            for point, value in zip(info.points, values, strict=True)
        ],
        hovertemplate="%{hovertext}<extra></extra>",
    )


def plot_latency(records: Sequence[RunRecord], knob: str | None = None, theme: str = "light") -> go.Figure:
    """Info step and drawing step in one."""
    return draw_latency(get_latency_info(records, knob), theme)


def caption(info: LatencyInfo) -> str:
    """The spread over the runs, with the best run by p95 between tokens."""
    timed = [(point.inter_token_s.p95, point) for point in info.points if point.inter_token_s is not None]
    if not timed:
        return "No run has given two tokens of one request yet, so there is no latency to show."
    lowest_s, best = min(timed, key=lambda entry: entry[0])
    text = f"Lowest p95 between tokens: {fmt.duration(lowest_s)} ({best.origin}) with {plain(best.name, 40)}"
    if best.ttft_s is not None:
        first = f"{fmt.duration(best.ttft_s.p50)} at p50 and {fmt.duration(best.ttft_s.p95)} at p95"
        text += f", where the first token takes {first}"
    highest_s, worst = max(timed, key=lambda entry: entry[0])
    text += (
        "." if worst is best else f". Highest: {fmt.duration(highest_s)} ({worst.origin}) with {plain(worst.name, 40)}."
    )
    return text + _without(info.num_without)


def _without(count: int) -> str:
    return f" {count} {'run' if count == 1 else 'runs'} without a first token not shown." if count else ""


def table(info: LatencyInfo) -> Table:
    """One row a run: p50, p95, p99 of each latency."""
    columns = [info.axis_title if info.knob else "run", *(f"{title} {level}" for title in METRICS.values()
                                                          for level in LEVELS), "method"]  # fmt: skip
    rows = [[point.value, *(_cell(getattr(point, metric), level) for metric in METRICS for level in LEVELS),
             point.origin]
            for point in info.points]  # fmt: skip
    return make_table(columns, rows, "Latency of each run")


def _cell(entry: Percentiles | None, level: str) -> str:
    return fmt.duration(getattr(entry, level)) if entry else fmt.MISSING
