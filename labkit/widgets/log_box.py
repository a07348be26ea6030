"""`LogBox`: paste a vLLM start-up or out-of-memory log, read which part is off, why, and what cures it."""

from __future__ import annotations

import ipywidgets

from labkit import format as shown
from labkit.doctor.error_text import explain_error_text
from labkit.errors import LabkitError
from labkit.memory.log_explanation import LogExplanation, explain_log
from labkit.memory.logs import read_log
from labkit.specs import load_gpu, load_model
from labkit.widgets.parts import DataTable, Screen, TextLine

COLUMNS = ["part", "log", "plan", ""]


class LogBox(ipywidgets.VBox):
    """A box for vLLM's own words and the answer below it.

    Nothing runs and nothing leaves the machine: the text is read in this process, within the reader's limits.

    Args:
        model: catalogue name, folder or config.json, where the log says too little.
        gpu: catalogue name, where the log says too little.
    """

    def __init__(self, model: str | None = None, gpu: str | None = None) -> None:
        self._model, self._gpu = model, gpu
        self.text = ipywidgets.Textarea(
            placeholder="Paste the server's output, from its start to the first request or to the error",
            layout=ipywidgets.Layout(width="100%", height="12em"),
        )
        self.button = ipywidgets.Button(description="Explain", button_style="primary")
        self.answer = TextLine(role="status")
        self.table = DataTable(columns=COLUMNS, caption="Part by part, log beside plan")
        self.button.on_click(lambda _: self.explain())
        super().__init__([Screen(), self.text, self.button, self.answer, self.table])
        self.add_class("lk-panel")

    def explain(self) -> LogExplanation | None:
        """Read the box and show the answer; the explanation, or None where the text could not be read."""
        try:
            model = load_model(self._model) if self._model else None
            gpu = load_gpu(self._gpu) if self._gpu else None
            found = explain_log(read_log(self.text.value), model, gpu)
        except LabkitError as error:
            self.table.rows = []
            self.answer.say(str(error), "bad")
            return None
        if found.cause == "not_vllm" and (known := explain_error_text(self.text.value)).exit_code == 2:
            self.table.rows = []
            self.answer.say(known.sentence, "bad", details="\n".join(f"fix: {check.fix}" for check in known.checks))
            return found
        cures = [f"cure: {cure.text}" for cure in found.cures]
        notes = [f"note: {note}" for note in found.notes]
        self.answer.say(
            found.answer, "warn" if found.cures else "ok", details="\n".join([*cures, *notes]), folded=False
        )
        self.table.rows = [
            [row.part, shown.memory(row.log_bytes), shown.memory(row.plan_bytes), "off" if row.is_off else ""]
            for row in found.rows
        ]
        return found
