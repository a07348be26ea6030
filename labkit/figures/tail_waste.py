"""What block size costs and gives: places reserved but empty at the fullest step, beside the output rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import plotly.graph_objects as go

from labkit import format as fmt
from labkit.figures.frame import empty, name_lowest_only, position, row_of_plots
from labkit.figures.palette import get_theme, label
from labkit.figures.tables import Table, make_table
from labkit.measure.run_record import RunRecord
from labkit.measure.summary import summarize

TITLES = ("empty places of reserved blocks", "output rate")


@dataclass(frozen=True)
class TailWastePoint:
    """One block size: what the fullest step reserved (tokens) and left empty, and the output rate; means of its runs.

    Attributes:
        rate_spread: largest minus smallest output rate of equal runs over their mean; None for a single run.
        expected_waste_share: (block_size - 1) / 2 empty places in the last block of each running request, over what
            was reserved: the waste if lengths fell evenly on the places of a block.
    """

    run_id: str
    name: str
    block_size: int
    reserved_tokens: int
    waste_share: float
    expected_waste_share: float
    output_tokens_per_s: float
    num_runs: int = 1
    rate_spread: float | None = None
    origin: str = "measured"


@dataclass(frozen=True)
class TailWasteInfo:
    """Points by rising block size; runs that reserved nothing are only counted."""

    points: tuple[TailWastePoint, ...]
    num_without: int = 0

    @property
    def origin(self) -> str:
        """How the runs were got: "measured", "simulated", or both."""
        return " and ".join(sorted({point.origin for point in self.points}))


def get_tail_waste_info(records: Sequence[RunRecord]) -> TailWasteInfo:
    """The waste of each run at its fullest step."""
    found = [point for point in map(_point, records) if point is not None]
    by_size: dict[int, list[TailWastePoint]] = {}
    for point in found:
        by_size.setdefault(point.block_size, []).append(point)
    points = tuple(_mean(by_size[size]) for size in sorted(by_size))
    return TailWasteInfo(points, len(records) - len(found))


def _mean(points: list[TailWastePoint]) -> TailWastePoint:
    rates = [point.output_tokens_per_s for point in points]
    rate = fmean(rates)
    return replace(
        points[-1],
        reserved_tokens=round(fmean(point.reserved_tokens for point in points)),
        waste_share=fmean(point.waste_share for point in points),
        expected_waste_share=fmean(point.expected_waste_share for point in points),
        output_tokens_per_s=rate,
        num_runs=len(points),
        rate_spread=(max(rates) - min(rates)) / rate if len(rates) > 1 else None,
    )


def _point(record: RunRecord) -> TailWastePoint | None:
    numbers = summarize(record)
    peak = max(record.steps, key=lambda step: step.num_blocks_used, default=None)
    if peak is None or numbers.tail_waste_share is None or not numbers.output_tokens_per_s:
        return None
    size = record.plan.config.block_size
    reserved = peak.num_blocks_used * size
    expected = peak.num_running * (size - 1) / 2 / reserved
    return TailWastePoint(record.run_id, record.name, size, reserved, numbers.tail_waste_share, expected,
                          numbers.output_tokens_per_s, origin=record.origin)  # fmt: skip


def draw_tail_waste(info: TailWasteInfo, theme: str = "light", narrow: bool = False) -> go.Figure:
    """Waste, measured beside expected, and output rate; both axes from zero."""
    if not info.points:
        return empty(theme, "no run yet: the waste is measured at the fullest step of a run")
    titles = tuple(f"{title}, {info.origin}" for title in TITLES)
    figure = row_of_plots(theme, titles, narrow=narrow, spacing=0.12)
    first, second, third = get_theme(theme).lines[:3]
    sizes = [fmt.count(point.block_size) for point in info.points]
    series = (
        (info.origin, [100 * point.waste_share for point in info.points], first, 0, "%"),
        ("expected: half a block each", [100 * point.expected_waste_share for point in info.points], second, 0, "%"),
        (f"output, {info.origin}", [point.output_tokens_per_s for point in info.points], third, 1, "tok/s"),
    )
    for name, values, style, index, unit in series:
        figure.add_trace(
            go.Scatter(
                name=name,
                showlegend=index == 0,
                mode="lines+markers",
                x=sizes,
                y=values,
                line={"color": style.color, "dash": style.dash, "width": 2},
                marker={"symbol": style.marker, "size": 9, "color": style.color},
                customdata=[point.run_id for point in info.points],
                hovertext=[f"{label(point.name)}, {name}: {fmt.number(value)} {unit}"
                           for point, value in zip(info.points, values, strict=True)],
                hovertemplate="%{hovertext}<extra></extra>",
            ),
            **position(index, narrow),
        )  # fmt: skip
    figure.update_yaxes(title_text="% of reserved", rangemode="tozero", **position(0, narrow))
    figure.update_yaxes(title_text="tok/s", rangemode="tozero", **position(1, narrow))
    figure.update_xaxes(title_text="block_size (tokens)", type="category")
    name_lowest_only(figure, len(TITLES), narrow)
    figure.update_layout(legend={"y": 1.05 if narrow else 1.14})
    return figure


def plot_tail_waste(records: Sequence[RunRecord], theme: str = "light") -> go.Figure:
    """Info step and drawing step in one."""
    return draw_tail_waste(get_tail_waste_info(records), theme)


def caption(info: TailWasteInfo) -> str:
    """The conclusion: what the largest block wastes against the smallest, and whether the rate moved with it."""
    if not info.points:
        return "No run has reserved a block yet."
    small, large, origin = info.points[0], info.points[-1], info.origin.capitalize()
    if small.block_size == large.block_size:
        empty_share = fmt.share(small.waste_share, 1)
        return f"{origin}: blocks of {fmt.count(small.block_size)} tokens leave {empty_share} of the reserved empty."
    expected = fmt.share(large.expected_waste_share, 1)
    return (
        f"{origin}: from {fmt.count(small.block_size)} to {fmt.count(large.block_size)} tokens a block, the empty "
        f"share of reserved blocks goes from {fmt.share(small.waste_share, 1)} to {fmt.share(large.waste_share, 1)} "
        f"(half a block a request would be {expected}). {_rate_words(info, small, large)}"
    )


def _rate_words(info: TailWasteInfo, small: TailWastePoint, large: TailWastePoint) -> str:
    change = fmt.change(small.output_tokens_per_s, large.output_tokens_per_s, "tok/s")
    spreads = [point.rate_spread for point in info.points if point.rate_spread is not None]
    if not spreads:
        return f"The output rate changes by {change}; each block size ran once, so how much of it is noise is unknown."
    noise, growth = max(spreads), abs(large.output_tokens_per_s / small.output_tokens_per_s - 1)
    if growth <= noise:
        return f"The output rate moves by {change}, no more than equal runs differ ({fmt.share(noise, 1)})."
    return f"The output rate changes by {change}; equal runs differ by {fmt.share(noise, 1)}."


def table(info: TailWasteInfo) -> Table:
    """One row a run."""
    rows = [
        [fmt.count(point.block_size), fmt.count(point.reserved_tokens), fmt.share(point.waste_share, 1),
         fmt.share(point.expected_waste_share, 1), fmt.rate(point.output_tokens_per_s), fmt.count(point.num_runs)]
        for point in info.points
    ]  # fmt: skip
    columns = ["block_size (tokens)", "reserved at the fullest step (tokens)", "empty", "expected", "output", "runs"]
    return make_table(columns, rows, f"Waste of each block size, {info.origin}")
