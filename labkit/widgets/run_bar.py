"""The buttons of the panel, its status line, the command and the report."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ipywidgets as ipw

from labkit import format as fmt
from labkit.errors import LabkitError, OutOfRangeError
from labkit.experiments.run import MAX_COUNTED_STEPS
from labkit.figures import l2
from labkit.measure.summary import summarize
from labkit.specs.datasets import dataset_names
from labkit.specs.engine_config import EngineConfig
from labkit.specs.knob_text import parse_knob
from labkit.text import plain
from labkit.widgets.parts import TextLine
from labkit.widgets.run_control import Outcome, RunView

SWEEPS = {
    "block_size": "8, 16, 32, 64",
    "max_num_seqs": "4, 16, 64",
    "max_num_batched_tokens": "256, 1024, 4096",
    "kv_cache_dtype": "auto, fp8",
    "enable_prefix_caching": "on, off",
    "enable_chunked_prefill": "on, off",
}
MAX_SWEEP = 50
DEFAULT_COUNTED_STEPS = 3


class RunBar:
    """Buttons and lines; what they do is connected by the panel.

    Args:
        can_count: runs are on a card, whose counters can be asked for.
        virtual_card: name of a card that is not here and on which runs can be simulated; "" for none.
    """

    def __init__(self, can_count: bool = False, virtual_card: str = "") -> None:
        places = [(f"a virtual {virtual_card} (simulated)", True)] if virtual_card else []
        self.is_virtual = ipw.Dropdown(
            options=[*places, ("this machine's CPU", False)], description="on", style={"description_width": "initial"}
        )
        self.run = ipw.Button(description="Run", button_style="primary")
        self.cancel = ipw.Button(description="Cancel", disabled=True)
        self.sweep = ipw.Button(description="Sweep")
        self.sweep_knob = ipw.Dropdown(options=list(SWEEPS), description="over", style={"description_width": "initial"})
        self.sweep_text = ipw.Text(value=SWEEPS["block_size"], description="values",
                                   style={"description_width": "initial"})  # fmt: skip
        self.report = ipw.Button(description="Report")
        self.command = ipw.Button(description="Copy command")
        self.settings = ipw.Button(description="Copy settings")
        self.pin = ipw.Button(description="Pin as baseline")
        self.paste = ipw.ToggleButton(
            description="Paste …", tooltip="a vllm serve command, settings, a log or an error"
        )
        self.status = TextLine(role="status")
        self.command_line = TextLine(classes=("lk-command",))
        self.counted_steps = ipw.BoundedIntText(
            value=DEFAULT_COUNTED_STEPS if can_count else 0, min=0, max=MAX_COUNTED_STEPS,
            description="counted steps", style={"description_width": "initial"},
            tooltip="decode steps to count with the card's counters after the timed ones",
        )  # fmt: skip
        self._can_count = can_count
        self.sweep_knob.observe(self._prefill, "value")

    def view(self) -> ipw.VBox:
        """Buttons in a row that wraps, the lines below."""
        counted = [self.counted_steps] if self._can_count else []
        place = [self.is_virtual] if len(self.is_virtual.options) > 1 else []
        row = ipw.Box([self.run, *place, self.cancel, *counted, self.sweep, self.sweep_knob, self.sweep_text,
                       self.report, self.command, self.settings, self.paste, self.pin])  # fmt: skip
        row.add_class("lk-bar")
        column = ipw.VBox([row, self.status, self.command_line])
        column.add_class("lk-column")
        return column

    def connect(self, **handlers: Callable[[], None]) -> None:
        """Call the handler named like a button when that is pressed."""
        for name, handle in handlers.items():
            getattr(self, name).on_click(lambda _, call=handle: call())

    def _prefill(self, change: dict[str, Any]) -> None:
        self.sweep_text.value = SWEEPS[change["new"]]

    def sweep_values(self) -> list[dict[str, Any]]:
        """One change of settings for each value that the user typed.

        Raises:
            LabkitError: a value that the knob does not take; nothing or too much to run.
        """
        knob = next(entry for entry in EngineConfig.knobs() if entry.name == self.sweep_knob.value)
        words = [word.strip() for word in self.sweep_text.value.split(",") if word.strip()]
        if not 1 <= len(words) <= MAX_SWEEP:
            raise OutOfRangeError(
                f"a sweep takes 1 to {MAX_SWEEP} values, separated by commas", works="8, 16, 32", knob=knob.name
            )
        return [{knob.name: parse_knob(knob, word)} for word in words]

    def set_running(self, running: bool) -> None:
        """Run and Sweep rest while a run is in progress; Cancel only then acts."""
        self.run.disabled = self.sweep.disabled = running
        self.cancel.disabled = not running

    def show_progress(self, view: RunView, live_words: str) -> None:
        """Phase, count, elapsed and remaining time, then the live numbers."""
        now = time.monotonic()
        head = f"Run {view.run_index + 1} of {view.num_runs}, " if view.num_runs > 1 else ""
        words = f"{head}{'cancelling' if view.cancelling else view.phase}"
        if view.unit:
            words += f": {fmt.progress(view.done, view.total, view.unit)}"
        words += f", {fmt.duration(round(view.elapsed_s(now), 1))} elapsed"
        words += f", about {fmt.duration(round(view.left_s, 1))} left" if view.left_s is not None else ""
        in_all_s = view.left_in_all_s(now)
        words += f" ({fmt.duration(round(in_all_s, 1))} for all)" if in_all_s is not None else ""
        share = view.done / view.total if view.unit and view.total else None
        self.status.say(f"{words}. {live_words}".strip(), progress=share, details="\n".join(view.log), summary="log",
                        role="")  # fmt: skip

    def show_outcome(self, outcome: Outcome) -> None:
        """How it ended, in words; what came out stays."""
        kept = f" {fmt.count(len(outcome.records))} finished before it are kept." if len(outcome.records) > 1 else ""
        if outcome.error is not None:
            log = outcome.details or self.status.details
            details = "\n".join(line for line in (log, f"explained in {outcome.error.section}") if line)
            self.status.say(f"{outcome.error}.{kept}", "bad", details=details, summary="details", role="status")
        elif outcome.cancelled:
            steps = sum(len(record.steps) for record in outcome.records[-1:])
            self.status.say(f"Cancelled; {fmt.count(steps)} steps are kept.", "warn", role="status")
        else:
            is_virtual = any(record.origin == "simulated" for record in outcome.records)
            number, word = len(outcome.records), "simulation" if is_virtual else "run"
            runs = f"{fmt.count(number)} {word}{'s' * (number != 1)}"
            counted, notes = _counted(outcome)
            words = f"{runs} finished{_numbers(outcome)}.{counted}"
            self.status.say(words, role="status", details=notes, summary="why it was not measured" if notes else "")

    def show_command(self, make: Callable[[], str]) -> None:
        """The command in a line that can be copied; or why there is none."""
        try:
            command = make()
        except LabkitError as error:
            self.command_line.say(str(error), "bad")
            return
        self.command_line.say(
            "The same settings for vLLM:", details=command, summary="command", copy=command, folded=False
        )

    def show_settings(self, text: str, traffic: Any = None) -> None:
        """The settings as a command for a shell, which `Panel.from_text` takes as well.

        Args:
            traffic: what runs; of it the command carries the name alone, and the line says what that lacks.
        """
        lacks = _beyond_its_name(traffic)
        without = f"; it lacks {' and '.join(lacks)}" if lacks else ""
        words = f"The panel as it stands, for a shell or Panel.from_text{without}:"
        self.command_line.say(words, details=text, summary="settings", copy=text, folded=False)

    def show_report(self, make: Callable[[], Any] | None) -> None:
        """Write the report in a thread of its own and say its path."""
        if make is None:
            self.command_line.say("This session cannot write a report.", "warn")
            return
        self.command_line.say("writing the report …")
        threading.Thread(target=self._write, args=(make,), name="labkit-report", daemon=True).start()

    def _write(self, make: Callable[[], Any]) -> None:
        try:
            path = make()
        except LabkitError as error:
            self.command_line.say(f"No report: {error}", "bad")
        # The thread has nobody to raise to; the cause belongs on the screen.
        except Exception as error:
            self.command_line.say(f"No report: {type(error).__name__}: {plain(error, 200)}", "bad")
        else:
            path = Path(path).resolve()
            self.command_line.say(f"Report written: {path}", copy=str(path))


def _beyond_its_name(traffic: Any) -> list[str]:
    """What the name of a traffic does not say: the folder of a file, and what was cut."""
    name, cuts = getattr(traffic, "name", ""), getattr(traffic, "steps", ())
    folder = [f"the folder of {plain(name, 60)}"] if name and name not in dataset_names() else []
    return [*folder, *([f"the traffic's cuts ({'; '.join(plain(cut, 80) for cut in cuts)})"] if cuts else [])]


def _numbers(outcome: Outcome) -> str:
    if len(outcome.records) != 1:
        return ""
    numbers = summarize(outcome.records[0])
    first = f", first token {fmt.duration(numbers.ttft_s.p95)} at p95" if numbers.ttft_s else ""
    seconds = " of the virtual card" if outcome.records[0].origin == "simulated" else ", measured"
    return f" in {fmt.duration(numbers.duration_s)}{seconds}: {fmt.rate(numbers.output_tokens_per_s)}{first}"


def _counted(outcome: Outcome) -> tuple[str, str]:
    """Cache and DRAM of a single run with their method, and why a better method did not count."""
    counters = outcome.records[0].counters if len(outcome.records) == 1 else None
    # A CPU's run has the counters of a card that it did not use: they stand in their own tab only.
    if counters is None or (outcome.records[0].gpu.is_cpu and not counters.method.startswith("measured")):
        return "", ""
    return f" {l2.sentence(counters)}", "\n".join(outcome.records[0].counter_notes)
