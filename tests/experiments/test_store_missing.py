"""Who only reads makes no store: the error says where none is, and what is there."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from labkit import panel_notebook
from labkit.calibrate_command import from_runs
from labkit.cli import app
from labkit.errors import StoreError
from labkit.experiments.store import RunStore
from labkit.tune import report_of_runs


def files_of(folder) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


READERS = {
    "RunStore": lambda path: RunStore(path, must_exist=True),
    "report": lambda path: report_of_runs(out=path.parent / "report.html", store=path),
    "panel --run": lambda path: panel_notebook.of_run("some-run", str(path)),
    "calibrate": lambda path: from_runs(["some-run"], str(path)),
}


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_reading_makes_no_file_and_says_what_is_there(read, tmp_path):
    (tmp_path / "mine.sqlite3").write_bytes(b"")
    (tmp_path / "notes.txt").write_text("")
    before = files_of(tmp_path)
    with pytest.raises(StoreError) as raised:
        read(tmp_path / "mien.sqlite3")
    assert str(tmp_path / "mien.sqlite3") in str(raised.value)
    assert "in that folder: mine.sqlite3" in str(raised.value)
    assert "notes.txt" not in str(raised.value)
    assert files_of(tmp_path) == before


def test_a_folder_that_is_not_there_is_named_and_not_made(tmp_path):
    with pytest.raises(StoreError, match=r"the folder .*/nowhere does not exist"):
        RunStore(tmp_path / "nowhere" / "runs.sqlite3", must_exist=True)
    assert files_of(tmp_path) == []


def test_an_empty_file_is_no_store_and_stays_empty(tmp_path):
    path = tmp_path / "runs.sqlite3"
    path.touch()
    with pytest.raises(StoreError, match="no database is in that folder"):
        RunStore(path, must_exist=True)
    assert path.stat().st_size == 0


def test_a_long_list_is_cut(tmp_path):
    for number in range(8):
        (tmp_path / f"{number}.db").touch()
    with pytest.raises(StoreError, match=r"0\.db, 1\.db, 2\.db, 3\.db, 4\.db and 3 more"):
        RunStore(tmp_path / "runs.sqlite3", must_exist=True)


def test_another_database_without_the_tables_is_not_filled(tmp_path):
    with pytest.raises(StoreError, match="there is no store"):
        RunStore("sqlite://", must_exist=True)


def test_the_users_own_store_may_be_missing(monkeypatch, tmp_path):
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path))
    listed = CliRunner().invoke(app, ["runs"])
    assert listed.exit_code == 0
    assert "No run is stored yet" in listed.output
    assert str(tmp_path / "runs.sqlite3") in listed.output.replace("\n", "")
    with pytest.raises(StoreError, match="labkit run and labkit tune make it"):
        RunStore(must_exist=True)
    assert files_of(tmp_path) == []


def test_a_store_that_is_there_is_read(tmp_path):
    RunStore(tmp_path / "runs.sqlite3").close()
    assert RunStore(tmp_path / "runs.sqlite3", must_exist=True).list_runs() == ()


def test_a_folder_is_no_store(tmp_path):
    with pytest.raises(StoreError, match=r"is a folder .*runs\.sqlite3") as raised:
        RunStore(tmp_path)
    assert raised.value.knob == "store"
    assert files_of(tmp_path) == []
