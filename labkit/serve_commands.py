"""`labkit explain-command` and `labkit diff`: pasted `vllm serve` commands, what they mean and how they differ."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from labkit.cli_options import AsJson, Gpu, Limit, Vllm
from labkit.errors import FileFormatError
from labkit.terminal import out, show_json, show_plan, show_table, warn_of_no_card
from labkit.text import plain

if TYPE_CHECKING:
    from labkit.advice.serve_command import ServeCommand

Command = Annotated[str, typer.Argument(help="A command that starts vLLM, in quotes; or a file that holds it.")]
OtherModel = Annotated[str | None, typer.Option("--model", help="Instead of the model that the command names.")]


def explain_command(
    command: Command, gpu: Gpu = "auto", model: OtherModel = None, vllm: Vllm = "0.33.0", as_json: AsJson = False
) -> None:
    """What a `vllm serve` or docker command means: its flags, what vLLM would refuse, and the memory plan."""
    from labkit.advice.command_diff import plan_command
    from labkit.memory.machine import plan_json
    from labkit.specs import load_gpu

    found = _read(command, vllm, model)
    plan = plan_command(found, load_gpu(gpu))
    if as_json:
        notes = {"given": dict(found.given), "not_planned": found.left_out, "refused": found.refused}
        show_json({"model": found.model, "vllm": found.version, **notes, "plan": plan_json(plan)})
        return
    _show_notes(found)
    warn_of_no_card(gpu, plan)
    show_plan(plan)


def diff(
    first: Command,
    second: Command,
    gpu: Gpu = "auto",
    model: OtherModel = None,
    vllm: Vllm = "0.33.0",
    workload: Annotated[str | None, typer.Option(help="A trace to simulate with each; for the rate.")] = None,
    limit: Limit = 128,
    as_json: AsJson = False,
) -> None:
    """Two commands side by side: each difference with what it does by itself, then all together."""
    from labkit.advice.command_diff import diff_commands
    from labkit.specs import load_gpu, load_workload

    commands = [_read(text, vllm, model) for text in (first, second)]
    traffic = load_workload(workload, limit=limit) if workload else None
    found = diff_commands(commands[0], commands[1], load_gpu(gpu), traffic)
    if as_json:
        show_json(found.to_dict())
        return
    for command in commands:
        _show_notes(command)
    if found.differences:
        rows = [[entry.what, entry.before, entry.after, entry.effect, entry.meaning] for entry in found.differences]
        show_table("Each by itself, on the first", ["flag", "first", "second", "effect", "what it is"], rows)
    out(found.sentence)


def _read(given: str, vllm: str, model: str | None) -> ServeCommand:
    from dataclasses import replace

    from labkit.advice.serve_command import MAX_TEXT, read_command

    text = given
    if "\n" not in given and len(given) < 4096 and Path(given).is_file():
        try:
            with Path(given).open(encoding="utf-8", errors="replace") as file:
                text = file.read(MAX_TEXT + 1)
        except OSError as error:
            raise FileFormatError(f"cannot read {plain(given)}: {error.strerror or error}") from error
    found = read_command(text, vllm)
    return replace(found, model=model) if model else found


def _show_notes(command: ServeCommand) -> None:
    for text in command.refused:
        out(f"vLLM {command.version} refuses: {text}")
    for text in command.left_out:
        out(f"note: {text}")
