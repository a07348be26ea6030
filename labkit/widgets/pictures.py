"""The right side of the panel: the memory bar, and below it one chart that the tabs take turns on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ipywidgets as ipw
import plotly.graph_objects as go

from labkit.figures import (
    block_map,
    kv_over_time,
    l2,
    latency,
    live,
    memory_breakdown,
    memory_timeline,
    pareto,
    requests,
    step_roofline,
    throughput,
)
from labkit.figures.runs import comparable
from labkit.figures.tables import Table
from labkit.measure.run_record import RunRecord
from labkit.memory.records import MemoryPlan
from labkit.widgets.parts import Chart, DataTable, TextLine

TABS = ("Live", "Throughput and latency", "Limits", "L2 and bandwidth", "KV over time", "Memory over time", "Blocks",
        "Requests")  # fmt: skip
VIEWS = ("throughput against a knob", "latency against a knob", "throughput against latency")


@dataclass(frozen=True)
class Look:
    """How to draw: the theme, and whether the page has room for one plot a row only."""

    theme: str = "light"
    narrow: bool = False


@dataclass(frozen=True)
class Picture:
    """A drawn figure, or its plotly JSON, with its sentence and its table."""

    figure: go.Figure | Mapping[str, Any]
    caption: str
    table: Table | None = None


def draw_tab(
    tab: str,
    view: str,
    records: Sequence[RunRecord],
    chosen: RunRecord | None,
    look: Look,
    simulated: RunRecord | None = None,
) -> Picture:
    """What `tab` shows: of all runs for the comparing tabs, of the chosen run for the others.

    Args:
        simulated: the settings as they stand on a virtual card, where the chosen run says too little.
    """
    if tab == "Limits":
        return _one(step_roofline, step_roofline.get_step_roofline_info([chosen, simulated]), look)
    if tab == "KV over time":
        return _one(kv_over_time, kv_over_time.get_kv_over_time_info(chosen), look)
    if tab == "Memory over time":
        return _one(memory_timeline, memory_timeline.get_memory_timeline_info(chosen), look)
    if tab == "Blocks":
        return _one(block_map, block_map.get_block_map_info(chosen), look)
    if tab == "L2 and bandwidth":
        return _one(l2, l2.get_l2_info(records[-6:]), look)
    if tab == "Requests":
        others = [record for record in comparable(records)[-3:] if record is not chosen]
        return _one(requests, requests.get_requests_info([chosen, *others] if chosen else []), look)
    return _compare(view, records, look)


def _compare(view: str, records: Sequence[RunRecord], look: Look) -> Picture:
    """The runs that can be compared beside each other; the sentence says how many were left out."""
    compared = comparable(records)
    if view == "latency against a knob":
        picture = _one(latency, latency.get_latency_info(compared), look)
    elif view == "throughput against latency":
        picture = _one(pareto, pareto.get_pareto_info(compared), look)
    else:
        picture = _one(throughput, throughput.get_throughput_info(compared), look)
    left_out = len(records) - len(compared)
    if not left_out:
        return picture
    words = f"{left_out} run{'s that were' if left_out > 1 else ' that was'} cut short or failed left out."
    return replace(picture, caption=f"{picture.caption} {words}")


def _one(room: Any, info: Any, look: Look) -> Picture:
    draw: Callable[..., go.Figure] = getattr(room, f"draw_{room.__name__.rsplit('.', 1)[-1]}")
    takes_narrow = "narrow" in draw.__code__.co_varnames[: draw.__code__.co_argcount]
    figure = draw(info, look.theme, narrow=look.narrow) if takes_narrow else draw(info, look.theme)
    return Picture(figure, room.caption(info), room.table(info))


def _column(area: str, *children: ipw.Widget) -> ipw.VBox:
    column = ipw.VBox(children)
    column.add_class("lk-column")
    column.add_class(area)
    return column


class Pictures:
    """Widgets of the right side. Nothing here decides what to show; the panel says it."""

    def __init__(self) -> None:
        self.look = Look()
        self.memory = Chart()
        self.memory_caption = TextLine(classes=("lk-caption",))
        self.memory_table = DataTable(folded="parts and errors as a table")
        self.tabs = ipw.ToggleButtons(options=TABS, value=TABS[0])
        self.view = ipw.Dropdown(
            options=VIEWS, value=VIEWS[0], description="show", style={"description_width": "initial"}
        )
        self.view.layout.display = "none"
        self.chart = Chart()
        self.caption = TextLine(classes=("lk-caption",))
        self.table = DataTable(folded="the numbers as a table")
        self.tabs.observe(self._show_view, "value")

    def memory_view(self, below: Sequence[ipw.Widget]) -> ipw.VBox:
        """The memory bar with its sentence and table, and what stands `below` it."""
        return _column("lk-area-memory", self.memory, self.memory_caption, self.memory_table, *below)

    def tabs_view(self, below: Sequence[ipw.Widget]) -> ipw.VBox:
        """The tabs with their chart, and what stands `below` it."""
        return _column("lk-area-tabs", self.tabs, self.view, self.chart, self.caption, self.table, *below)

    def _show_view(self, change: dict[str, Any]) -> None:
        self.view.layout.display = "" if change["new"] == "Throughput and latency" else "none"

    def show_memory(self, plan: MemoryPlan, record: RunRecord | None, baseline: RunRecord | None) -> None:
        """Redraw the memory bar; `record` only where it ran with the settings of `plan`."""
        info = memory_breakdown.get_memory_breakdown_info(plan, record, baseline)
        sentence = memory_breakdown.caption(info)
        self.memory.show(memory_breakdown.memory_breakdown_json(info, self.look.theme, self.look.narrow), sentence)
        self.memory_caption.say(sentence)
        self.memory_table.show(memory_breakdown.table(info))

    def show_tab(
        self, records: Sequence[RunRecord], chosen: RunRecord | None, simulated: RunRecord | None = None
    ) -> None:
        """Redraw the tab that is open, from finished or broken-off runs; the live one redraws itself."""
        if self.tabs.value != "Live":
            self._show(draw_tab(self.tabs.value, self.view.value, records, chosen, self.look, simulated))

    def show_live(self, info: live.LiveInfo) -> None:
        """Redraw the live chart where its tab is open."""
        if self.tabs.value == "Live":
            self._show(Picture(live.live_json(info, self.look.theme), live.caption(info)))

    def _show(self, picture: Picture) -> None:
        self.chart.show(picture.figure, picture.caption)
        self.caption.say(picture.caption)
        self.table.show(picture.table or Table((), ()))
