"""Runs of an earlier session come back from the store: by Python, by the panel's button, by `labkit panel --run`."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from pathlib import Path

import pytest
from typer.testing import CliRunner

import labkit
from labkit.cli import app
from labkit.errors import StoreError
from labkit.experiments import RunStore
from labkit.panel_notebook import of_run
from labkit.specs.engine_config import EngineConfig
from labkit.widgets import Panel
from tests.widgets.fake_session import FakeSession


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> str:
    """A store with two simulated runs of Qwen3-8B on an A10 and one of another model."""
    path = str(tmp_path_factory.mktemp("store") / "runs.sqlite3")
    traffic = labkit.load_workload("azure-2023-conv", limit=3, max_input_tokens=64, max_output_tokens=8)
    for model, sizes in (("Qwen/Qwen3-8B", (16, 32)), ("Qwen/Qwen3-0.6B", (16,))):
        with labkit.Session(model, "A10", traffic, store=path) as session:
            for size in sizes:
                session.simulate(EngineConfig(max_model_len=2048, block_size=size))
    return path


def broken_copy(store: str, folder: Path, statement: str) -> tuple[Path, str, str]:
    """A copy of the store whose older run of Qwen3-8B `statement` has broken, that run's id and the other's."""
    copy = folder / "runs.sqlite3"
    copy.write_bytes(Path(store).read_bytes())
    with labkit.Session("Qwen/Qwen3-8B", "A10", store=str(copy)) as session:
        older, newer = (run.run_id for run in session.recall())
    with contextlib.closing(sqlite3.connect(copy)) as database:
        database.execute(statement, (older,))
        database.commit()
    return copy, older, newer


def test_a_new_session_recalls_runs_of_its_model_and_card(store):
    with labkit.Session("Qwen/Qwen3-8B", "A10", store=store) as session:
        assert session.records() == ()
        found = session.recall()
        assert [run.config.block_size for run in found] == [16, 32], "oldest first, in one second too"
        assert session.recall() == ()
        assert {run.run_id for run in session.records()} == {run.run_id for run in found}
        assert all(run.steps for run in found), "the whole run comes back"
        with pytest.raises(StoreError, match="no run 'nowhere'"):
            session.recall(["nowhere"])
    with labkit.Session("Qwen/Qwen3-8B", "A10", store=store) as session:
        assert session.recall(found[0].run_id) == found[:1]
    with labkit.Session("Qwen/Qwen3-8B", "A10", store=store) as session:
        assert session.recall(limit=1) == found[1:], "the newest"
        assert session.recall(limit=1) == found[:1], "then the one before"


def test_the_button_brings_them_into_the_table(store):
    with labkit.Session("Qwen/Qwen3-8B", "A10", store=store) as session:
        panel = Panel(session, EngineConfig(max_model_len=2048))
        panel.editor.earlier.click()
        assert len(panel.runs.rows) == 2
        assert panel.run_bar.status.text == "2 earlier runs of this model on this card or machine."
        panel.editor.earlier.click()
        assert panel.run_bar.status.text == "No earlier run is stored."
        panel.settle()
    other = Panel(FakeSession())
    assert other.editor.earlier not in other.pictures.tabs_view((other.runs,)).children
    other.settle()


def test_a_run_of_another_version_is_named_and_hides_no_other(store, tmp_path):
    copy, old, kept = broken_copy(store, tmp_path, "UPDATE runs SET head = '{}' WHERE run_id = ?")
    with labkit.Session("Qwen/Qwen3-8B", "A10", store=str(copy)) as session:
        panel = Panel(session, EngineConfig(max_model_len=2048))
        panel.editor.earlier.click()
        assert [run.run_id for run in session.records()] == [kept]
        assert panel.run_bar.status.level == "warn"
        assert f"run {old} in" in panel.run_bar.status.details
        panel.settle()
    listed = CliRunner().invoke(app, ["runs", "--store", str(copy)])
    assert listed.exit_code == 0
    assert f"note: run {old} in" in listed.output.replace("\n", " ")


def test_a_run_whose_rows_are_damaged_is_named_and_the_others_come_back(store, tmp_path):
    copy, damaged, kept = broken_copy(
        store, tmp_path, "UPDATE run_rows SET payload = '[[1' WHERE run_id = ? AND kind = 'step'"
    )
    with labkit.Session("Qwen/Qwen3-8B", "A10", store=str(copy)) as session:
        with pytest.warns(UserWarning, match=f"run {damaged} in .* cannot be read"):
            assert [run.run_id for run in session.recall()] == [kept]
        events = []
        assert session.recall([damaged, kept], on_event=events.append) == ()
        assert [(event["type"], event["level"]) for event in events] == [("log", "warning")]
    with labkit.Session("Qwen/Qwen3-8B", "A10", store=str(copy)) as session:
        assert len(session.recall(limit=1, on_event=events.append)) == 1, "a damaged one takes no other's place"
    with labkit.Session("Qwen/Qwen3-8B", "A10", store=str(copy)) as session:
        panel = Panel(session, EngineConfig(max_model_len=2048))
        panel.editor.earlier.click()
        assert panel.run_bar.status.text.startswith("1 earlier run ")
        assert f"run {damaged} in" in panel.run_bar.status.details
        panel.settle()
    report = CliRunner().invoke(app, ["report", damaged, kept, "--store", str(copy), "--out", str(tmp_path / "r.html")])
    assert report.exit_code == 0, report.output
    assert f"run {damaged} in" in report.output.replace("\n", " ")


def test_labkit_panel_opens_a_stored_run(store, tmp_path):
    with labkit.Session("Qwen/Qwen3-8B", "A10", store=store) as session:
        run = session.recall()[-1]
    path = tmp_path / "p.ipynb"
    done = CliRunner().invoke(
        app, ["panel", "--run", run.run_id, "--store", store, "--out", str(path), "--no-start"]
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    cell = "".join(json.loads(path.read_text())["cells"][0]["source"])
    assert f"session.recall(['{run.run_id}'])" in cell
    assert f"model='Qwen/Qwen3-8B', gpu='A10', workload=traffic, store={store!r}" in cell
    assert f"block_size={run.config.block_size}" in cell or run.config.block_size == 16
    missing = CliRunner().invoke(app, ["panel", "--run", "nowhere", "--store", store, "--no-start"])
    assert "no run 'nowhere'" in str(missing.exception)


def test_a_card_of_ones_own_is_found_again_by_its_file(store, tmp_path):
    file = tmp_path / "RTX A6000.json"
    file.write_text(json.dumps({"planned_total_mib": 48540, "mem_bandwidth_gb_s": 768, "bf16_dense_tflops": 155}))
    traffic = labkit.load_workload("azure-2023-conv", limit=3, max_input_tokens=64, max_output_tokens=8)
    own = str(tmp_path / "own.sqlite3")
    with labkit.Session("Qwen/Qwen3-8B", str(file), traffic, store=own) as session:
        run = session.simulate(EngineConfig(max_model_len=2048))
        panel = Panel(session, EngineConfig(max_model_len=2048))
        assert f"--gpu='{file}'" in panel.text
        report = session.report(tmp_path / "r.html").read_text()
        panel.settle()
    assert str(file) in report
    assert of_run(run.run_id, own)["gpu"] == str(file)
    assert RunStore(own).get(run.run_id).gpu == labkit.load_gpu(file)
