"""Memory over the time of one run: KV that requests hold, torch's allocator, and the card as NVML sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from labkit import format as fmt
from labkit.figures.frame import empty, frame
from labkit.figures.palette import BASELINE, get_theme
from labkit.figures.tables import Table, make_table
from labkit.figures.thinning import Thinned, thin
from labkit.measure.run_record import MemorySample, RunRecord

# Drawn from the whole to its parts; a run on a CPU has the first and the last only.
TITLES = {
    "device_used_bytes": "card in use (NVML)",
    "reserved_bytes": "reserved by torch",
    "allocated_bytes": "in tensors",
    "process_bytes": "worker process",
    "kv_used_bytes": "KV that requests hold",
}
TABLE_ONLY = {
    "active_bytes": "in tensors or waiting for a stream",
    "unused_split_bytes": "free inside torch's segments",
    "other_processes_bytes": "other processes on the card",
}

# From this share of the total on, the line of the planned use would lie on the total's.
NEAR_TOTAL = 0.995


@dataclass(frozen=True)
class MemoryTimelineInfo:
    """Series over seconds, in bytes, by field of `MemorySample`; those that nobody measured are not there.

    Attributes:
        total_bytes: of the card, or the budget of a run on a CPU.
        origin: "measured", or "simulated" for a run on a virtual card.
        planned_bytes: in use by the plan, all its parts.
    """

    name: str
    series: tuple[tuple[str, Thinned], ...]
    total_bytes: int
    origin: str = "measured"
    planned_bytes: int = 0

    def get(self, field: str) -> Thinned | None:
        """The series of a field, None where it was not measured."""
        return dict(self.series).get(field)


def get_memory_timeline_info(record: RunRecord | None) -> MemoryTimelineInfo:
    """The series of `record`; a run without samples, such as a simulated one, has the account of its pool."""
    if record is None:
        return MemoryTimelineInfo("", (), 0)
    block_bytes = record.plan.block_bytes
    samples = record.memory_timeline or tuple(
        MemorySample(step.start_s + step.duration_s, step.num_blocks_used * block_bytes) for step in record.steps
    )
    parts = record.plan.breakdown
    return MemoryTimelineInfo(
        record.name, memory_series(samples), parts.total_bytes, record.origin, parts.used_bytes
    )  # fmt: skip


def memory_series(samples: Sequence[MemorySample]) -> tuple[tuple[str, Thinned], ...]:
    """What `samples` have, by field. On a card the process is what NVML says of it, which is not drawn."""
    found = []
    for field in (*TITLES, *TABLE_ONLY):
        known = [sample for sample in samples if getattr(sample, field) is not None]
        if known:
            times, values = [sample.time_s for sample in known], [getattr(sample, field) for sample in known]
            found.append((field, thin(times, values)))
    return tuple(found)


def drawn(series: Sequence[tuple[str, Thinned]]) -> list[tuple[str, Thinned]]:
    """The series to draw: of the process only where nothing is known of a card."""
    on_card = any(field == "reserved_bytes" for field, _ in series)
    return [(field, points) for field, points in series
            if field in TITLES and not (on_card and field == "process_bytes")]  # fmt: skip


def traces(
    series: Sequence[tuple[str, Thinned]], theme: str, divisor: float, unit: str
) -> list[dict[str, Any]]:  # fmt: skip
    """The lines of `drawn(series)` as plotly's JSON, in units of `divisor` bytes."""
    return [
        {
            "type": "scatter",
            "name": TITLES[field],
            "mode": "lines",
            "x": list(points.x),
            "y": [value / divisor for value in points.y],
            "line": {"color": style.color, "dash": style.dash, "width": 2},
            "hovertemplate": "%{x:.2f} s: %{y:,.4g} " + unit + "<extra>" + TITLES[field] + "</extra>",
        }
        for (field, points), style in zip(drawn(series), get_theme(theme).lines, strict=False)
    ]


def draw_memory_timeline(info: MemoryTimelineInfo, theme: str = "light", narrow: bool = False) -> go.Figure:
    """One line for each series, the total, and what the plan has in use."""
    if not info.series:
        return empty(theme, "no memory was recorded: the run has not begun, or ended before its first step")
    colors = get_theme(theme)
    divisor, unit = fmt.memory_scale(info.total_bytes)
    figure = frame(theme, 380)
    figure.add_traces(traces(info.series, theme, divisor, unit))
    figure.add_hline(y=info.total_bytes / divisor, line={"color": BASELINE, "dash": "dash", "width": 1.5},
                     annotation={"text": f"total {fmt.memory(info.total_bytes)}", "yanchor": "bottom",
                                 "font": {"color": colors.muted}})  # fmt: skip
    if 0 < info.planned_bytes < NEAR_TOTAL * info.total_bytes:
        figure.add_hline(y=info.planned_bytes / divisor, line={"color": BASELINE, "dash": "dot", "width": 1.5},
                         annotation={"text": f"planned use {fmt.memory(info.planned_bytes)}", "yanchor": "top",
                                     "font": {"color": colors.muted}})  # fmt: skip
    highest = max(info.total_bytes, *(max(points.y) for _, points in info.series))
    figure.update_yaxes(title_text=f"memory ({unit})", range=[0, 1.1 * highest / divisor])
    figure.update_xaxes(title_text="time (s)", rangemode="tozero")
    figure.update_layout(
        margin={"t": 100 if narrow else 64},
        showlegend=True,
        legend={"entrywidth": 1.0 if narrow else 0.5, "entrywidthmode": "fraction", "font": {"size": 11}},
    )
    return figure


def plot_memory_timeline(record: RunRecord | None, theme: str = "light") -> go.Figure:
    """Info step and drawing step in one."""
    return draw_memory_timeline(get_memory_timeline_info(record), theme)


def caption(info: MemoryTimelineInfo) -> str:
    """The highest moment of what was measured, and how much of torch's memory lies idle."""
    if not info.series:
        return "No memory was recorded over the run."
    text = "; ".join(
        f"{TITLES[field]} at most {fmt.memory_with_share(max(points.y), info.total_bytes)}"
        for field, points in drawn(info.series)
    )
    if info.planned_bytes:
        text += f"; the plan has {fmt.memory_with_share(info.planned_bytes, info.total_bytes)} in use"
    text = f"{info.origin.capitalize()}: {text}."
    reserved, allocated = info.get("reserved_bytes"), info.get("allocated_bytes")
    if reserved and allocated:
        idle = reserved.y[-1] - allocated.y[-1]
        text += f" At the end {fmt.memory_with_share(idle, reserved.y[-1])} of what torch reserved held nothing."
    return text


def table(info: MemoryTimelineInfo) -> Table:
    """First, highest and last value of each series."""
    titles = TITLES | TABLE_ONLY
    rows = [
        [titles[field], fmt.memory(points.y[0]), fmt.memory(max(points.y)), fmt.memory(points.y[-1])]
        for field, points in info.series
    ]
    return make_table(["memory", "at the start", "most", "at the end"], rows, f"Memory over the run, {info.origin}")
