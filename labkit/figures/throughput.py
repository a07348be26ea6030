"""Throughput against a knob: output tokens and finished requests a second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from labkit import format as fmt
from labkit.figures.frame import empty, joined, position
from labkit.figures.palette import get_theme, label
from labkit.figures.run_axis import along, name_runs, name_values, plots_of_runs
from labkit.figures.runs import knob_axis
from labkit.figures.tables import Table, make_table
from labkit.measure.run_record import RunRecord
from labkit.measure.summary import summarize
from labkit.text import plain

METRICS = {"output_tokens_per_s": ("output tokens", "tok/s"), "requests_per_s": ("finished requests", "req/s")}


@dataclass(frozen=True)
class ThroughputPoint:
    """One run's place on the knob's axis, its rates, and how its time was got ("measured" or "simulated")."""

    run_id: str
    name: str
    value: str
    output_tokens_per_s: float
    requests_per_s: float
    num_preemptions: int
    origin: str


@dataclass(frozen=True)
class ThroughputInfo:
    """Points in the order of the knob's values; runs that gave no token are only counted."""

    axis_title: str
    knob: str | None
    points: tuple[ThroughputPoint, ...]
    num_without: int = 0


def get_throughput_info(records: Sequence[RunRecord], knob: str | None = None) -> ThroughputInfo:
    """Rates of `records` along `knob`, by default the knob that varies most."""
    axis = knob_axis(records, knob)
    points = []
    for record, value in zip(axis.runs, axis.values, strict=True):
        numbers = summarize(record)
        if numbers.output_tokens_per_s and numbers.requests_per_s is not None:
            points.append(ThroughputPoint(record.run_id, record.name, value, numbers.output_tokens_per_s,
                                          numbers.requests_per_s, numbers.num_preemptions, record.origin))  # fmt: skip
    return ThroughputInfo(axis.title, axis.knob, tuple(points), len(records) - len(points))


def draw_throughput(info: ThroughputInfo, theme: str = "light", narrow: bool = False) -> go.Figure:
    """Two plots side by side, axes from zero, as lengths are compared; runs without a common knob lie in rows."""
    if not info.points:
        return empty(theme, "no throughput yet: no run has given a token")
    titles = tuple(title for title, _ in METRICS.values())
    figure = plots_of_runs(info, theme, titles, narrow)
    labels = [label(point.value) for point in info.points]
    for index, (metric, style) in enumerate(zip(METRICS, get_theme(theme).lines, strict=False)):
        place = position(index, narrow)
        title, unit = METRICS[metric]
        values = [getattr(point, metric) for point in info.points]
        figure.add_trace(
            go.Scatter(
                name=title,
                mode=joined([point.value for point in info.points], info.knob is not None),
                **along(info.knob, labels, values),
                line={"color": style.color, "dash": style.dash, "width": 2},
                marker={"symbol": style.marker, "size": 10, "color": style.color},
                customdata=[point.run_id for point in info.points],
                hovertext=[_hover(point, metric, unit) for point in info.points],
                hovertemplate="%{hovertext}<extra></extra>",
            ),
            **place,
        )
        name_values(figure, info.knob, unit, place)
    name_runs(figure, info, len(METRICS), narrow)
    figure.update_layout(showlegend=False, margin={"t": 36})
    return figure


def _hover(point: ThroughputPoint, metric: str, unit: str) -> str:
    return (
        f"<b>{label(point.name)}</b> ({point.origin})<br>{fmt.rate(getattr(point, metric), unit)}"
        f"<br>{fmt.count(point.num_preemptions)} preemptions"
    )


def plot_throughput(records: Sequence[RunRecord], knob: str | None = None, theme: str = "light") -> go.Figure:
    """Info step and drawing step in one."""
    return draw_throughput(get_throughput_info(records, knob), theme)


def caption(info: ThroughputInfo) -> str:
    """Which run gives the most output tokens, and by how much against the least."""
    if not info.points:
        return "No run has given a token yet, so there is no throughput to show."
    best = max(info.points, key=lambda point: point.output_tokens_per_s)
    worst = min(info.points, key=lambda point: point.output_tokens_per_s)
    text = f"Most output: {fmt.rate(best.output_tokens_per_s)} ({best.origin}) with {plain(best.name, 40)}"
    if worst is not best:
        gain = fmt.change(worst.output_tokens_per_s, best.output_tokens_per_s, "tok/s")
        text += f", {gain} against {plain(worst.name, 40)}"
    missing = f" {info.num_without} without a token not shown." if info.num_without else ""
    return f"{text}.{missing}"


def table(info: ThroughputInfo) -> Table:
    """One row a run."""
    columns = [info.axis_title if info.knob else "run", "output tokens", "finished requests", "preemptions", "method"]
    rows = [
        [point.value, fmt.rate(point.output_tokens_per_s), fmt.rate(point.requests_per_s, "req/s"),
         fmt.count(point.num_preemptions), point.origin]
        for point in info.points
    ]  # fmt: skip
    return make_table(columns, rows, "Throughput of each run")
