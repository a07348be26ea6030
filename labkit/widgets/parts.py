"""The small parts of the panel: each a widget whose text is set as text, never as HTML (`static/parts.js`)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import anywidget
import plotly.graph_objects as go
import traitlets as t
from plotly.offline import get_plotlyjs

from labkit.figures.tables import Table
from labkit.text import plain

_STATIC = Path(__file__).parent / "static"


@functools.cache
def _plotly_module() -> str:
    """plotly.js as a module that hands itself to every chart of the page; sent once a panel, not once a chart."""
    return (
        "const module = { exports: {} }; const exports = module.exports; const define = undefined;\n"
        + get_plotlyjs()
        + """
const made = module.exports.react ? module.exports : globalThis.Plotly;
if (!globalThis.labkitPlotly) {
  const entry = {};
  entry.promise = new Promise((resolve) => { entry.resolve = resolve; });
  globalThis.labkitPlotly = entry;
}
globalThis.labkitPlotly.resolve(made);
export default { render() {} };
"""
    )


class PlotlyLibrary(anywidget.AnyWidget):
    """Carries plotly.js to the page, from the installed package: no request leaves the machine."""

    def __init__(self, **traits: Any) -> None:
        super().__init__(_esm=_plotly_module(), **traits)


class Part(anywidget.AnyWidget):
    """A part drawn by `static/parts.js`; `pressed` holds the name of the last pressed button and a counter."""

    _esm = _STATIC / "parts.js"

    kind = t.Unicode().tag(sync=True)
    pressed = t.Dict().tag(sync=True)

    def __init__(self, **traits: Any) -> None:
        classes = traits.pop("classes", ())
        super().__init__(**traits)
        for name in classes:
            self.add_class(name)

    def on_press(self, handle: Callable[[str], None]) -> None:
        """Call `handle` with the name of each pressed button."""
        self.observe(lambda change: handle(str(change["new"].get("what", ""))), "pressed")


class Screen(Part):
    """Brings the style sheet, and says what the page looks like: `theme` "light" or "dark", and `narrow` where there
    is no room for two columns."""

    _css = _STATIC / "parts.css"

    theme = t.Unicode("light").tag(sync=True)
    narrow = t.Bool(False).tag(sync=True)

    def __init__(self, **traits: Any) -> None:
        super().__init__(kind="screen", **traits)


class TextLine(Part):
    """A sentence with a level ("ok", "warn", "bad"), a progress bar, buttons, and raw text folded below it.

    An empty text hides the line. `role` "status" makes screen readers speak each change.
    """

    text = t.Unicode().tag(sync=True)
    heading = t.Unicode().tag(sync=True)
    level = t.Unicode("ok").tag(sync=True)
    role = t.Unicode().tag(sync=True)
    progress = t.Float(None, allow_none=True).tag(sync=True)
    buttons = t.List(t.Unicode()).tag(sync=True)
    details = t.Unicode().tag(sync=True)
    summary = t.Unicode("details").tag(sync=True)
    folded = t.Bool(True).tag(sync=True)
    copy = t.Unicode().tag(sync=True)

    def __init__(self, **traits: Any) -> None:
        super().__init__(kind="text", **traits)

    def say(self, text: str, level: str = "ok", **traits: Any) -> None:
        """Replace the sentence and what belongs to it, in one message."""
        values = {"heading": "", "progress": None, "buttons": [], "details": "", "copy": "", "folded": True, **traits}
        values["details"] = "\n".join(plain(line, 300) for line in values["details"].splitlines()[:60])
        with self.hold_sync():
            self.text, self.level = plain(text, 2000), level
            for name, value in values.items():
                setattr(self, name, value)


class DataTable(Part):
    """A table of text; `selected` is the index of the chosen row, -1 for none, `pinned` rows stay on top in their
    order, and `marks` says row by row what stands behind its first cell."""

    columns = t.List(t.Unicode()).tag(sync=True)
    rows = t.List(t.List(t.Unicode())).tag(sync=True)
    sort_keys = t.List(t.List()).tag(sync=True)
    caption = t.Unicode().tag(sync=True)
    folded = t.Unicode().tag(sync=True)
    empty_text = t.Unicode().tag(sync=True)
    selectable = t.Bool(False).tag(sync=True)
    selected = t.Int(-1).tag(sync=True)
    pinned = t.List(t.Int()).tag(sync=True)
    marks = t.List(t.Unicode()).tag(sync=True)

    def __init__(self, **traits: Any) -> None:
        super().__init__(kind="table", **traits)

    def show(self, table: Table, sort_keys: Sequence[Sequence[Any]] = ()) -> None:
        """Replace columns and rows; `sort_keys` are the values behind the texts, row by row."""
        rows = [[plain(cell, 300) for cell in row] for row in table.rows]
        keys = [list(row) for row in sort_keys]
        with self.hold_sync():
            self.columns, self.rows, self.sort_keys = list(table.columns), rows, keys
            if not self.folded:
                self.caption = table.caption


class Chart(Part):
    """One plotly figure, kept as its whole description: a reloaded page or a second view shows the same."""

    figure = t.Dict().tag(sync=True)
    description = t.Unicode().tag(sync=True)
    clicked = t.Dict().tag(sync=True)

    def __init__(self, **traits: Any) -> None:
        super().__init__(kind="chart", **traits)

    def show(self, figure: go.Figure | Mapping[str, Any], description: str = "") -> None:
        """Draw `figure`, a figure or its plotly JSON; `description` is what a screen reader says of it."""
        described = figure if isinstance(figure, Mapping) else figure.to_plotly_json()
        with self.hold_sync():
            self.figure, self.description = _plain_lists(described), plain(description, 1000)

    def on_run_click(self, handle: Callable[[str], None]) -> None:
        """Call `handle` with the id of the run whose point was clicked."""
        self.observe(lambda change: handle(str(change["new"].get("run_id", ""))), "clicked")


def _plain_lists(value: Any) -> Any:
    """Arrays and tuples as lists: what JSON and every plotly.js understand."""
    if isinstance(value, Mapping):
        return {name: _plain_lists(entry) for name, entry in value.items()}
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, (list, tuple)):
        return [_plain_lists(entry) if isinstance(entry, (Mapping, list, tuple)) else entry for entry in value]
    return value
