"""The card's memory as one bar per view (predicted, measured, baseline), all on one scale."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from labkit import format as fmt
from labkit.figures.frame import empty
from labkit.figures.palette import OUTLINE, PART_COLORS, get_theme, label, pattern, template, text_on
from labkit.figures.tables import Table, make_table
from labkit.measure.run_record import RunRecord
from labkit.memory.records import PART_TITLES, PARTS, MemoryBreakdown, MemoryPlan

ROWS = ("predicted", "measured", "baseline")
_SOLID_SHARE = 0.09  # a segment narrower than this has no room for its name


@dataclass(frozen=True)
class MemoryBar:
    """One bar: `parts` in bytes sum to `total_bytes`; a negative "free" says by how much the card is overrun.

    `nvml_used_bytes` is the most that NVML saw in use on the card while the parts were measured.
    """

    row: str
    total_bytes: int
    parts: tuple[tuple[str, int], ...]
    uncertainty: tuple[tuple[str, int], ...] = ()
    formulas: tuple[tuple[str, str], ...] = ()
    note: str = ""
    nvml_used_bytes: int | None = None

    @property
    def used_bytes(self) -> int:
        """Sum of the parts that are in use."""
        return sum(size for part, size in self.parts if part != "free")


@dataclass(frozen=True)
class MemoryBreakdownInfo:
    """Bars on one scale of `scale_bytes`; `subject` says whose memory it is; empty `bars` is the state "no plan"."""

    subject: str
    bars: tuple[MemoryBar, ...]
    scale_bytes: int
    verdict: str = ""

    def bar(self, row: str) -> MemoryBar | None:
        """The bar of that name, None where there is none."""
        return next((bar for bar in self.bars if bar.row == row), None)


def get_memory_breakdown_info(
    plan: MemoryPlan | None, record: RunRecord | None = None, baseline: RunRecord | None = None
) -> MemoryBreakdownInfo:
    """The predicted bar of `plan`, beside what `record` measured and the memory of the `baseline` run.

    The baseline shows its measured parts where it has them, else its predicted ones; the note says which.
    """
    if plan is None:
        return MemoryBreakdownInfo("", (), 0)
    bars = [_bar("predicted", plan.breakdown, plan)]
    if record is not None and record.measured is not None:
        bars.append(_bar("measured", record.measured, None, record.name, record))
    if baseline is not None:
        parts = baseline.measured or baseline.plan.breakdown
        bars.append(_bar("baseline", parts, None, f"{baseline.name}, {parts.kind}", baseline))
    scale = max(max(bar.total_bytes, bar.used_bytes) for bar in bars)
    return MemoryBreakdownInfo(f"{plan.model.name} on {plan.gpu.name}", tuple(bars), scale, plan.verdict)


def _bar(
    row: str, parts: MemoryBreakdown, plan: MemoryPlan | None, note: str = "", record: RunRecord | None = None
) -> MemoryBar:
    is_measured = parts.kind == "measured" and record is not None and record.nvml is not None
    return MemoryBar(
        row,
        parts.total_bytes,
        tuple(parts.parts().items()),
        tuple(parts.uncertainty_bytes.items()),
        tuple(plan.formulas.items()) if plan else (),
        note,
        record.nvml.max_memory_used_bytes if is_measured else None,  # type: ignore[union-attr]
    )


def draw_memory_breakdown(info: MemoryBreakdownInfo, theme: str = "light", narrow: bool = False) -> go.Figure:
    """One horizontal stacked bar for each view; predicted is hatched, measured solid; formulas on hover.

    Args:
        narrow: the page has room for one name a row in the legend only.
    """
    return go.Figure(memory_breakdown_json(info, theme, narrow))


def memory_breakdown_json(info: MemoryBreakdownInfo, theme: str = "light", narrow: bool = False) -> dict[str, Any]:
    """What `draw_memory_breakdown` draws, as plotly's JSON: each turn of a knob needs it, and go.Figure takes 8 ms to
    check it."""
    if not info.bars:
        return empty(theme, "no plan yet: choose a model and a card").to_plotly_json()
    divisor, unit = fmt.memory_scale(info.scale_bytes)
    legend_rows = sum(any(dict(bar.parts)[part] for bar in info.bars) for part in PARTS) if narrow else 4
    legend_height = (20 if narrow else 16) * legend_rows
    sides = {"l": 60, "r": 8} if narrow else {"l": 84, "r": 20}
    layout = {
        "template": template(theme),
        "barmode": "stack",
        "bargap": 0.35,
        "height": 106 + legend_height + 40 * len(info.bars),
        "uniformtext": {"minsize": 10, "mode": "hide"},
        "legend": {
            "traceorder": "normal",
            "entrywidth": 1.0 if narrow else 0.5,
            "entrywidthmode": "fraction",
            "font": {"size": 10 if narrow else 11},
            "maxheight": 0.9,
        },
        "margin": {**sides, "t": legend_height, "b": 44},
        "shapes": [_total_line(bar, index, divisor, theme) for index, bar in enumerate(info.bars)],
        "xaxis": {"title": {"text": f"memory ({unit})"}, "range": [0, 1.01 * info.scale_bytes / divisor],
                  "fixedrange": True},
        "yaxis": {"autorange": "reversed", "fixedrange": True, "ticks": "", "showgrid": False},
    }  # fmt: skip
    return {"data": [_trace(info, part, divisor, theme) for part in PARTS], "layout": layout}


def _trace(info: MemoryBreakdownInfo, part: str, divisor: float, theme: str) -> dict[str, Any]:
    sizes = [max(0, dict(bar.parts)[part]) for bar in info.bars]
    fill = PART_COLORS[part]
    patterns = ["x" if part == "outside" else "/" if bar.row == "predicted" and part != "free" else ""
                for bar in info.bars]  # fmt: skip
    return {
        "type": "bar",
        "showlegend": any(dict(bar.parts)[part] for bar in info.bars),
        "name": _name(part, dict(info.bars[0].parts)[part]),
        "orientation": "h",
        "y": [bar.row for bar in info.bars],
        "x": [size / divisor for size in sizes],
        "marker": {"color": fill, "line": {"color": get_theme(theme).page if part != "free" else OUTLINE, "width": 1},
                   "pattern": pattern(patterns, fill)},
        "text": [_inside(part, size, info.scale_bytes) for size in sizes],
        "textposition": "inside",
        "insidetextanchor": "middle",
        "textangle": 0,
        "textfont": {"color": text_on(fill) if part != "free" else get_theme(theme).text},
        "hovertext": [_hover(bar, part) for bar in info.bars],
        "hovertemplate": "%{hovertext}<extra></extra>",
        "legendgroup": part,
    }  # fmt: skip


def _name(part: str, size: int) -> str:
    """In the legend: the part and its bytes in the first bar."""
    if size < 0:
        return f"overrun by {fmt.memory(-size)}"
    return f"{PART_TITLES[part].split(' (')[0]} {fmt.memory(size)}"


def _inside(part: str, size: int, scale: int) -> str:
    share = size / scale if scale else 0
    if share < _SOLID_SHARE / 2:
        return ""
    return f"{PART_TITLES[part]} {fmt.memory(size)}" if share > 2 * _SOLID_SHARE else fmt.memory(size)


def _hover(bar: MemoryBar, part: str) -> str:
    size = dict(bar.parts)[part]
    lines = [
        f"<b>{PART_TITLES[part]}</b>, {bar.row}",
        f"{fmt.memory_with_share(size, bar.total_bytes)} = {size:,} bytes",
    ]
    uncertainty = dict(bar.uncertainty).get(part)
    if uncertainty:
        lines.append(f"± {fmt.memory(uncertainty)}")
    formula = dict(bar.formulas).get(part)
    if formula:
        lines.extend(label(line, 100) for line in textwrap.wrap(formula, 72))
    if bar.note:
        lines.append(label(bar.note))
    return "<br>".join(lines)


def _total_line(bar: MemoryBar, index: int, divisor: float, theme: str) -> dict[str, Any]:
    position = bar.total_bytes / divisor
    return {"type": "line", "x0": position, "x1": position, "y0": index - 0.42, "y1": index + 0.42,
            "line": {"color": get_theme(theme).text, "width": 2}}  # fmt: skip


def plot_memory_breakdown(
    plan: MemoryPlan | None, record: RunRecord | None = None, baseline: RunRecord | None = None, theme: str = "light"
) -> go.Figure:
    """Info step and drawing step in one."""
    return draw_memory_breakdown(get_memory_breakdown_info(plan, record, baseline), theme)


def part_errors(info: MemoryBreakdownInfo) -> tuple[tuple[str, int, int], ...]:
    """(part, predicted bytes, measured bytes) of every part where both views exist; empty before a run."""
    predicted, measured = info.bar("predicted"), info.bar("measured")
    if predicted is None or measured is None:
        return ()
    got = dict(measured.parts)
    return tuple((part, size, got[part]) for part, size in predicted.parts)


def caption(info: MemoryBreakdownInfo) -> str:
    """What the bar says: the largest part, what is left, and how far prediction and measurement are apart."""
    predicted = info.bar("predicted")
    if predicted is None:
        return "No plan yet."
    parts = dict(predicted.parts)
    largest = max((part for part in PARTS if part != "free"), key=lambda part: parts[part])
    total = predicted.total_bytes
    text = (
        f"Predicted: the largest part of {fmt.memory(total)} is {PART_TITLES[largest]}, "
        f"{fmt.memory_with_share(parts[largest], total)}"
    )
    left = "overrun by" if parts["free"] < 0 else "left free:"
    text += f"; {left} {fmt.memory(abs(parts['free']))}."
    errors = [row for row in part_errors(info) if row[0] != "free" and max(row[1:]) > 0.001 * total]
    if not errors:
        return text
    part, want, got = max(errors, key=lambda row: abs(row[2] - row[1]))
    if want == got:
        return f"{text} Measured parts equal the predicted ones."
    return f"{text} Measured differs most from predicted in {PART_TITLES[part]}: {_error(want, got)}."


def table(info: MemoryBreakdownInfo) -> Table:
    """Part by part: every bar's bytes with share, and the error of the prediction; the sum beside NVML's."""
    columns = ["part", *(bar.row for bar in info.bars)]
    errors = {part: (want, got) for part, want, got in part_errors(info)}
    if errors:
        columns.append("measured against predicted")
    rows = []
    for part in PARTS if info.bars else ():
        row = [PART_TITLES[part], *(fmt.memory_with_share(dict(bar.parts)[part], bar.total_bytes) for bar in info.bars)]
        if errors:
            row.append(_error(*errors[part]))
        rows.append(row)
    if info.bars:
        rows.append(["total", *(fmt.memory(bar.total_bytes) for bar in info.bars), *([""] if errors else [])])
    if any(bar.nvml_used_bytes for bar in info.bars):
        rows.append(["in use, by NVML", *(_nvml(bar) for bar in info.bars), *([""] if errors else [])])
    return make_table(columns, rows, "Memory of the card, part by part")


def _nvml(bar: MemoryBar) -> str:
    """NVML's number, and how far the sum of the parts is from it."""
    if not bar.nvml_used_bytes:
        return fmt.MISSING
    return f"{fmt.memory(bar.nvml_used_bytes)}; parts: {_error(bar.nvml_used_bytes, bar.used_bytes)}"


def _error(predicted: int, measured: int) -> str:
    if predicted == measured:
        return "equal"
    if predicted == 0:
        return f"+{fmt.memory(measured)}"
    sign = "+" if measured > predicted else "−"
    return (
        f"{sign}{fmt.share(abs(measured - predicted), abs(predicted))} ({sign}{fmt.memory(abs(measured - predicted))})"
    )
