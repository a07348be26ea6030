"""Runs in the shell: listed, exported as JSON and Parquet, reported."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sqlite3

import pandas as pd
import pytest
from example_runs import example_record
from typer.testing import CliRunner

from labkit import cli
from labkit.errors import StoreError
from labkit.experiments import RunStore, import_json

# Details of a plan are the planner's own; these runs carry none.
RECORD = dataclasses.replace(example_record(), plan=dataclasses.replace(example_record().plan, details={}))


def run(*arguments: str):
    done = CliRunner().invoke(cli.app, list(arguments))
    assert done.exit_code == 0, done.output
    return done


@pytest.fixture
def store(tmp_path) -> str:
    path = tmp_path / "runs.sqlite3"
    with contextlib.closing(RunStore(path)) as opened:
        opened.save(RECORD)
    return str(path)


def test_runs_are_listed_with_id_and_status(store):
    listed = run("runs", "--store", store).stdout
    assert "1 run in" in listed
    assert RECORD.run_id[:10] in listed
    assert "finished" in listed
    assert "\x1b" not in listed


def test_an_id_that_is_not_there_is_named(store):
    with pytest.raises(StoreError, match="no-such-run"):
        CliRunner().invoke(cli.app, ["runs", "--store", store, "--export-json", "no-such-run"], catch_exceptions=False)


def test_json_on_standard_output_is_the_run_and_nothing_else(store, tmp_path):
    text = run("runs", "--store", store, "--export-json", RECORD.run_id).stdout
    json.loads(text)
    (tmp_path / "run.json").write_text(text)
    assert import_json(tmp_path / "run.json") == RECORD


def test_parquet_files_hold_every_row(store, tmp_path):
    said = run("runs", "--store", store, "--export-parquet", RECORD.run_id, "--folder", str(tmp_path)).stdout
    rows = [len(pd.read_parquet(line)) for line in said.split() if line.endswith(".parquet")]
    assert sorted(rows) == sorted([len(RECORD.requests), len(RECORD.steps)])


def test_a_deleted_run_is_in_the_trash_until_that_is_emptied(store):
    assert "in the trash" in run("runs", "--store", store, "--delete", RECORD.run_id).stdout
    assert "0 runs in" in run("runs", "--store", store).stdout
    assert "1 run in the trash of" in run("runs", "--store", store, "--trash").stdout.replace("\n", " ")
    run("runs", "--store", store, "--restore", RECORD.run_id)
    assert "1 run in" in run("runs", "--store", store).stdout
    assert "is empty" in run("runs", "--store", store, "--empty-trash").stdout.replace("\n", " ")
    run("runs", "--store", store, "--delete", RECORD.run_id)
    asked = CliRunner().invoke(cli.app, ["runs", "--store", store, "--empty-trash"], input="n\n")
    assert asked.exit_code == 1
    assert "Remove 1 run of" in asked.output
    assert run("runs", "--store", store, "--empty-trash", "--yes").stdout == "1 run removed\n"
    with contextlib.closing(RunStore(store)) as opened:
        assert opened.list_runs(trashed=True) == opened.list_runs() == ()


def test_a_damaged_run_is_found_by_checking(store):
    assert "can be read" in run("runs", "--store", store, "--check").stdout
    with contextlib.closing(sqlite3.connect(store)) as database:
        database.execute("UPDATE run_rows SET payload = '[[1' WHERE kind = 'step'")
        database.commit()
    checked = CliRunner().invoke(cli.app, ["runs", "--store", store, "--check"])
    assert checked.exit_code == 1
    assert f"run {RECORD.run_id} in" in checked.output.replace("\n", " ")


def test_a_report_of_stored_runs(store, tmp_path):
    target = tmp_path / "report.html"
    said = run("report", "--store", store, "--out", str(target)).stdout
    assert str(target) in said.replace("\n", "")
    assert target.read_text().startswith("<!DOCTYPE html>")
