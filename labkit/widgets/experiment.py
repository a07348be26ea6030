"""`BlockSizeExperiment`: one question with its buttons, its picture and its answer, for a notebook of its own."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import ipywidgets as ipw

from labkit.errors import LabkitError
from labkit.figures import tail_waste
from labkit.measure.run_record import RunRecord
from labkit.memory.records import MemoryPlan
from labkit.specs.engine_config import EngineConfig
from labkit.widgets.parts import Chart, DataTable, PlotlyLibrary, Screen, TextLine
from labkit.widgets.run_bar import RunBar
from labkit.widgets.run_control import Outcome, RunControl, RunView, SessionLike


class BlockSizeExperiment(ipw.VBox):
    """Runs the session's traffic once for each block size and says what the data say.

    Args:
        session: what runs; as for `Panel`.
        block_sizes: tokens of a block to begin with; the box on the screen takes others.
        repeats: how often each runs, there and back again, so that a machine that warms up or slows down favours none.
    """

    def __init__(self, session: SessionLike, block_sizes: Sequence[int] = (8, 16, 64), repeats: int = 2) -> None:
        self.session, self.repeats = session, repeats
        self.records: tuple[RunRecord, ...] = ()
        self._lock = threading.RLock()
        self._config: EngineConfig = getattr(session, "config", None) or EngineConfig()
        self.screen, self.bar, self.chart = Screen(), RunBar(), Chart()
        self.conclusion = TextLine(role="status", classes=("lk-answer",))
        self.table = DataTable(folded="the numbers as a table")
        self.bar.sweep_text.value = ", ".join(str(size) for size in block_sizes)
        self.control = RunControl(session, self)
        row = ipw.Box([self.bar.sweep, self.bar.cancel, self.bar.sweep_text])
        row.add_class("lk-bar")
        super().__init__([PlotlyLibrary(), self.screen, row, self.bar.status, self.conclusion, self.chart, self.table])
        self.add_class("lk-panel")
        self.bar.connect(sweep=self.run, cancel=self.cancel)
        self.screen.observe(lambda _: self._draw(), ["theme", "narrow"])
        self._draw()

    def run(self) -> None:
        """Run every block size in the box, in the background."""
        try:
            configs = [self._config.replace(**change) for change in self.bar.sweep_values()]
        except LabkitError as error:
            self.bar.status.say(str(error), "bad")
            return
        if not self.control.is_running:
            self.records = ()
            self.bar.set_running(True)
            self.control.start([config for turn in range(self.repeats) for config in configs[:: -1 if turn % 2 else 1]])

    def cancel(self) -> None:
        """End it; the block sizes that are finished stay."""
        self.control.cancel()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end; True where nothing runs any more."""
        return self.control.wait(timeout_s)

    def begin(self, plan: MemoryPlan, view: RunView) -> None:
        """A block size begins: what is finished is drawn."""
        if view.run_index:
            known = self.session.records()
            with self._lock:
                self.records = tuple(known[-view.run_index :])
                self._draw()

    def update(self, steps: Sequence[dict[str, Any]], view: RunView) -> None:
        """Progress of the run that goes on."""
        self.bar.show_progress(view, "")

    def end(self, outcome: Outcome) -> None:
        """All are over: the conclusion from what came out."""
        with self._lock:
            self.records = outcome.records
            self._draw()
            self.bar.show_outcome(outcome)
            self.bar.set_running(False)

    def _draw(self) -> None:
        with self._lock:
            info = tail_waste.get_tail_waste_info(self.records)
            sentence = tail_waste.caption(info)
            figure = tail_waste.draw_tail_waste(info, self.screen.theme, self.screen.narrow)
            self.chart.show(figure, sentence)
            self.table.show(tail_waste.table(info))
            self.conclusion.say(sentence)
