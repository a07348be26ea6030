"""What a run's steps are bound by: steps on the card's roofline, and where their time goes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from labkit import format as fmt
from labkit.advice.step_bound import BoundName, StepBound, StepPoint, step_bound
from labkit.figures.frame import empty, position, row_of_plots
from labkit.figures.palette import OUTLINE, get_theme, label, text_on
from labkit.figures.tables import Table, make_table
from labkit.measure.run_record import RunRecord
from labkit.text import plain

# Okabe and Ito's set again, in an order whose neighbours stay apart; each part also has its name on or under it.
BOUND_COLORS = {
    "bandwidth": "#E69F00", "compute": "#0072B2", "host": "#CC79A7", "graphs": "#009E73", "links": "#56B4E9",
}  # fmt: skip
# Room between the two for the title of the axis above.
NARROW_HEIGHT = 600
NOTHING = (
    "Nothing to place on a roofline: it takes a run, or traffic to simulate, on a card whose figures are known, and a "
    "CPU is none. A session with gpu='A10', say, simulates them there."
)


@dataclass(frozen=True)
class StepRooflineInfo:
    """The bound of one run; `origin` says whether its steps were measured or simulated. None: nothing to draw."""

    bound: StepBound | None
    run_name: str = ""
    card: str = ""
    origin: str = ""


def get_step_roofline_info(records: Sequence[RunRecord | None]) -> StepRooflineInfo:
    """The first of `records` whose steps can be placed: a run on a CPU cannot, the same settings simulated can."""
    for record in records:
        bound = step_bound(record.plan, record) if record is not None else None
        if record is not None and bound is not None:
            return StepRooflineInfo(bound, record.name, record.gpu.name, record.origin)
    return StepRooflineInfo(None)


def draw_step_roofline(info: StepRooflineInfo, theme: str = "light", narrow: bool = False) -> go.Figure:
    """Left the roofline with decode steps and steps with prompts on it, right the shares of the steps' time."""
    if info.bound is None:
        return empty(theme, "no steps on a roofline")
    titles = tuple(f"{title}, {info.origin}" for title in ("steps on the roofline", "where the steps' time goes"))
    figure = row_of_plots(theme, titles, narrow=narrow, spacing=0.12)
    _roof(figure, info.bound, theme, narrow)
    _points(figure, info.bound, theme, narrow)
    _shares(figure, info.bound, narrow)
    figure.update_layout(legend={"y": 1.08 if narrow else 1.16}, margin={"t": 84}, barmode="stack")
    if narrow:
        figure.update_layout(height=NARROW_HEIGHT)
    return figure


def _span(bound: StepBound) -> tuple[float, float]:
    """FLOP a byte at the ends of the axis: whole decades around points and ridge."""
    values = [*(point.intensity for point in bound.points if point.intensity > 0), bound.ridge]
    return 10 ** math.floor(math.log10(min(values) / 2)), 10 ** math.ceil(math.log10(2 * max(values)))


def _roof(figure: go.Figure, bound: StepBound, theme: str, narrow: bool) -> None:
    low, high = _span(bound)
    x = [low, bound.ridge, high]
    figure.add_trace(
        go.Scatter(
            name="data sheet", x=x, y=[min(value * bound.bytes_per_s, bound.flops_per_s) / 1e12 for value in x],
            mode="lines", line={"color": OUTLINE, "dash": "dash", "width": 2},
            hovertext=[f"memory: {fmt.bandwidth(bound.bytes_per_s)}", f"ridge: {fmt.number(bound.ridge)} FLOP a byte",
                       f"compute: {fmt.number(bound.flops_per_s / 1e12)} TFLOP/s"],
            hovertemplate="%{hovertext}<extra></extra>",
        ),
        **position(0, narrow),
    )  # fmt: skip
    for update in (figure.update_xaxes, figure.update_yaxes):
        update(type="log", dtick=1, **position(0, narrow))
    figure.update_xaxes(title_text="FLOP for each byte read", **position(0, narrow))
    figure.update_yaxes(title_text="TFLOP/s", **position(0, narrow))


def _points(figure: go.Figure, bound: StepBound, theme: str, narrow: bool) -> None:
    for point, style in zip(bound.points, get_theme(theme).lines, strict=False):
        figure.add_trace(
            go.Scatter(
                name=point.label, x=[point.intensity], y=[point.flops_per_s / 1e12], mode="markers",
                marker={"symbol": style.marker, "size": 13, "color": style.color},
                hovertext=[_words(point)], hovertemplate="%{hovertext}<extra></extra>",
            ),
            **position(0, narrow),
        )  # fmt: skip


def _words(point: StepPoint) -> str:
    read = fmt.bandwidth(point.num_bytes / point.seconds)
    reached = f"{fmt.number(point.flops_per_s / 1e12)} TFLOP/s"
    return f"{fmt.count(point.num_steps)} {point.label}: {read}, {reached}, {fmt.duration(point.seconds)} in all"


def _shares(figure: go.Figure, bound: StepBound, narrow: bool) -> None:
    for name, value in _ordered(bound):
        color = BOUND_COLORS[name]
        figure.add_trace(
            go.Bar(
                name=name, x=[name], y=[100 * value], showlegend=False,
                marker={"color": color, "line": {"color": OUTLINE, "width": 1}},
                text=[fmt.share(value, 1)], textposition="auto", insidetextfont={
                    "color": text_on(color)}, cliponaxis=False,
                hovertext=[f"{name}: {fmt.share(value, 1)}"], hovertemplate="%{hovertext}<extra></extra>",
            ),
            **position(1, narrow),
        )  # fmt: skip
    figure.update_yaxes(title_text="% of the steps' time", range=[0, 108], **position(1, narrow))


def _ordered(bound: StepBound) -> list[tuple[BoundName, float]]:
    return sorted(((name, value) for name, value in bound.shares.items() if value >= 0.001), key=lambda one: -one[1])


def plot_step_roofline(record: RunRecord, theme: str = "light") -> go.Figure:
    """Info step and drawing step in one."""
    return draw_step_roofline(get_step_roofline_info([record]), theme)


def caption(info: StepRooflineInfo) -> str:
    """What binds the steps, and how near decode comes to the memory's peak."""
    if info.bound is None:
        return NOTHING
    found = info.bound
    name, card = plain(info.run_name, 60), plain(info.card, 40)
    text = f"{name}{'' if card in name else f' on {card}'}, {info.origin}: {found.sentence}."
    for point in found.points:
        left = point.intensity < found.ridge
        roof, reached = (
            ("the memory's peak", point.num_bytes / point.seconds / found.bytes_per_s) if left else
            ("the peak of its matrix units", point.flops_per_s / found.flops_per_s)
        )  # fmt: skip
        text += f" {point.label.capitalize()} reach {fmt.share(reached, 1)} of {roof}."
    return text


def table(info: StepRooflineInfo) -> Table:
    """The points, then the shares."""
    if info.bound is None:
        return Table((), ())
    rows = [
        [label(point.label), fmt.count(point.num_steps), f"{fmt.number(point.intensity)} FLOP a byte",
         f"{fmt.number(point.flops_per_s / 1e12)} TFLOP/s, {fmt.bandwidth(point.num_bytes / point.seconds)}",
         fmt.duration(point.seconds)]
        for point in info.bound.points
    ]  # fmt: skip
    rows += [[f"time of {name}", "", "", "", fmt.share(value, 1)] for name, value in _ordered(info.bound)]
    return make_table(
        ["what", "steps", "intensity", "reached", "time"], rows, f"Steps of a run, {info.origin}, on {info.card}"
    )
