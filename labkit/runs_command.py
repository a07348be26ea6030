"""`labkit runs`: the store's runs as a list, one of them exported, and its trash."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from labkit.cli_options import Store
from labkit.format import count
from labkit.terminal import out, show_table
from labkit.text import plain

if TYPE_CHECKING:
    from labkit.experiments import RunStore


def runs_command(
    store: Store = None,
    limit: Annotated[int, typer.Option(min=1)] = 30,
    export_json: Annotated[str | None, typer.Option(help="Id of a run to print as JSON.")] = None,
    export_parquet: Annotated[str | None, typer.Option(help="Id of a run to write as Parquet files.")] = None,
    folder: Annotated[Path, typer.Option(help="Where Parquet files go.")] = Path("."),
    delete: Annotated[str | None, typer.Option(help="Id of a run to move to the trash.")] = None,
    restore: Annotated[str | None, typer.Option(help="Id of a run to take back from the trash.")] = None,
    trash: Annotated[bool, typer.Option("--trash", help="List what is in the trash.")] = False,
    empty_trash: Annotated[bool, typer.Option("--empty-trash", help="Remove what is in the trash for good.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before that.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Read every run and say what is damaged.")] = False,
) -> None:
    """List the runs of the store, newest first; export, delete or restore one; empty the trash; check them all."""
    from labkit.experiments import RunStore
    from labkit.experiments import export_parquet as write_parquet
    from labkit.experiments.export import to_json
    from labkit.experiments.store_tables import own_store_path

    asked = export_json or export_parquet or delete or restore
    if store is None and not asked and not own_store_path().exists():
        out(f"No run is stored yet. labkit run and labkit tune make {own_store_path()}.")
        return
    opened = RunStore(store, must_exist=True)
    if export_json:
        sys.stdout.write(to_json(opened.get(export_json)) + "\n")
    elif export_parquet:
        for path in write_parquet(opened.get(export_parquet), folder):
            out(str(path))
    elif delete:
        opened.delete(delete)
        out(f"{plain(delete, 80)} is in the trash; --restore takes it back, --empty-trash removes it for good")
    elif restore:
        opened.restore(restore)
        out(f"{plain(restore, 80)} is back")
    elif empty_trash:
        _empty_trash(opened, yes)
    elif check:
        _check(opened)
    else:
        _list(opened, limit, trash)


def _list(store: RunStore, limit: int, trash: bool) -> None:
    entries = store.list_runs(trashed=trash)[:limit]
    rows = [
        [
            entry.run_id,
            entry.name,
            entry.created[:16].replace("T", " "),
            entry.status,
            entry.record.model.name,
            entry.record.gpu.name,
        ]
        for entry in entries
    ]
    where = f"the trash of {store.location}" if trash else store.location
    show_table(f"{_runs(len(rows))} in {where}", ["id", "name", "made", "status", "model", "GPU"], rows, whole=["id"])
    for sentence in () if trash else store.unreadable():
        out(f"note: {sentence}")


def _empty_trash(store: RunStore, yes: bool) -> None:
    num_runs = store.num_trashed()
    if num_runs == 0:
        out(f"The trash of {store.location} is empty.")
        return
    if not yes:
        typer.confirm(f"Remove {_runs(num_runs)} of {store.location} for good?", abort=True)
    store.empty_trash()
    out(f"{_runs(num_runs)} removed")


def _check(store: RunStore) -> None:
    problems = store.check()
    for problem in problems:
        out(problem)
    if problems:
        raise typer.Exit(1)
    out(f"all of {store.location} can be read")


def _runs(number: int) -> str:
    return f"{count(number)} run{'s' * (number != 1)}"
