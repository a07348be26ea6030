"""The chosen run's name, note, pin, lock and trash; what they do happens in the session's `RunEdits`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ipywidgets as ipw

from labkit.errors import LabkitError
from labkit.measure.run_record import RunRecord
from labkit.text import plain
from labkit.widgets.parts import TextLine

MAX_PINS = 5


class RunEditor:
    """A row of boxes and buttons for one run.

    Args:
        edits: the session's `RunEdits`; None where a session has none, then runs can be pinned only.
        on_change: called with the id of the run to choose next, None to keep the choice.

    Attributes:
        pins: ids of the runs that stay on top, in the order they were pinned.
    """

    def __init__(self, edits: Any, on_change: Callable[[str | None], None]) -> None:
        self._edits, self._on_change = edits, on_change
        self._run: RunRecord | None = None
        self._protected: tuple[str, ...] = ()
        self.pins: tuple[str, ...] = ()
        wide = {"description_width": "initial"}
        self.name = ipw.Text(description="name", continuous_update=False, style=wide)
        self.name.add_class("lk-name")
        self.note = ipw.Text(description="note", continuous_update=False, style=wide)
        self.pin = ipw.Button(description="Pin on top")
        self.lock = ipw.Button(description="Lock")
        self.delete = ipw.Button(description="Delete")
        self.undo = ipw.Button(description="Undo delete", disabled=True)
        self.earlier = ipw.Button(description="Earlier runs")
        self.earlier.layout.align_self = "flex-start"
        self.deltas = ipw.Checkbox(value=True, description="changes against the baseline", indent=False)
        self.status = TextLine(role="status")
        self.name.observe(self._renamed, "value")
        self.note.observe(self._annotated, "value")
        self.deltas.observe(lambda _: self._on_change(None), "value")
        for button, act in (
            (self.pin, self._pin), (self.lock, self._lock), (self.delete, self._delete), (self.undo, self._undo),
        ):  # fmt: skip
            button.on_click(lambda _, act=act: self._do(act))

    def view(self) -> ipw.VBox:
        """The row, hidden where no run is chosen."""
        edits = [self.name, self.note, self.lock, self.delete, self.undo] if self._edits is not None else []
        row = ipw.Box([*edits[:2], self.pin, *edits[2:], self.deltas])
        row.add_class("lk-bar")
        self._view = ipw.VBox([row, self.status])
        self._view.add_class("lk-column")
        return self._view

    def show(self, run: RunRecord | None, protected: tuple[str, ...]) -> None:
        """Show the chosen run; runs in `protected`, such as the baseline, cannot be deleted."""
        self._run, self._protected = None, protected
        empty = run is None and not (self._edits is not None and self._edits.num_deleted)
        self._view.layout.display = "none" if empty else ""
        self.name.value, self.note.value = (run.name, run.note) if run else ("", "")
        self.undo.disabled = self._edits is None or not self._edits.num_deleted
        for control in (self.name, self.note, self.pin, self.lock, self.delete):
            control.disabled = run is None
        if run is not None:
            self.pin.description = "Unpin" if run.run_id in self.pins else "Pin on top"
            self.lock.description = "Unlock" if self._is_locked(run) else "Lock"
        self._run = run

    def _is_locked(self, run: RunRecord) -> bool:
        return self._edits is not None and self._edits.is_locked(run.run_id)

    def marks_of(self, run_id: str, baseline_id: str | None) -> str:
        """What stands behind a run's name: "⚑ baseline", "◆ pinned", "locked"."""
        is_locked = self._edits is not None and self._edits.is_locked(run_id)
        marks = {"⚑ baseline": run_id == baseline_id, "◆ pinned": run_id in self.pins, "locked": is_locked}
        return " ".join(mark for mark, holds in marks.items() if holds)

    def _do(self, act: Callable[[], str | None]) -> None:
        self.status.say("")
        try:
            chosen = act()
        except LabkitError as error:
            self.status.say(str(error), "bad")
            return
        self._on_change(chosen)

    def _renamed(self, change: dict[str, Any]) -> None:
        run = self._run
        if run is not None and change["new"] != run.name:
            self._do(lambda: self._edits.rename(run.run_id, change["new"]))

    def _annotated(self, change: dict[str, Any]) -> None:
        run = self._run
        if run is not None and change["new"] != run.note:
            self._do(lambda: self._edits.annotate(run.run_id, change["new"]))

    def _pin(self) -> None:
        if self._run is None:
            return
        run_id = self._run.run_id
        if run_id in self.pins:
            self.pins = tuple(pin for pin in self.pins if pin != run_id)
        elif len(self.pins) < MAX_PINS:
            self.pins = (*self.pins, run_id)
        else:
            self.status.say(f"{MAX_PINS} runs are pinned; unpin one first", "warn")

    def _lock(self) -> None:
        if self._run is not None:
            self._edits.lock(self._run.run_id, not self._is_locked(self._run))

    def _delete(self) -> None:
        if self._run is None:
            return
        if self._run.run_id in (*self.pins, *self._protected):
            self.status.say(f"{plain(self._run.name, 60)} is pinned; unpin it first", "warn")
            return
        self._edits.delete(self._run.run_id)
        self.pins = tuple(pin for pin in self.pins if pin != self._run.run_id)

    def _undo(self) -> str | None:
        return self._edits.restore_last()
