"""L2 hit rate of each run, never without the bandwidth beside it and the method that gave it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from labkit import format as fmt
from labkit.figures.frame import MANY_ROWS, empty, names_beside, position, row_of_plots, rows_height, wrapped
from labkit.figures.palette import BASELINE, get_theme, label, pattern
from labkit.figures.tables import Table, make_table
from labkit.measure.run_record import Counters, RunRecord
from labkit.text import plain

# Below this share of hits, the caption says why there are so few.
NEAR_ZERO = 0.02


@dataclass(frozen=True)
class L2Bar:
    """One run's counters; `method` begins with "measured" or "simulated", `scope` says what was looked at."""

    run_id: str
    name: str
    method: str
    card: str
    l2_hit_rate: float
    dram_bytes_per_s: float
    scope: str = ""

    @property
    def is_measured(self) -> bool:
        """Counters of the card, not of a model of it."""
        return self.method.startswith("measured")


@dataclass(frozen=True)
class L2Info:
    """Bars in the order of the runs; `peak_bytes_per_s` is the data sheet's bandwidth where it is known and common."""

    bars: tuple[L2Bar, ...]
    peak_bytes_per_s: float | None = None


def get_l2_info(records: Sequence[RunRecord]) -> L2Info:
    """The counters of every run that has them: of the attention, and of the whole step where that was measured."""
    bars = tuple(
        L2Bar(record.run_id, record.name, found.method, found.card, found.l2_hit_rate, found.dram_bytes_per_s,
              found.scope)
        for record in records
        for found in (record.counters, record.step_counters)
        if found is not None
    )  # fmt: skip
    peaks = {record.gpu.mem_bandwidth_bytes_per_s for record in records
             if record.counters is not None and record.counters.card == record.gpu.name}  # fmt: skip
    return L2Info(bars, peaks.pop() if len(peaks) == 1 else None)


def draw_l2(info: L2Info, theme: str = "light", narrow: bool = False) -> go.Figure:
    """Hit rate and DRAM bandwidth side by side; simulated bars are dotted, measured ones solid.

    Bars lie, so that names of any length and number stand beside them.
    """
    if not info.bars:
        return empty(theme, "no cache counters: a run on a card, or a simulated one, gives them")
    style, colors = get_theme(theme).lines[0], get_theme(theme)
    places = [position(index, narrow) for index in (0, 1)]
    figure = row_of_plots(theme, ("L2 hit rate", "DRAM reads"), narrow=narrow, spacing=0.08,
                          height=rows_height(len(info.bars)))  # fmt: skip
    divisor, unit = fmt.bandwidth_scale(max(bar.dram_bytes_per_s for bar in info.bars))
    hatch = pattern(["" if bar.is_measured else "." for bar in info.bars], style.color)
    common = {
        "orientation": "h",
        # By number: bars of runs with one name would stand on each other.
        "y": list(range(len(info.bars))),
        "marker": {"color": style.color, "pattern": hatch, "line": {"color": colors.text, "width": 1}},
        "customdata": [bar.run_id for bar in info.bars],
        "hovertext": [_hover(bar) for bar in info.bars],
        "hovertemplate": "%{hovertext}<extra></extra>",
        "textposition": "outside",
        "textangle": 0,
        "constraintext": "none",
        "cliponaxis": False,
    }
    rates = [100 * bar.l2_hit_rate for bar in info.bars]
    speeds = [bar.dram_bytes_per_s / divisor for bar in info.bars]
    figure.add_trace(go.Bar(x=rates, text=[fmt.share(rate, 100) for rate in rates], **common), **places[0])
    figure.add_trace(
        go.Bar(x=speeds, text=[fmt.bandwidth(bar.dram_bytes_per_s) for bar in info.bars], **common), **places[1]
    )
    peak = (info.peak_bytes_per_s or 0.0) / divisor
    title = f"DRAM reads ({unit})"
    if peak:
        figure.add_vline(x=peak, line={"color": BASELINE, "dash": "dash"}, **places[1])
        title += f"<br>dashed: data sheet{'<br>' if narrow else ' '}{fmt.bandwidth(info.peak_bytes_per_s)}"
    # Beyond the longest bar there is room for its number.
    figure.update_xaxes(title_text="hits (%)", range=[0, 124], tickvals=[0, 25, 50, 75, 100], **places[0])
    figure.update_xaxes(title_text=title, range=[0, max(1.34 * max(speeds), 1.04 * peak)], **places[1])
    is_close = len(info.bars) > MANY_ROWS
    width, lines, between = (16 if narrow else 24), 1 if is_close else 2, ", " if is_close else "<br>"
    names = [f"{wrapped(bar.name, width, lines)}{between}{_kind(bar)}" for bar in info.bars]
    names_beside(figure, names, 2, narrow)
    figure.update_layout(showlegend=False, bargap=0.4, margin={"t": 44})
    return figure


def _hover(bar: L2Bar) -> str:
    return (
        f"<b>{label(bar.name)}</b><br>L2 hit rate {fmt.share(bar.l2_hit_rate, 1)} at "
        f"{fmt.bandwidth(bar.dram_bytes_per_s)}<br>{label(bar.scope, 120)}<br>{label(bar.method, 120)}"
        f"<br>{label(bar.card)}"
    )


def _kind(bar: L2Bar) -> str:
    """The words under a bar: how it was got and on which card; a whole step is told from its attention."""
    scope = ", whole step" if "all kernels" in bar.scope else ""
    return f"{bar.method.split(' ')[0]}, {label(bar.card, 16)}{scope}"


def sentence(counters: Counters | L2Bar) -> str:
    """One run's counters in words: hit rate, bandwidth, what was looked at, and how."""
    scope = f" ({plain(counters.scope, 80)})" if counters.scope else ""
    return (
        f"L2 hit rate {fmt.share(counters.l2_hit_rate, 1)} at {fmt.bandwidth(counters.dram_bytes_per_s)} from "
        f"DRAM{scope}: {plain(counters.method, 80)}, {plain(counters.card, 40)}."
    )


def plot_l2(records: Sequence[RunRecord], theme: str = "light") -> go.Figure:
    """Info step and drawing step in one."""
    return draw_l2(get_l2_info(records), theme)


def caption(info: L2Info) -> str:
    """The newest run's hit rate with its bandwidth and method; of its attention where both were counted."""
    if not info.bars:
        return "No run has cache counters yet."
    newest = next(bar for bar in info.bars if bar.run_id == info.bars[-1].run_id)
    text = f"{plain(newest.name, 40)}: {sentence(newest)}"
    if newest.l2_hit_rate < NEAR_ZERO:
        text += (
            " Near zero is what decode without shared prefixes gives: each block of KV is read once in a step, and "
            "until the next step other layers have pushed it out; only prefixes that requests share can hit."
        )
    if not newest.is_measured:
        text += " The bandwidth is the most that a kernel of this shape can ask for, not a measurement."
    if info.peak_bytes_per_s:
        share = fmt.share(newest.dram_bytes_per_s, info.peak_bytes_per_s)
        text += f" DRAM reads are {share} of the data sheet's bandwidth."
    return text


def table(info: L2Info) -> Table:
    """One row a run."""
    rows = [
        [bar.name, fmt.share(bar.l2_hit_rate, 1), fmt.bandwidth(bar.dram_bytes_per_s), bar.scope, bar.method, bar.card]
        for bar in info.bars
    ]
    return make_table(["run", "L2 hit rate", "DRAM reads", "of what", "method", "card"], rows, "Cache and DRAM")
