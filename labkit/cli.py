"""The command line: `labkit plan · run · tune · report · runs · models · gpus · traces · bench`.

Commands read options, call one function of a lower room and print; the knobs' options are made from `EngineConfig`,
so command line, panel and docs share one text.
"""

from __future__ import annotations

import functools
import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
from rich.console import Console
from rich.table import Table

from labkit.errors import LabkitError
from labkit.specs.engine_config import EngineConfig, Knob

app = typer.Typer(
    help="labkit: a laboratory for the memory of LLM serving.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench_app = typer.Typer(help="Benchmarks; each writes a file under results/.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")
console = Console(highlight=False)
errors = Console(stderr=True, highlight=False)

Model = Annotated[str, typer.Option("--model", help="Catalogue name, hub id, folder, config.json or GGUF file.")]
Gpu = Annotated[str, typer.Option("--gpu", help="Catalogue name, 'auto' for this machine's card, or 'cpu'.")]
Trace = Annotated[str, typer.Option("--workload", help="A trace of `labkit traces` or a trace file.")]
Store = Annotated[Optional[str], typer.Option("--store", help="SQLAlchemy URL of the run store.")]


def main() -> None:
    """Run the command line; labkit's own errors become one message and exit code 2."""
    try:
        app()
    except LabkitError as error:
        errors.print(f"labkit: {error}", style="red", markup=False)
        sys.exit(2)
    except KeyboardInterrupt:
        errors.print("labkit: interrupted; what was finished is kept (see `labkit runs`)")
        sys.exit(130)


def takes_knobs(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command` one option per knob of `EngineConfig`; it receives those that were set as `knobs`."""
    signature = inspect.signature(command)
    own = [parameter for parameter in signature.parameters.values() if parameter.name != "knobs"]
    knobs = [knob for knob in EngineConfig.knobs() if knob.name not in {parameter.name for parameter in own}]

    @functools.wraps(command)
    def wrapper(**options: Any) -> None:
        given = {knob.name: options.pop(knob.name) for knob in knobs}
        command(**options, knobs={name: value for name, value in given.items() if value is not None})

    keyword = inspect.Parameter.KEYWORD_ONLY
    wrapper.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[
            *(parameter.replace(kind=keyword) for parameter in own),
            *(inspect.Parameter(knob.name, keyword, default=None, annotation=_option(knob)) for knob in knobs),
        ]
    )
    return wrapper


def _option(knob: Knob) -> Any:
    flag = knob.flag or f"--{knob.name.replace('_', '-')}"
    names = f"{flag}/--no-{flag.removeprefix('--')}" if knob.kind is bool else flag
    unit = f" [{knob.unit}]" if knob.unit else ""
    help_text = f"{knob.help}{unit}"
    return Annotated[Optional[knob.kind], typer.Option(names, help=help_text, rich_help_panel="Knobs (vLLM's names)")]


def show_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """Print rows of text as a table; nothing in a cell is taken for markup."""
    from rich.text import Text

    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)


def show_json(value: Any) -> None:
    """Print one JSON document, nothing else, to standard output."""
    sys.stdout.write(json.dumps(value, indent=2, sort_keys=False) + "\n")
