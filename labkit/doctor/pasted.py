"""`read_pasted`: whatever a user pastes (a command, settings, a log, an error line) as settings and an answer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from labkit.advice.serve_command import ServeCommand, is_command, read_command
from labkit.doctor.error_text import explain_error_text
from labkit.errors import FileFormatError, LabkitError
from labkit.format import memory
from labkit.memory.log_explanation import Cure, LogExplanation, explain_log
from labkit.memory.logs import read_log
from labkit.specs import load_model
from labkit.specs.engine_config import EngineConfig
from labkit.specs.gpu_spec import GpuSpec
from labkit.specs.knob_text import config_from_text
from labkit.specs.model_spec import ModelSpec
from labkit.text import plain

# What describes the lab and not the server that the text speaks of.
LAB_KNOBS = ("cpu_memory_gib", "swap_space", "preemption_mode", "load_format")
_SETTINGS = re.compile(r"\s*(?:labkit panel\b|[a-z_]{3,40}=\S)")


@dataclass(frozen=True)
class Pasted:
    """What a text means.

    Attributes:
        kind: "command", "settings", "log" or "error".
        sentence: the answer; `level` "ok", "warn" or "bad" says how good it is.
        notes: further sentences, one a line.
        settings: knob → value that the text states, to be taken over; empty where it states none.
        model: the model that the text names where it is not the one asked about; "" otherwise.
        cures: changes that help, the smallest first.
        rows: part, log, plan and "off" of a log, as texts.
    """

    kind: str
    sentence: str
    level: str
    notes: tuple[str, ...] = ()
    settings: Mapping[str, Any] | None = None
    model: str = ""
    cures: tuple[Cure, ...] = ()
    rows: tuple[tuple[str, str, str, str], ...] = ()


def read_pasted(text: str, model: ModelSpec | None = None, gpu: GpuSpec | None = None) -> Pasted:
    """Tell what `text` is, and read it.

    Args:
        model, gpu: what the reader works with; a log that says too little is read with them.

    Raises:
        FileFormatError: there is no text, or the command in it cannot be read.
        LabkitError: settings that no knob takes.
    """
    if not text.strip():
        raise FileFormatError("there is no text", works="a vllm serve command, a log, or an error line")
    if _SETTINGS.match(text):
        config = config_from_text(text.strip())
        return Pasted("settings", _set_by(_differing(config)), "ok", settings=_without_lab(config))
    if is_command(text) and len(text.splitlines()) <= 100 and " INFO " not in text:
        return _command(read_command(text), model)
    found = explain_log(read_log(text), *_helped(text, model, gpu))
    return _error(text) if found.cause == "not_vllm" else _log(found)


def _helped(text: str, model: ModelSpec | None, gpu: GpuSpec | None) -> tuple[ModelSpec | None, GpuSpec | None]:
    """The reader's model and card where the log names none of its own."""
    record = read_log(text)
    own_card = gpu is not None and not gpu.is_cpu and not record.facts.get("total_bytes")
    return (None if record.model else model), (gpu if own_card else None)


def _command(command: ServeCommand, model: ModelSpec | None) -> Pasted:
    refused = [f"vLLM {command.version} refuses: {text}" for text in command.refused]
    other = command.model if model is not None and _is_other(command.model, model) else ""
    level = "warn" if refused or other else "ok"
    sentence = _set_by(command.given)
    if other:
        sentence += (
            f" The command serves {plain(other, 100)}; here the model is {plain(model.name if model else '', 100)}."
        )
    return Pasted(
        "command", sentence, level, (*refused, *command.left_out), _without_lab(command.config), other
    )  # fmt: skip


def _is_other(name: str, model: ModelSpec) -> bool:
    if not name:
        return False
    try:
        return load_model(name).name != model.name
    except LabkitError:
        return name.rpartition("/")[2].casefold() != model.name.rpartition("/")[2].casefold()


def _log(found: LogExplanation) -> Pasted:
    rows = tuple(
        (row.title, memory(row.log_bytes), memory(row.plan_bytes), "off" if row.is_off else "") for row in found.rows
    )
    settings = None if found.plan is None else dict(found.record.flags)
    return Pasted(
        "log", found.answer, "warn" if found.cures else "ok", found.notes, settings, found.record.model or "",
        found.cures, rows,
    )  # fmt: skip


def _error(text: str) -> Pasted:
    found = explain_error_text(text)
    known = [check for check in found.checks if check.status == "problem"]
    if not known:
        check = found.checks[0]
        return Pasted("error", f"{plain(check.evidence, 200)}: {check.cause}.", "warn", (f"try: {check.fix}",))
    notes = tuple(line for check in known for line in (f"{check.name}: {check.evidence}", f"fix: {check.fix}"))
    return Pasted("error", f"{known[0].cause}. Fix: {known[0].fix}.", "bad", notes)


def _without_lab(config: EngineConfig) -> dict[str, Any]:
    return {name: value for name, value in config.to_dict().items() if name not in LAB_KNOBS}


def _differing(config: EngineConfig) -> dict[str, Any]:
    return {name: new for name, (_, new) in EngineConfig().differences(config).items()}


def _set_by(given: Mapping[str, Any]) -> str:
    words = ", ".join(f"{name} {_word(value)}" for name, value in given.items())
    return f"Settings: {words}; everything else as vLLM has it." if words else "It sets no knob: vLLM's defaults."


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:,}" if isinstance(value, int) else str(value)
