"""Throughput against latency: each run a point, the runs that no other beats in both joined by a line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from labkit import format as fmt
from labkit.figures.frame import empty, frame
from labkit.figures.palette import BASELINE, get_theme, label
from labkit.figures.tables import Table, make_table
from labkit.measure.run_record import RunRecord
from labkit.measure.summary import summarize
from labkit.text import plain

LATENCIES = {
    "inter_token_s": "p95 between tokens",
    "ttft_s": "p95 time to first token",
    "e2e_s": "p95 end to end",
}
# Points nearer than this share of the longest latency and of the highest rate have labels that may overlap.
NEAR = 0.2
# So many near points have room for their names.
MOST_NEAR = 3


@dataclass(frozen=True)
class ParetoPoint:
    """One run: `latency_s` and rate, and whether no other run is better in one and not worse in the other."""

    run_id: str
    name: str
    latency_s: float
    output_tokens_per_s: float
    on_front: bool
    origin: str = "measured"


@dataclass(frozen=True)
class ParetoInfo:
    """Points by rising latency; `baseline_id` is drawn apart; runs without both numbers are only counted."""

    latency: str
    points: tuple[ParetoPoint, ...]
    baseline_id: str | None = None
    num_without: int = 0


def get_pareto_info(
    records: Sequence[RunRecord], latency: str = "inter_token_s", baseline: RunRecord | None = None
) -> ParetoInfo:
    """The runs by p95 of `latency` (one of `LATENCIES`) and output rate."""
    found = []
    for record in records:
        numbers = summarize(record)
        times = getattr(numbers, latency)
        if times is not None and numbers.output_tokens_per_s:
            found.append((record.run_id, record.name, times.p95, numbers.output_tokens_per_s, record.origin))
    points = tuple(
        ParetoPoint(*row[:4], not _beaten(row, found), row[4]) for row in sorted(found, key=lambda row: row[2])
    )
    return ParetoInfo(latency, points, baseline.run_id if baseline else None, len(records) - len(points))


def _beaten(row: tuple, others: list[tuple]) -> bool:
    return any(
        other[2] <= row[2] and other[3] >= row[3] and (other[2] < row[2] or other[3] > row[3]) for other in others
    )


def draw_pareto(info: ParetoInfo, theme: str = "light", narrow: bool = False) -> go.Figure:
    """Latency to the right, throughput up: better is left and up; beaten runs stay as outlines.

    A narrow page has no room for names: pointing at a run and the table give them.
    """
    if not info.points:
        return empty(theme, "no point yet: no run has both a throughput and a latency")
    colors, figure = get_theme(theme), frame(theme, 360)
    front = [point for point in info.points if point.on_front]
    beaten = [point for point in info.points if not point.on_front]
    first, second = colors.lines[:2]
    named = "" if narrow else "+text"
    figure.add_trace(
        _points(info, front, "on the front", mode=f"lines+markers{named}",
                line={"color": first.color, "dash": first.dash, "width": 2},
                marker={"symbol": first.marker, "size": 11, "color": first.color})
    )  # fmt: skip
    if beaten:
        marker = {"symbol": f"{second.marker}-open", "size": 10, "color": second.color, "line": {"width": 2}}
        figure.add_trace(_points(info, beaten, "beaten in both", mode=f"markers{named}", marker=marker))
    known = [point for point in info.points if point.run_id == info.baseline_id]
    if known:
        marker = {"symbol": "circle-open", "size": 20, "color": BASELINE, "line": {"width": 2}}
        figure.add_trace(_points(info, known, "baseline", mode="markers", marker=marker))
    # Room on the right for the name of the slowest.
    right = 1.2e3 * max(point.latency_s for point in info.points)
    figure.update_xaxes(title_text=f"{LATENCIES[info.latency]} (ms) · better is left", range=[0, right])
    figure.update_yaxes(title_text="output tok/s · better is up", rangemode="tozero")
    return figure


def _label_places(points: Sequence[ParetoPoint]) -> dict[str, str]:
    """A side for each point's label: of near points the highest has it above, the lowest below, one more beside it;
    the rest are told by pointing at them and by the table."""
    widest = max((point.latency_s for point in points), default=0.0) or 1.0
    highest = max((point.output_tokens_per_s for point in points), default=0.0) or 1.0

    def side(point: ParetoPoint) -> str:
        near = [
            other
            for other in points
            if abs(point.latency_s - other.latency_s) < NEAR * widest
            and abs(point.output_tokens_per_s - other.output_tokens_per_s) < NEAR * highest
        ]
        ordered = sorted(near, key=lambda other: (other.output_tokens_per_s, other.run_id))
        if ordered[-1] is point:
            return "top center"
        if ordered[0] is point:
            return "bottom center"
        if len(near) > MOST_NEAR:
            return ""
        return "middle right" if all(other.latency_s <= point.latency_s for other in near) else "middle left"

    return {point.run_id: side(point) for point in points}


def _points(info: ParetoInfo, points: list[ParetoPoint], name: str, **style: Any) -> go.Scatter:
    places = _label_places(info.points)
    return go.Scatter(
        name=name,
        x=[1e3 * point.latency_s for point in points],
        y=[point.output_tokens_per_s for point in points],
        text=[label(point.name, 24) if places[point.run_id] else "" for point in points],
        textposition=[places[point.run_id] or "top center" for point in points],
        cliponaxis=False,
        customdata=[point.run_id for point in points],
        hovertext=[
            f"<b>{label(point.name)}</b> ({point.origin})<br>{fmt.rate(point.output_tokens_per_s)}"
            f"<br>{LATENCIES[info.latency]}: {fmt.duration(point.latency_s)}"
            for point in points
        ],
        hovertemplate="%{hovertext}<extra></extra>",
        **style,
    )


def plot_pareto(
    records: Sequence[RunRecord],
    latency: str = "inter_token_s",
    baseline: RunRecord | None = None,
    theme: str = "light",
) -> go.Figure:
    """Info step and drawing step in one."""
    return draw_pareto(get_pareto_info(records, latency, baseline), theme)


def caption(info: ParetoInfo) -> str:
    """The two ends of the front."""
    front = [point for point in info.points if point.on_front]
    if not front:
        return "No run has both a throughput and a latency yet."
    fast, strong = front[0], front[-1]
    fast_name, strong_name = plain(fast.name, 40), plain(strong.name, 40)
    text = f"{len(front)} of {len(info.points)} {'run is' if len(info.points) == 1 else 'runs are'} on the front. "
    if fast is strong:
        return (
            f"{text}{fast_name} ({fast.origin}) is best in both: {fmt.rate(fast.output_tokens_per_s)} at "
            f"{fmt.duration(fast.latency_s)} {LATENCIES[info.latency]}."
        )
    more = fmt.change(fast.output_tokens_per_s, strong.output_tokens_per_s, "tok/s")
    return (
        f"{text}{fast_name} ({fast.origin}) has the lowest {LATENCIES[info.latency]} "
        f"({fmt.duration(fast.latency_s)}), {strong_name} ({strong.origin}) the most output ({more})."
    )


def table(info: ParetoInfo) -> Table:
    """One row a run, by rising latency."""
    rows = [
        [
            point.name,
            fmt.duration(point.latency_s),
            fmt.rate(point.output_tokens_per_s),
            "yes" if point.on_front else "no",
            point.origin,
        ]
        for point in info.points
    ]
    return make_table(
        ["run", LATENCIES[info.latency], "output tokens", "on the front", "method"], rows, "Throughput against latency"
    )
