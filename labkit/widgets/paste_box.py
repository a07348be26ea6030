"""`PasteBox`: what a user brings along (a `vllm serve` command, settings, a server's log, an error line), read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import ipywidgets as ipw

from labkit.doctor.pasted import Pasted, read_pasted
from labkit.errors import LabkitError
from labkit.specs import load_gpu, load_model
from labkit.specs.engine_config import EngineConfig
from labkit.specs.gpu_spec import GpuSpec
from labkit.specs.knob_text import panel_command
from labkit.specs.model_spec import ModelSpec
from labkit.widgets.parts import DataTable, Screen, TextLine

COLUMNS = ["part", "log (measured)", "plan (predicted)", "apart"]
MAX_CURES = 4
TAKE = "Take its settings"


class PasteBox(ipw.VBox):
    """A box, a button and the answer below it. Nothing in the text is run, and nothing leaves the machine.

    `PasteBox()` as the last line of a cell explains texts; the panel's own sets its knobs as well.

    Args:
        model, gpu: what to read a text with that says too little; a spec, or a name as `load_model` takes it.
        on_take: called with knob → value, for one step of undo; None where there are no knobs to set.
    """

    def __init__(
        self, model: ModelSpec | str | None = None, gpu: GpuSpec | str | None = None,
        on_take: Callable[[Mapping[str, Any]], None] | None = None,
    ) -> None:  # fmt: skip
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
        super().__init__([Screen(), self.text, self.button, self.answer, *self.cures, self.table])
        for name in ("lk-panel", "lk-column"):
            self.add_class(name)

    def read(self) -> Pasted | None:
        """Read the box, show the answer, and take over the settings of a command; None for a text of no kind."""
        try:
            self._found = found = read_pasted(self.text.value, self._model_spec(), self._gpu_spec())
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
            can_apply = cure is not None and cure.changes and self._on_take is not None
            line.say(cure.text if cure else "", buttons=["Apply"] if can_apply else [])
        if found is not None:
            can_take = bool(found.settings) and self._on_take is not None
            buttons = [TAKE] if can_take and found.kind == "log" else []
            taken = "Taken over. " if can_take and found.kind in ("command", "settings") else ""
            command = self._other_panel(found)
            notes = [*found.notes, *([f"a panel for that model: {command}"] if command else [])]
            self.answer.say(taken + found.sentence, found.level, details="\n".join(notes), buttons=buttons,
                            copy=command, folded=found.kind == "log", summary="notes")  # fmt: skip

    def _other_panel(self, found: Pasted) -> str:
        """The command that opens a panel for the model of a pasted command; "" where this panel has it."""
        if found.kind != "command" or not found.model or found.settings is None:
            return ""
        gpu = self._gpu_spec()
        return panel_command(EngineConfig(**found.settings), model=found.model, gpu=gpu.name if gpu else "")

    def _model_spec(self) -> ModelSpec | None:
        return load_model(self._model) if isinstance(self._model, str) else self._model

    def _gpu_spec(self) -> GpuSpec | None:
        return load_gpu(self._gpu) if isinstance(self._gpu, str) else self._gpu

    def _take_settings(self) -> None:
        if self._on_take is not None and self._found is not None and self._found.settings:
            self._on_take(self._found.settings)

    def _take_cure(self, index: int) -> None:
        if self._on_take is not None and self._found is not None and index < len(self._found.cures):
            self._on_take({**(self._found.settings or {}), **self._found.cures[index].changes})
