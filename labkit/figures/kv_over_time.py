"""KV cache over the time of one run: what is reserved, what holds tokens, and when requests were sent back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from labkit import format as fmt
from labkit.figures.frame import empty, panels
from labkit.figures.palette import BASELINE, LineStyle, get_theme
from labkit.figures.tables import Table, make_table
from labkit.figures.thinning import Thinned, thin
from labkit.measure.run_record import RunRecord


@dataclass(frozen=True)
class KvOverTimeInfo:
    """Series over seconds: memory in bytes, requests in numbers; `preemptions` are (seconds, reserved bytes, count).

    `reserved` are blocks that requests hold, `stored` the bytes of them that hold a token, `cached` free blocks whose
    content is kept for reuse. `pool_bytes` is the plan's pool, `measured_pool_bytes` the one that was allocated.
    """

    name: str
    pool_bytes: int
    reserved: Thinned
    stored: Thinned
    cached: Thinned
    running: Thinned
    waiting: Thinned
    preemptions: tuple[tuple[float, float, int], ...] = ()
    measured_pool_bytes: int | None = None
    origin: str = "measured"

    @property
    def is_empty(self) -> bool:
        """No step was recorded."""
        return not self.reserved.x


def get_kv_over_time_info(record: RunRecord | None) -> KvOverTimeInfo:
    """The series of `record`, thinned to what a browser draws at ease."""
    steps = record.steps if record else ()
    block_bytes = record.plan.block_bytes if record else 0
    token_bytes = block_bytes / record.plan.config.block_size if record else 0
    times = [step.start_s for step in steps]

    def series(values: list[float]) -> Thinned:
        return thin(times, values)

    return KvOverTimeInfo(
        name=record.name if record else "",
        pool_bytes=record.plan.num_gpu_blocks * block_bytes if record else 0,
        reserved=series([step.num_blocks_used * block_bytes for step in steps]),
        stored=series([step.num_tokens_stored * token_bytes for step in steps]),
        cached=series([step.num_blocks_cached * block_bytes for step in steps]),
        running=series([step.num_running for step in steps]),
        waiting=series([step.num_waiting for step in steps]),
        preemptions=tuple(
            (step.start_s, step.num_blocks_used * block_bytes, step.num_preemptions)
            for step in steps
            if step.num_preemptions
        )[:500],
        measured_pool_bytes=record.measured.kv_cache_bytes if record and record.measured else None,
        origin=record.origin if record else "measured",
    )


def draw_kv_over_time(info: KvOverTimeInfo, theme: str = "light") -> go.Figure:
    """Memory above, running and waiting requests below, on one time axis."""
    if info.is_empty:
        return empty(theme, "no step recorded yet: the run has not begun, or ended before its first step")
    colors = get_theme(theme)
    pool_bytes, measured_bytes = info.pool_bytes, info.measured_pool_bytes
    divisor, unit = fmt.memory_scale(pool_bytes)
    figure = panels(theme, (), rows=2, cols=1, height=420, shared_xaxes=True, row_heights=[0.64, 0.36],
                    vertical_spacing=0.12)  # fmt: skip
    shown = {"reserved by requests": info.reserved, "holding tokens": info.stored, "cached for reuse": info.cached}
    for (title, series), style in zip(shown.items(), colors.lines, strict=False):
        figure.add_trace(_line(title, series, style, divisor, unit), row=1, col=1)
    figure.add_trace(_preemptions(info, divisor, colors.worse), row=1, col=1)
    counts = {"running": info.running, "waiting": info.waiting}
    for (title, series), style in zip(counts.items(), colors.lines, strict=False):
        figure.add_trace(_line(title, series, style, 1, "requests", shape="hv", legend="legend2"), row=2, col=1)
    figure.add_hline(
        y=pool_bytes / divisor,
        line={"color": BASELINE, "dash": "dash", "width": 1.5},
        row=1,
        col=1,
        annotation={"text": pool_words(info), "yanchor": "bottom", "font": {"color": colors.muted}},
    )
    if measured_bytes is not None and measured_bytes != pool_bytes:
        figure.add_hline(y=measured_bytes / divisor, line={"color": BASELINE, "width": 1.5}, row=1, col=1)
    highest = max(pool_bytes, measured_bytes or 0, *info.reserved.y)
    figure.update_yaxes(title_text=f"KV cache ({unit})", range=[0, 1.12 * highest / divisor], row=1, col=1)
    figure.update_yaxes(title_text="requests", rangemode="tozero", row=2, col=1)
    figure.update_xaxes(rangemode="tozero")
    figure.update_xaxes(title_text="time (s)", row=2, col=1)
    figure.update_layout(legend2={"orientation": "h", "y": 0.33, "yanchor": "bottom", "x": 1, "xanchor": "right"})
    return figure


def pool_words(info: KvOverTimeInfo) -> str:
    """The pool as planned, and as it came out: "pool: planned 21.0 GiB, measured equal"."""
    text = f"pool: planned {fmt.memory(info.pool_bytes)}"
    if info.measured_pool_bytes is None:
        return text
    if info.measured_pool_bytes == info.pool_bytes:
        return f"{text}, measured equal"
    return f"{text}, measured {fmt.memory(info.measured_pool_bytes)}"


def _line(title: str, series: Thinned, style: LineStyle, divisor: float, unit: str, **options: Any) -> go.Scatter:
    return go.Scatter(
        name=title,
        mode="lines",
        x=series.x,
        y=[value / divisor for value in series.y],
        line={"color": style.color, "dash": style.dash, "width": 2, "shape": options.get("shape", "linear")},
        legend=options.get("legend", "legend"),
        hovertemplate="%{x:.2f} s: %{y:,.4g} " + unit + "<extra>" + title + "</extra>",
    )


def _preemptions(info: KvOverTimeInfo, divisor: float, color: str) -> go.Scatter:
    return go.Scatter(
        name=f"preemptions ({fmt.count(sum(entry[2] for entry in info.preemptions))})",
        mode="markers",
        x=[entry[0] for entry in info.preemptions],
        y=[entry[1] / divisor for entry in info.preemptions],
        marker={"symbol": "x", "size": 9, "color": color, "line": {"width": 0}},
        hovertext=[f"{entry[2]} sent back at {fmt.duration(entry[0])}" for entry in info.preemptions],
        hovertemplate="%{hovertext}<extra></extra>",
    )


def plot_kv_over_time(record: RunRecord | None, theme: str = "light") -> go.Figure:
    """Info step and drawing step in one."""
    return draw_kv_over_time(get_kv_over_time_info(record), theme)


def caption(info: KvOverTimeInfo) -> str:
    """The fullest moment, its tail waste, and the preemptions."""
    if info.is_empty:
        return "No step was recorded, so there is no KV use to show."
    peak = max(range(len(info.reserved.y)), key=lambda index: info.reserved.y[index])
    reserved, at = info.reserved.y[peak], info.reserved.x[peak]
    sent_back = sum(entry[2] for entry in info.preemptions)
    stored = max(info.stored.y)
    text = (
        f"{info.origin.capitalize()}: at its fullest, {fmt.duration(at)} into the run, requests hold "
        f"{fmt.memory_with_share(reserved, info.pool_bytes)} of the pool; at most {fmt.memory(stored)} held tokens; "
    )
    text += f"{fmt.count(sent_back)} preemptions." if sent_back else "no request was sent back."
    return f"{text} {info.reserved.notice.capitalize()}." if info.reserved.notice else text


def table(info: KvOverTimeInfo) -> Table:
    """Mean and peak of each series."""
    rows = []
    for title, series in (("reserved by requests", info.reserved), ("holding tokens", info.stored),
                          ("cached for reuse", info.cached)):  # fmt: skip
        if series.y:
            rows.append(
                [
                    title,
                    fmt.memory(sum(series.y) / len(series.y)),
                    fmt.memory_with_share(max(series.y), info.pool_bytes),
                ]
            )
    for title, series in (("running requests", info.running), ("waiting requests", info.waiting)):
        if series.y:
            rows.append([title, fmt.number(sum(series.y) / len(series.y)), fmt.count(max(series.y))])
    return make_table(["series", "mean of shown points", "peak"], rows, f"KV use over the run, {info.origin}")
