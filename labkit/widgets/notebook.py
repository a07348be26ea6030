"""For cells that take a while and end in text: a line of progress, and a table that reads from the left."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import ipywidgets as ipw
from IPython.display import display

from labkit import format as fmt
from labkit.widgets.parts import Screen, TextLine

if TYPE_CHECKING:
    from pandas import DataFrame
    from pandas.io.formats.style import Styler

Item = TypeVar("Item")
UPDATES_PER_S = 8
# A column with longer texts keeps so much width on a narrow page, where the table then scrolls.
LONG_TEXT, LONG_TEXT_WIDTH = 60, "14em"


def progress(items: Iterable[Item], total: int, what: str = "rows") -> Iterator[Item]:
    """`items`, with a line under the cell: how many of `total` are done, elapsed and remaining time.

    Args:
        total: number of items, for the time left.
        what: what they are, as the line calls them.
    """
    line, start, shown_s = TextLine(role="status"), time.monotonic(), 0.0
    view = ipw.VBox([Screen(), line])
    view.add_class("lk-panel")
    display(view)
    line.say(f"0 of {fmt.count(total)} {what}", progress=0.0)
    done = 0
    try:
        for done, item in enumerate(items, start=1):
            now = time.monotonic()
            if now - shown_s > 1 / UPDATES_PER_S:
                shown_s = now
                left_s = (now - start) / done * max(0, total - done)
                line.say(f"{fmt.count(done)} of {fmt.count(total)} {what}, {fmt.duration(now - start)} elapsed, about "
                         f"{fmt.duration(left_s)} left", progress=min(1.0, done / max(1, total)))  # fmt: skip
            yield item
    finally:
        line.say(f"{fmt.count(done)} {what} in {fmt.duration(time.monotonic() - start)}")


def text_table(frame: DataFrame) -> Styler:
    """`frame` as a table of words: from the left, lines broken between words, numbers with three digits."""

    def words(value: Any) -> str:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return str(value)
        return fmt.count(value) if float(value).is_integer() else fmt.number(value)

    left = "text-align: left; white-space: normal; vertical-align: top"
    rules: Any = [{"selector": "th, td", "props": left}]
    for at, (_, column) in enumerate(frame.items()):
        if column.map(words).str.len().max() > LONG_TEXT:
            rules.append({"selector": f"td.col{at}", "props": f"min-width: {LONG_TEXT_WIDTH}"})
    return frame.style.hide(axis="index").format(words, na_rep=fmt.MISSING, escape="html").set_table_styles(rules)
