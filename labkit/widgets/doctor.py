"""`DoctorPanel`: this machine's checks in the notebook, and a box for an error text."""

from __future__ import annotations

from collections.abc import Callable

import ipywidgets

from labkit.doctor.check import COLUMNS, Examination
from labkit.doctor.error_text import explain_error_text
from labkit.doctor.machine import AnyMachine, Machine
from labkit.doctor.run import examine
from labkit.doctor.which_vllm import find_vllm
from labkit.errors import LabkitError
from labkit.widgets.parts import DataTable, Screen, TextLine

_LEVELS = ("ok", "warn", "bad")


class DoctorPanel(ipywidgets.VBox):
    """Buttons that look, a sentence that answers, and the checks as a table with cause and fix.

    Nothing on the machine is changed: a fix is shown as text.

    Args:
        machine: what is looked at; this machine by default.
    """

    def __init__(self, machine: AnyMachine | None = None) -> None:
        self._machine = machine or Machine()
        self.answer = TextLine(role="status", classes=("lk-answer",))
        self.table = DataTable(columns=list(COLUMNS), caption="Checks, the worst first")
        self.text = ipywidgets.Textarea(
            placeholder="Paste an error line or a whole log", layout=ipywidgets.Layout(width="100%", height="6em")
        )
        self.look = self._button("Look at this machine", lambda: examine(self._machine))
        self.which = self._button("Which vLLM runs here?", lambda: find_vllm(self._machine))
        self.explain = self._button("What is this error?", lambda: explain_error_text(self.text.value))
        buttons = ipywidgets.Box([self.look, self.which, self.explain])
        buttons.add_class("lk-bar")
        super().__init__([Screen(), buttons, self.text, self.answer, self.table])
        self.add_class("lk-panel")

    def _button(self, title: str, examination: Callable[[], Examination]) -> ipywidgets.Button:
        button = ipywidgets.Button(description=title, layout=ipywidgets.Layout(width="auto"))
        button.on_click(lambda _: self._answer(examination))
        return button

    def _answer(self, examination: Callable[[], Examination]) -> None:
        try:
            self.show(examination())
        except LabkitError as error:
            self.table.rows = []
            self.answer.say(str(error), "bad")

    def show(self, found: Examination) -> None:
        """Show an examination, of whatever kind."""
        self.table.rows = found.rows()
        self.answer.say(found.sentence, _LEVELS[found.exit_code])


def doctor_panel(machine: AnyMachine | None = None) -> DoctorPanel:
    """The panel, with this machine already looked at."""
    panel = DoctorPanel(machine)
    panel.look.click()
    return panel
