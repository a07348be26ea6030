"""The panel's box for what a user brings along: a `vllm serve` command, settings, a server's log, an error line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import ipywidgets as ipw

from labkit.doctor.pasted import Pasted, read_pasted
from labkit.errors import LabkitError
from labkit.specs.engine_config import EngineConfig
from labkit.specs.gpu_spec import GpuSpec
from labkit.specs.knob_text import panel_command
from labkit.specs.model_spec import ModelSpec
from labkit.widgets.parts import DataTable, TextLine

COLUMNS = ["part", "log", "plan", ""]
MAX_CURES = 4
TAKE = "Take its settings"


class PasteBox:
    """A box, a button and the answer below it. Nothing in the text is run, and nothing leaves the machine.

    Args:
        model, gpu: what the panel works with.
        on_take: called with knob → value, for one step of undo.
    """

    def __init__(self, model: ModelSpec | None, gpu: GpuSpec | None, on_take: Callable[[Mapping[str, Any]], None]):
        self._model, self._gpu, self._on_take = model, gpu, on_take
        self._found: Pasted | None = None
        self.text = ipw.Textarea(
            placeholder="vllm serve …, docker run … vllm/vllm-openai …, block_size=32, a server's log, an error line",
            description="command, settings or log", rows=5, layout=ipw.Layout(width="100%"),
            style={"description_width": "initial"},
        )  # fmt: skip
        self.button = ipw.Button(description="Read it", button_style="primary")
        self.button.layout.align_self = "flex-start"
        self.answer = TextLine(role="status")
        self.cures = [TextLine(classes=("lk-advice",)) for _ in range(MAX_CURES)]
        self.table = DataTable(columns=COLUMNS, caption="Part by part, log beside plan")
        self.button.on_click(lambda _: self.read())
        self.answer.on_press(lambda _: self._take_settings())
        for index, line in enumerate(self.cures):
            line.on_press(lambda _, index=index: self._take_cure(index))  # type: ignore[misc]

    def view(self) -> ipw.VBox:
        """Top to bottom."""
        column = ipw.VBox([self.text, self.button, self.answer, *self.cures, self.table])
        column.add_class("lk-column")
        return column

    def read(self) -> Pasted | None:
        """Read the box, show the answer, and take over the settings of a command; None for a text of no kind."""
        try:
            self._found = found = read_pasted(self.text.value, self._model, self._gpu)
        except LabkitError as error:
            self._found = None
            self._show(None)
            self.answer.say(str(error), "bad")
            return None
        if found.kind in ("command", "settings") and found.settings:
            self._take_settings()
        self._show(found)
        return found

    def _show(self, found: Pasted | None) -> None:
        self.table.rows = [list(row) for row in found.rows] if found else []
        cures = found.cures if found else ()
        for index, line in enumerate(self.cures):
            cure = cures[index] if index < len(cures) else None
            line.say(cure.text if cure else "", buttons=["Apply"] if cure and cure.changes else [])
        if found is not None:
            buttons = [TAKE] if found.kind == "log" and found.settings else []
            command = self._other_panel(found)
            notes = [*found.notes, *([f"a panel for that model: {command}"] if command else [])]
            self.answer.say(found.sentence, found.level, details="\n".join(notes), buttons=buttons, copy=command,
                            folded=found.kind == "log", summary="notes")  # fmt: skip

    def _other_panel(self, found: Pasted) -> str:
        """The command that opens a panel for the model of a pasted command; "" where this panel has it."""
        if found.kind != "command" or not found.model or found.settings is None:
            return ""
        gpu = self._gpu.name if self._gpu is not None else ""
        return panel_command(EngineConfig(**found.settings), model=found.model, gpu=gpu)

    def _take_settings(self) -> None:
        if self._found is not None and self._found.settings:
            self._on_take(self._found.settings)

    def _take_cure(self, index: int) -> None:
        if self._found is not None and index < len(self._found.cures):
            self._on_take({**(self._found.settings or {}), **self._found.cures[index].changes})
