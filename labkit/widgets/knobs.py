"""The knobs of the panel: one widget a knob, the settings they make together, undo and redo."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ipywidgets as ipw
import traitlets as t

from labkit.errors import LabkitError
from labkit.figures.next_steps import StepGain, help_lines, neighbours, shown
from labkit.memory.records import MemoryPlan
from labkit.specs.engine_config import EngineConfig, Knob
from labkit.specs.knob_text import parse_knob
from labkit.specs.presets import preset, presets
from labkit.widgets.parts import Part, TextLine

GROUPS: Mapping[str, tuple[str, ...]] = {
    "Memory": (
        "gpu_memory_utilization",
        "cpu_memory_gib",
        "block_size",
        "kv_cache_dtype",
        "max_model_len",
        "swap_space",
    ),
    "Batching": ("max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill", "enable_prefix_caching"),
    "Engine": ("enforce_eager", "preemption_mode", "dtype"),
}
MAX_HISTORY = 200


class KnobControl(Part):
    """One knob: a typed box or a list, a step down and up, its default, its errors, its help.

    `value` is the setting, None for "auto"; setting it from Python is the same as typing it.
    """

    name = t.Unicode().tag(sync=True)
    unit = t.Unicode().tag(sync=True)
    choices = t.List(t.Unicode()).tag(sync=True)
    shown = t.Unicode().tag(sync=True)
    typed = t.Dict().tag(sync=True)
    default_text = t.Unicode().tag(sync=True)
    gains = t.List(t.Unicode()).tag(sync=True)
    error = t.Unicode().tag(sync=True)
    help = t.List(t.Unicode()).tag(sync=True)
    changed = t.Bool(False).tag(sync=True)
    can_step = t.Dict({"down": True, "up": True}).tag(sync=True)
    value = t.Any(None, allow_none=True)

    def __init__(self, knob: Knob, value: Any) -> None:
        self._typing_error = self._said = ""
        self.knob, self._resolved, self._default = knob, value, getattr(EngineConfig(), knob.name)
        choices = ["on", "off"] if knob.kind is bool else list(knob.choices)
        super().__init__(kind="knob", name=knob.name, unit=knob.unit, choices=choices, value=value,
                         shown=self._text(value), default_text=self._default_text(),
                         help=list(help_lines(knob, None)), changed=value != self._default)  # fmt: skip
        self.observe(self._take_typed, "typed")
        self.on_press(self._step)

    @t.validate("value")
    def _checked(self, proposal: Mapping[str, Any]) -> Any:
        return self.knob.check(proposal["value"])

    @t.observe("value")
    def _show_value(self, change: Mapping[str, Any]) -> None:
        with self.hold_sync():
            self._typing_error = ""
            self.shown = self._text(self.value)
            self.say("")
            self.changed = self.value != self._default

    def _default_text(self) -> str:
        return f"{'vLLM' if self.knob.flag else 'default'}: {shown(self._default)}"

    def _text(self, value: Any) -> str:
        return shown(value).replace(",", "")

    def _take_typed(self, change: Mapping[str, Any]) -> None:
        self._typing_error = ""
        try:
            self.value = parse_knob(self.knob, str(change["new"].get("text", "")))
        except LabkitError as error:
            self._typing_error = error.message
        self._show_error()

    def say(self, error: str) -> None:
        """Show `error` beside the knob, or nothing for ""; a typed text that was refused stays in front of it."""
        self._said = error
        self._show_error()

    def _show_error(self) -> None:
        self.error = self._typing_error or self._said

    def _step(self, direction: str) -> None:
        target = neighbours(self.knob, self._resolved).get(direction)
        if target is not None:
            self.value = target

    def show_plan(self, plan: MemoryPlan) -> None:
        """Take over what the plan made of the setting: what "auto" became, the help with its numbers."""
        self._resolved = getattr(plan.config, self.knob.name)
        near = [name for name, value in neighbours(self.knob, self._resolved).items() if value != self.value]
        default = self._default_text()
        if self.value is None and self._resolved is not None:
            default += f" → {shown(self._resolved)}"
        with self.hold_sync():
            self.default_text = default
            self.help = list(help_lines(self.knob, plan))
            self.can_step = {name: name in near for name in ("down", "up")}

    def show_gains(self, gains: Sequence[StepGain]) -> None:
        """Say what a step down and a step up would buy."""
        self.gains = [gain.words for gain in gains]


class KnobSet:
    """All knobs of a panel. `on_change(config)` is called once for each change, however many knobs it moves."""

    def __init__(self, config: EngineConfig, *, is_cpu: bool, on_change: Callable[[EngineConfig], None]) -> None:
        by_name = {knob.name: knob for knob in EngineConfig.knobs()}
        # Runs are on the CPU even where a card is planned for, so its memory is a knob there too.
        hidden = {"gpu_memory_utilization"} if is_cpu else set()
        self._on_change, self._config = on_change, config
        self._past: list[EngineConfig] = []
        self._future: list[EngineConfig] = []
        self.controls: dict[str, KnobControl] = {}
        self.groups: dict[str, list[KnobControl]] = {}
        for title, names in GROUPS.items():
            made = {name: KnobControl(by_name[name], getattr(config, name)) for name in names if name not in hidden}
            self.controls |= made
            self.groups[title] = list(made.values())
        for control in self.controls.values():
            control.observe(self._moved, "value")
        self.undo_button = ipw.Button(description="Undo", disabled=True)
        self.redo_button = ipw.Button(description="Redo", disabled=True)
        self.reset_button = ipw.Button(description="vLLM defaults")
        self.baseline_button = ipw.Button(description="Baseline's settings", disabled=True)
        self.presets = ipw.Dropdown(options=[("…", ""), *((entry.title, entry.name) for entry in presets())], value="",
                                    description="preset", style={"description_width": "initial"})  # fmt: skip
        self.presets.observe(self._take_preset, "value")
        self.undo_button.on_click(lambda _: self.undo())
        self.redo_button.on_click(lambda _: self.redo())
        self.reset_button.on_click(lambda _: self.reset())

    @property
    def config(self) -> EngineConfig:
        """The settings as they stand, None where left to the rules."""
        return self._config

    def view(self) -> ipw.VBox:
        """The knobs in their groups, with undo, redo and reset above."""
        buttons = ipw.HBox([self.undo_button, self.redo_button, self.reset_button, self.baseline_button, self.presets])
        buttons.add_class("lk-bar")
        children: list[ipw.Widget] = [buttons]
        for title, controls in self.groups.items():
            children += [TextLine(text=title, classes=("lk-title",)), *controls]
        column = ipw.VBox(children)
        column.add_class("lk-column")
        return column

    def set(self, **changes: Any) -> None:
        """Move several knobs as one step of undo.

        Raises:
            LabkitError: an unknown knob or a value outside its range; nothing is moved then.
        """
        self._take(self._config.replace(**changes))

    def _take_preset(self, change: Mapping[str, Any]) -> None:
        if change["new"]:
            self._take(preset(change["new"], self._config))

    def undo(self) -> None:
        """Back to the settings before the last change; nothing where there was none."""
        if self._past:
            self._future.append(self._config)
            self._show(self._past.pop())

    def redo(self) -> None:
        """Forward again after `undo`."""
        if self._future:
            self._past.append(self._config)
            self._show(self._future.pop())

    def reset(self) -> None:
        """All shown knobs to vLLM's defaults; what no knob shows stays. The CPU's memory is no setting of vLLM."""
        defaults = EngineConfig().to_dict()
        self._take(self._config.replace(**{name: defaults[name] for name in self.controls if name != "cpu_memory_gib"}))

    def take(self, config: EngineConfig) -> None:
        """All settings of `config`, as one step of undo."""
        self._take(config)

    def show_error(self, error: LabkitError) -> bool:
        """Say `error` beside the knob it names; False where it names none that is shown."""
        control = self.controls.get(error.knob or "")
        if control is None:
            return False
        control.say(f"{error.message}. Would work: {error.works}" if error.works else error.message)
        return True

    def clear_errors(self) -> None:
        """Remove what was said beside the knobs."""
        for control in self.controls.values():
            control.say("")

    def _moved(self, change: Mapping[str, Any]) -> None:
        self._take(self._config.replace(**{change["owner"].knob.name: change["new"]}))

    def _take(self, config: EngineConfig) -> None:
        if config == self._config:
            return
        self._past = [*self._past, self._config][-MAX_HISTORY:]
        self._future.clear()
        self._show(config)

    def _show(self, config: EngineConfig) -> None:
        # Set first: a control that moves then finds its value in the settings already, and reports no change.
        self._config = config
        for name, control in self.controls.items():
            control.value = getattr(config, name)
        self.undo_button.disabled, self.redo_button.disabled = not self._past, not self._future
        self._on_change(config)
