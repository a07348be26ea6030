"""`Panel`: the lab on one screen. It reads and sets widgets; every number comes from the rooms below."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import ipywidgets as ipw

from labkit import format as fmt
from labkit.advice.advise import Advice, advise, headline, leads_with
from labkit.advice.command import vllm_command
from labkit.advice.follow_up import Applied, follow_up
from labkit.advice.limit import binding_limit
from labkit.advice.load_study import LoadStudy, SpeedBook, check_goal, study_load
from labkit.errors import LabkitError
from labkit.figures import compare, live, run_table
from labkit.figures.next_steps import get_next_steps_info
from labkit.figures.runs import distinctly_named
from labkit.figures.tables import Table
from labkit.measure.run_record import RunRecord
from labkit.memory.records import MemoryPlan
from labkit.specs.engine_config import EngineConfig
from labkit.specs.knob_text import config_from_text, panel_command
from labkit.specs.presets import Preset, get_preset, preset_traffic
from labkit.specs.workload import Workload
from labkit.text import plain
from labkit.widgets.advice_view import AdviceView
from labkit.widgets.knobs import KnobSet
from labkit.widgets.parts import DataTable, PlotlyLibrary, Screen, TextLine
from labkit.widgets.paste_box import PasteBox
from labkit.widgets.pictures import Look, Pictures
from labkit.widgets.run_bar import RunBar
from labkit.widgets.run_control import Outcome, RunControl, RunView, SessionLike
from labkit.widgets.run_edit import RunEditor
from labkit.widgets.run_place import place_note, virtual_card

LIVE_POINTS = 400
GAINS_DELAY_S = 0.15
PLANS_KEPT = 512


class Panel(ipw.VBox):
    """Knobs, memory bar, charts and runs of one session; shows itself as the last line of a cell.

    Args:
        session: a `labkit.Session`, or anything that is a `SessionLike`.
        config: settings to begin with; the session's, else vLLM's defaults, where None.

    Attributes:
        knobs: `panel.knobs["block_size"].value = 32` is the same as turning the knob.
        plan: the plan of the settings as they stand; None while they cannot be planned.
    """

    def __init__(self, session: SessionLike, config: EngineConfig | None = None) -> None:
        self.session = session
        self.plan: MemoryPlan | None = None
        # A step's gains and the advice ask for the same neighbours over and over, and a turned knob for one of them.
        self._plan_of = functools.lru_cache(PLANS_KEPT)(session.plan)
        self._lock = threading.RLock()
        self._generation = 0
        self._advice: tuple[Advice, ...] = ()
        self._study: LoadStudy | None = None
        self._book = SpeedBook(session.workload) if isinstance(session.workload, Workload) else None
        self._applied: Applied | None = None
        self._task: Preset | None = None
        self._live = live.LiveRun(LIVE_POINTS)
        self._records: tuple[RunRecord, ...] = ()
        self._named: tuple[RunRecord, ...] = ()
        self._chosen_id: str | None = None
        self._baseline_id: str | None = None
        self._gains_thread: threading.Thread | None = None
        self.screen, self.answer = Screen(), TextLine(role="status", classes=("lk-answer",))
        self.stale = TextLine(classes=("lk-stale",))
        self.advice_view = AdviceView()
        config = config or getattr(session, "config", None) or EngineConfig()
        self.knob_set = KnobSet(config, is_cpu=session.gpu.is_cpu, on_change=self._replan)
        self.pictures, self.run_bar = (
            Pictures(),
            RunBar(getattr(session, "runs_on_card", False), virtual_card(session)),
        )
        self.runs = DataTable(
            classes=("lk-runs",), selectable=True, empty_text="No run yet: press Run to try these settings."
        )
        self.editor = RunEditor(getattr(session, "edits", None), self._edited)
        self.compared, self.compared_table = TextLine(), DataTable(folded="the two runs as a table")
        self.paste_box = PasteBox(session.model, session.gpu, lambda settings: self.knob_set.set(**settings))
        self.note = TextLine(text=place_note(session), classes=("lk-caption",))
        self.task_line = TextLine(classes=("lk-caption",))
        self.control = RunControl(session, self)
        super().__init__(self._layout())
        self.add_class("lk-panel")
        self._connect()
        self.refresh()
        self.pictures.show_live(self._live.info())

    @property
    def knobs(self) -> dict[str, Any]:
        """The knob widgets by vLLM's names."""
        return self.knob_set.controls

    @property
    def config(self) -> EngineConfig:
        """The settings as they stand, None where left to the rules."""
        return self.knob_set.config

    def _layout(self) -> list[ipw.Widget]:
        knobs = self.knob_set.view()
        knobs.add_class("lk-area-knobs")
        memory = self.pictures.memory_view(self.advice_view.widgets())
        earlier = [self.editor.earlier] if hasattr(self.session, "recall") else []
        runs = (self.runs, *earlier, self.editor.view(), self.compared, self.compared_table)
        tabs = self.pictures.tabs_view(runs)
        main = ipw.Box([memory, knobs, tabs])
        main.add_class("lk-main")
        paste = self.paste_box
        paste.layout.display = "none"
        self.run_bar.paste.observe(lambda now: setattr(paste.layout, "display", "" if now["new"] else "none"), "value")
        return [PlotlyLibrary(), self.screen, self.answer, self.run_bar.view(), paste, self.note, self.task_line,
                self.stale, main]  # fmt: skip

    def _connect(self) -> None:
        bar, pictures = self.run_bar, self.pictures
        bar.connect(run=self.run, cancel=self.cancel, sweep=self.sweep, report=self.report,
                    command=self.show_command, settings=self.show_settings, pin=self.pin)  # fmt: skip
        pictures.tabs.observe(lambda _: self._draw_tab(), "value")
        pictures.view.observe(lambda _: self._draw_tab(), "value")
        pictures.chart.on_run_click(self.choose)
        self.runs.observe(self._row_chosen, "selected")
        self.screen.observe(self._relook, ["theme", "narrow"])
        bar.counted_steps.observe(self._count_steps, "value")
        self.session.counted_steps = bar.counted_steps.value
        self.answer.on_press(lambda _: self.apply(0))
        self.knob_set.baseline_button.on_click(lambda _: self.take_baseline())
        self.knob_set.presets.observe(self._task_chosen, "value")
        self.task_line.on_press(lambda _: self.use_traffic())
        self.advice_view.on_apply(self.apply)
        self.editor.earlier.on_click(lambda _: self.recall())

    # settings

    def _replan(self, config: EngineConfig) -> None:
        with self._lock:
            self._generation += 1
            try:
                plan = self._plan_of(config)
            except LabkitError as error:
                self._show_plan_error(error)
                return
            self.plan, self._study = plan, None
            self.knob_set.clear_errors()
            self._show_plan(plan)
            for control in self.knobs.values():
                control.show_plan(plan)
        self._gains_later()

    def _show_plan_error(self, error: LabkitError) -> None:
        self.plan, self._advice, self._study = None, (), None
        self.knob_set.show_error(error)
        self.answer.say(str(error), "bad", heading=self._subject(), details=error.section, summary="explained in")
        self.stale.say("The memory bar shows the last settings that could be planned.", "warn")
        self.advice_view.show(())

    def _show_plan(self, plan: MemoryPlan) -> None:
        record = self._matching(plan)
        self.pictures.show_memory(plan, record, self._by_id(self._baseline_id))
        study = self._study
        self._advice = study.advice if study else advise(plan, self._plan_of, record=record)
        limit = study.limit if study else binding_limit(plan, record)
        best = self._advice[0] if self._advice else None
        level = {"fits": "ok", "may not fit": "warn"}.get(plan.verdict, "bad")
        leads = leads_with(limit, best)
        self.answer.say(headline(plan, limit, best), level, heading=self._subject(), buttons=["Apply"] if leads else [])
        if plan.verdict == "does not fit" and plan.max_model_len_that_fits > 0:
            self.knobs["max_model_len"].say(f"largest that fits: {fmt.count(plan.max_model_len_that_fits)} tokens")
        self._show_task()
        self.advice_view.show(self._advice, study, first=int(leads))
        self.advice_view.show_follow_up(follow_up(self._applied, self._records) if self._applied else None)
        self._show_stale(plan)

    def _show_stale(self, plan: MemoryPlan) -> None:
        chosen = self._by_id(self._chosen_id)
        would_run = plan.config if chosen is None or chosen.origin == "simulated" else self._would_run(plan)
        differing = chosen.plan.config.differences(would_run) if chosen else {}
        if not differing:
            self.stale.say("")
            return
        names = ", ".join(differing)
        self.stale.say(f"The results shown are for other settings ({names}): press Run, or Undo.", "warn")

    def _would_run(self, plan: MemoryPlan) -> EngineConfig:
        """The resolved settings of a run: the CPU engine's, which resolves "auto" otherwise than a card's plan."""
        run_plan = getattr(self.session, "run_plan", None)
        if run_plan is None or self.session.gpu.is_cpu:
            return plan.config
        try:
            return run_plan(self.config).config
        except LabkitError:
            return plan.config

    def _task_chosen(self, change: dict[str, Any]) -> None:
        self._task = get_preset(change["new"]) if change["new"] else None
        self._show_task()

    def _show_task(self) -> None:
        """The chosen task's goal, whether the settings reach it, and its traffic."""
        task = self._task
        if task is None:
            self.task_line.say("")
            return
        text = f"{task.title}: {task.reason}. Goal: {task.goal_words}."
        own = self._is_traffic_of(task)
        if self._study and own:
            found = check_goal(task, self._study.speed)
            self.task_line.say(f"{text} These settings: {found.sentence}.", "ok" if found.is_met else "warn")
            return
        self.task_line.say(text, buttons=[] if own else [f"Use its traffic: {task.workload}"])

    def _is_traffic_of(self, task: Preset) -> bool:
        return getattr(self.session.workload, "name", "") == task.workload

    def use_traffic(self) -> None:
        """Take the traffic of the chosen task instead of the session's."""
        if self._task is None:
            return
        traffic = preset_traffic(self._task.name)
        with self._lock:
            self.session.workload, self._book = traffic, SpeedBook(traffic)
        self._replan(self.config)

    def _subject(self) -> str:
        names = (self.session.model.name, self.session.gpu.name, getattr(self.session.workload, "name", ""))
        return " · ".join(plain(name, 120) for name in names if name)

    def apply(self, index: int) -> None:
        """Set the knobs of advice `index` (0 is the one in the answer); one step of undo."""
        if index < len(self._advice) and self.plan is not None:
            advice, before = self._advice[index], self.config
            self._applied = Applied(advice, before, before.replace(**advice.changes), self.plan)
            self.knob_set.set(**advice.changes)

    def _gains_later(self) -> None:
        generation = self._generation
        self._gains_thread = threading.Thread(target=self._show_gains, args=(generation,), daemon=True)
        self._gains_thread.start()

    def _show_gains(self, generation: int) -> None:
        threading.Event().wait(GAINS_DELAY_S)
        for control in self.knobs.values():
            with self._lock:
                if generation != self._generation or self.plan is None:
                    return
                control.show_gains(get_next_steps_info(control.knob, self.plan, self.config, self._plan_of))
        self._study_traffic(generation)

    def _study_traffic(self, generation: int) -> None:
        """The limit and the advice on the session's traffic, simulated while nobody turns a knob."""
        plan, book = self.plan, self._book
        if plan is None or book is None:
            return
        found = study_load(
            plan, self.session.workload, self._plan_of, record=self._matching(plan), book=book,
            is_stale=lambda: generation != self._generation,
        )  # fmt: skip
        with self._lock:
            if found is not None and generation == self._generation:
                self._study = found
                self._show_plan(plan)
                self._draw_tab()

    def settle(self, timeout_s: float = 10.0) -> None:
        """Wait until what follows a change in the background is on the screen."""
        if self._gains_thread is not None:
            self._gains_thread.join(timeout_s)

    # runs

    def run(self) -> None:
        """Run the settings as they stand."""
        self._start([self.config])

    def _count_steps(self, change: dict[str, Any]) -> None:
        self.session.counted_steps = change["new"]

    def sweep(self) -> None:
        """Run the chosen knob's values one after another."""
        try:
            changes = self.run_bar.sweep_values()
            configs = [self.config.replace(**change) for change in changes]
        except LabkitError as error:
            self.run_bar.status.say(str(error), "bad")
            return
        self._start(configs)

    def _start(self, configs: Sequence[EngineConfig]) -> None:
        if self.control.is_running:
            return
        with self._lock:
            self.run_bar.set_running(True)
            self.run_bar.status.say("starting", role="status")
            is_virtual = self.run_bar.is_virtual.value
            # A simulation is over before anything could be watched.
            if not is_virtual:
                self.pictures.tabs.value = "Live"
            elif self.pictures.tabs.value == "Live":
                self.pictures.tabs.value = "KV over time"
        if not self.control.start(configs, getattr(self.session, "simulate", None) if is_virtual else None):
            self.run_bar.set_running(self.control.is_running)

    def cancel(self) -> None:
        """End the run in progress; what it measured so far is kept."""
        self.control.cancel()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end of the runs; True where none is in progress."""
        return self.control.wait(timeout_s)

    def close_parts(self) -> None:
        """End what runs and take every widget off the page; the session stays open."""
        self.cancel()
        self.wait()
        waiting: list[ipw.Widget] = [self]
        while waiting:
            widget = waiting.pop()
            waiting += getattr(widget, "children", ())
            widget.close()

    def begin(self, plan: MemoryPlan, view: RunView) -> None:
        """A run begins: the live chart starts empty."""
        with self._lock:
            self._live = live.LiveRun(LIVE_POINTS)

    def update(self, steps: Sequence[dict[str, Any]], view: RunView) -> None:
        """Steps were made: live chart, numbers and progress."""
        with self._lock:
            for step in steps:
                self._live.add(step)
            info = self._live.info()
            if steps:
                self.pictures.show_live(info)
            self.run_bar.show_progress(view, live.caption(info) if info.running.x else "")

    def end(self, outcome: Outcome) -> None:
        """All runs are over: table, charts, and the error if there was one, said in words."""
        with self._lock:
            self.refresh(chosen=outcome.records[-1].run_id if outcome.records else None)
            self.run_bar.show_outcome(outcome)
            if outcome.error is not None:
                self.knob_set.show_error(outcome.error)
            self.run_bar.set_running(False)

    # what is shown

    def refresh(self, chosen: str | None = None) -> None:
        """Read the session's runs again and redraw everything."""
        with self._lock:
            self._records = tuple(self.session.records())
            self._named = distinctly_named(self._records)
            if chosen is not None or self._by_id(self._chosen_id) is None:
                self._chosen_id = chosen or (self._records[-1].run_id if self._records else None)
            self._draw_runs()
            self._draw_tab()
            self._replan(self.config)

    def choose(self, run_id: str) -> None:
        """Show the run `run_id`: its row, its charts, whether it fits the settings."""
        with self._lock:
            if self._by_id(run_id) is None:
                return
            self._chosen_id = run_id
            self._draw_runs()
            self._draw_tab()
            if self.plan is not None:
                self._show_plan(self.plan)

    def pin(self) -> None:
        """Make the chosen run the baseline; again, to have none."""
        with self._lock:
            self._baseline_id = None if self._baseline_id == self._chosen_id else self._chosen_id
            self._draw_runs()
            if self.plan is not None:
                self._show_plan(self.plan)

    def recall(self) -> None:
        """Bring earlier runs of this model and card from the store into the table."""
        damaged: list[str] = []
        try:
            recall = getattr(self.session, "recall", None)
            found: Sequence[RunRecord] = (
                recall(on_event=lambda event: damaged.append(event["message"])) if recall else ()
            )
        except LabkitError as error:
            self.run_bar.status.say(str(error), "bad")
            return
        runs = f"{fmt.count(len(found))} earlier run{'s' * (len(found) != 1)}"
        words = f"{runs} of this model on this card or machine." if found else "No earlier run is stored."
        store = getattr(self.session, "store", None)
        lost = "\n".join([*damaged, *(store.unreadable() if store is not None else ())])
        self.run_bar.status.say(words, "warn" if lost else "ok", details=lost, summary="runs that cannot be read")
        if found:
            self.refresh()

    def take_baseline(self) -> None:
        """All knobs to the settings of the baseline, one step of undo; nothing where none is pinned."""
        baseline = self._by_id(self._baseline_id)
        if baseline is not None:
            self.knob_set.take(baseline.config)

    def _edited(self, chosen: str | None) -> None:
        self.refresh(chosen=chosen)

    def show_command(self) -> None:
        """The `vllm serve` command of the settings, ready to copy."""
        model = getattr(self.session, "source", "") or self.session.model.name
        self.run_bar.show_command(lambda: vllm_command(model, self.config))

    def show_settings(self) -> None:
        """The settings as text, ready to copy."""
        self.run_bar.show_settings(self.text, self.session.workload)

    @property
    def text(self) -> str:
        """Model, card, traffic and settings as one command for a shell; `from_text` takes it as well."""
        session = self.session
        model = getattr(session, "source", "") or session.model.name
        traffic = getattr(session.workload, "name", "")
        return panel_command(self.config, model=model, gpu=session.gpu.lookup, workload=traffic)

    @classmethod
    def from_text(cls, session: SessionLike, text: str) -> Panel:
        """A panel with the settings of `text`, as "Copy settings" gives it.

        Raises:
            LabkitError: a knob that this version does not have, or a value that it does not take; says which.
        """
        return cls(session, config_from_text(text))

    def report(self) -> None:
        """Write the report of the session and say where it lies."""
        make: Callable[[], Any] | None = getattr(self.session, "report", None)
        self.run_bar.show_report(make)

    def _row_chosen(self, change: dict[str, Any]) -> None:
        if 0 <= change["new"] < len(self._records):
            self.choose(self._records[change["new"]].run_id)

    def _draw_runs(self) -> None:
        editor, baseline = self.editor, self._baseline_id
        info = run_table.get_run_table_info(self._named, baseline, editor.pins, deltas=editor.deltas.value)
        ids = [row.run_id for row in info.rows]
        with self.runs.hold_sync():
            self.runs.show(run_table.table(info), run_table.sort_keys(info))
            self.runs.pinned = list(info.pinned)
            self.runs.marks = [editor.marks_of(run_id, baseline) for run_id in ids]
            self.runs.selected = ids.index(self._chosen_id) if self._chosen_id in ids else -1
        editor.show(self._by_id(self._chosen_id), (baseline,) if baseline else ())
        self.knob_set.baseline_button.disabled = self._by_id(baseline) is None
        self._draw_comparison()

    def _draw_comparison(self) -> None:
        baseline, chosen = self._by_id(self._baseline_id), self._by_id(self._chosen_id)
        if baseline is None or chosen is None or baseline is chosen:
            self.compared.say("")
            self.compared_table.show(Table((), ()))
            return
        info = compare.get_compare_info(baseline, chosen)
        self.compared.say(compare.caption(info))
        self.compared_table.show(compare.table(info))

    def _draw_tab(self) -> None:
        with self._lock:
            simulated = self._study.speed.record if self._study else None
            chosen = next((record for record in self._named if record.run_id == self._chosen_id), None)
            self.pictures.show_tab(self._named, chosen, simulated)
            self.pictures.show_live(self._live.info())

    def _relook(self, change: dict[str, Any]) -> None:
        with self._lock:
            self.pictures.look = Look(self.screen.theme, self.screen.narrow)
            self._draw_tab()
            if self.plan is not None:
                self._show_plan(self.plan)

    def _by_id(self, run_id: str | None) -> RunRecord | None:
        return next((record for record in self._records if record.run_id == run_id), None)

    def _matching(self, plan: MemoryPlan) -> RunRecord | None:
        def is_same(record: RunRecord) -> bool:
            mine = (record.plan.config, record.model, record.gpu)
            return mine == (plan.config, plan.model, plan.gpu) and record.measured is not None

        return next((record for record in reversed(self._records) if is_same(record)), None)
