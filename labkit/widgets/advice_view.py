"""The panel's advice: what each change would buy, with Apply, and what it gave after the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import ipywidgets as ipw

from labkit.advice.advise import Advice
from labkit.advice.follow_up import FollowUp
from labkit.advice.load_study import LoadStudy
from labkit.figures.tables import Table, make_table
from labkit.widgets.parts import DataTable, TextLine

MAX_ADVICE = 6
FROM_PLAN = "What each change would buy, from the plan"


class AdviceView:
    """Lines of advice, without the first where that stands in the answer; a table of all; estimated against got."""

    def __init__(self) -> None:
        self._first = 1
        self.title = TextLine(classes=("lk-title",))
        self.lines = [TextLine(classes=("lk-advice",)) for _ in range(MAX_ADVICE)]
        self.table = DataTable(folded="every change and its numbers as a table")
        self.came = TextLine(classes=("lk-advice",))
        self.came_table = DataTable(folded="estimated against got as a table")

    def widgets(self) -> list[ipw.Widget]:
        """Top to bottom."""
        return [self.title, *self.lines, self.table, self.came, self.came_table]

    def on_apply(self, handle: Callable[[int], None]) -> None:
        """Call `handle` with the number of the advice whose Apply was pressed; 0 is the one in the answer."""
        for index, line in enumerate(self.lines):
            line.on_press(partial(self._pressed, handle, index))

    def show(self, advice: Sequence[Advice], study: LoadStudy | None = None, first: int = 1) -> None:
        """Show `advice` from number `first` on; with a `study` its numbers are of the traffic."""
        self._first = first
        title = FROM_PLAN if study is None else f"What each change would buy on this traffic, {study.speed.basis}"
        self.title.say(title if advice else "")
        for index, line in enumerate(self.lines, start=first):
            self._show_line(line, advice[index] if index < len(advice) else None)
        self.table.show(advice_table(advice))

    def _pressed(self, handle: Callable[[int], None], line: int, _button: str) -> None:
        handle(self._first + line)

    def _show_line(self, line: TextLine, advice: Advice | None) -> None:
        if advice is None:
            line.say("")
            return
        evidence = "\n".join(f"{entry.label}: {entry.value}" for entry in advice.evidence)
        line.say(
            f"{advice.title}: {advice.gain}. {advice.reason}", buttons=["Apply"], summary="numbers and risk",
            details=f"{evidence}\nRisk: {advice.risk}",
        )  # fmt: skip

    def show_follow_up(self, found: FollowUp | None) -> None:
        """Estimated against got of the last advice that was applied and run."""
        self.came.say(found.sentence if found else "")
        rows = found.rows if found else ()
        self.came_table.show(make_table(("quantity", "estimated", "got"), rows, "Estimated against got"))


def advice_table(advice: Sequence[Advice]) -> Table:
    """One row a change, one column a quantity: the evidence of each."""
    labels = list(dict.fromkeys(entry.label for item in advice for entry in item.evidence))
    rows = []
    for item in advice:
        known = {entry.label: entry.value for entry in item.evidence}
        rows.append([item.title, *(known.get(label, "–") for label in labels), item.risk])
    return make_table(("change", *labels, "risk"), rows, "What each change would buy, at most")
