"""What commands share: the options that several take, and the knobs as options, made from `EngineConfig`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from labkit.errors import OutOfRangeError
from labkit.specs.engine_config import EngineConfig, Knob
from labkit.specs.knob_text import parse_knob

_PANEL = "Knobs, by vLLM's names"
DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
DEFAULT_TRACE = "azure-2023-conv"

Model = Annotated[str, typer.Option("--model", help="Catalogue name, hub id, folder, config.json or GGUF file.")]
Gpu = Annotated[str, typer.Option("--gpu", help="Catalogue name, 'auto' for this machine's card, or 'cpu'.")]
Card = Annotated[str, typer.Option("--gpu", help="A card of `labkit gpus`; it need not be here.")]
Trace = Annotated[str, typer.Option("--workload", help="A trace of `labkit traces`, or a trace file.")]
Limit = Annotated[int, typer.Option("--limit", help="Requests to take from the trace.", min=1)]
MaxInput = Annotated[int | None, typer.Option("--max-input-tokens", help="Clip prompts to this length.", min=1)]
MaxOutput = Annotated[int | None, typer.Option("--max-output-tokens", help="Clip outputs to this length.", min=1)]
Store = Annotated[str | None, typer.Option("--store", help="File or SQLAlchemy URL of the run store.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
Vllm = Annotated[str, typer.Option("--vllm", help="vLLM's version, 0.6 to 0.33.")]


def takes_traffic(limit: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options that say which requests it serves; it receives them as `traffic`.

    Args:
        limit: how many of the trace by default.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)

        @functools.wraps(command)
        def wrapper(workload: str, limit: int, **options: Any) -> None:
            from labkit.specs import load_workload

            sizes = {name: options.pop(name) for name in ("max_input_tokens", "max_output_tokens")}
            command(**options, traffic=load_workload(workload, limit=limit, **sizes))

        own = [parameter for parameter in signature.parameters.values() if parameter.name != "traffic"]
        at = list(signature.parameters).index("traffic")
        own[at:at] = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=option)
            for name, option, default in (
                ("workload", Trace, DEFAULT_TRACE), ("limit", Limit, limit), ("max_input_tokens", MaxInput, None),
                ("max_output_tokens", MaxOutput, None),
            )
        ]  # fmt: skip
        keyword = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
        wrapper.__signature__ = signature.replace(parameters=keyword)  # type: ignore[attr-defined]
        return wrapper

    return decorate


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
        typed = {knob.name: (knob, given[knob.name]) for knob in knobs if given[knob.name] is not None}
        given = {name: _value(knob, value) for name, (knob, value) in typed.items()}
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


def _value(knob: Knob, value: Any) -> Any:
    """What an option says; nothing is no value, since it mostly comes of a shell variable that is not set.

    Raises:
        OutOfRangeError: the knob does not take it.
    """
    if knob.kind is bool:
        return value
    if not value.strip():
        raise OutOfRangeError(f"{_flag(knob)} has no value", works="a value, or no such option", knob=knob.name)
    return parse_knob(knob, value)


def _flag(knob: Knob) -> str:
    return knob.flag or f"--{knob.name.replace('_', '-')}"


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
    flag = _flag(knob)
    text = f"{knob.help} In {knob.unit}." if knob.unit else knob.help
    if knob.kind is bool:
        names = f"{flag}/--no-{flag.removeprefix('--')}"
        return Annotated[bool | None, typer.Option(names, help=text, rich_help_panel=_PANEL)]
    # Numbers come as text, so that 8k and auto mean what vLLM's own command line means by them.
    return Annotated[
        str | None, typer.Option(flag, help=text, metavar=f"<{knob.kind.__name__}>", rich_help_panel=_PANEL)
    ]
