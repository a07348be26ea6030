"""The knobs as options of a command, made from `EngineConfig`, and the presets that fill those left open."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from labkit.specs.engine_config import EngineConfig, Knob

_PANEL = "Knobs, by vLLM's names"


def takes_knobs(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command` one option per knob of `EngineConfig`; it receives those that were set as `knobs`.

    With `--preset` a task's flags and traffic stand in for what the user did not say.
    """
    signature = inspect.signature(command, eval_str=True)
    own = [parameter for parameter in signature.parameters.values() if parameter.name != "knobs"]
    knobs = [knob for knob in EngineConfig.knobs() if knob.name not in signature.parameters]

    @functools.wraps(command)
    def wrapper(context: typer.Context, preset: str | None, **options: Any) -> None:
        given = {knob.name: options.pop(knob.name) for knob in knobs}
        given = {name: value for name, value in given.items() if value is not None}
        if preset is not None:
            options, given = _with_preset(preset, context, options, given)
        command(**options, knobs=given)

    keyword = inspect.Parameter.KEYWORD_ONLY
    text = "A task's flags and traffic where nothing else is said: a name of `labkit presets`."
    preset_option = Annotated[str | None, typer.Option("--preset", help=text)]
    wrapper.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[
            inspect.Parameter("context", keyword, annotation=typer.Context),
            *(parameter.replace(kind=keyword) for parameter in own),
            inspect.Parameter("preset", keyword, default=None, annotation=preset_option),
            *(inspect.Parameter(knob.name, keyword, default=None, annotation=_option(knob)) for knob in knobs),
        ]
    )
    return wrapper


def _with_preset(
    name: str, context: typer.Context, options: dict[str, Any], given: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options and knobs with what the preset says for those that the user left open.

    Raises:
        UnknownNameError: no such preset.
    """
    from labkit.specs import get_preset

    found = get_preset(name)
    traffic: dict[str, Any] = {"workload": found.workload, **found.take}
    said = {option for option in options if getattr(context.get_parameter_source(option), "name", "") == "COMMANDLINE"}
    filled = {option: value for option, value in traffic.items() if option in options and option not in said}
    return {**options, **filled}, {**found.knobs, **given}


def _option(knob: Knob) -> Any:
    flag = knob.flag or f"--{knob.name.replace('_', '-')}"
    names = f"{flag}/--no-{flag.removeprefix('--')}" if knob.kind is bool else flag
    text = f"{knob.help} [{knob.unit}]" if knob.unit else knob.help
    return Annotated[knob.kind | None, typer.Option(names, help=text, rich_help_panel=_PANEL)]
