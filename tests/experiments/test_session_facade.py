"""`labkit.Session`: sweep, report and panel on top of the laboratory session, and names that load on first use."""

import subprocess
import sys

import pytest
from example_runs import example_workload

import labkit
from labkit.errors import FileFormatError
from labkit.experiments.runner import LocalRunner
from labkit.experiments.worker import Worker

MODEL = "SmolLM2-135M-Instruct"


@pytest.fixture
def session(tmp_path):
    runner = LocalRunner(Worker("fake_backend:FakeBackend"))
    with labkit.Session(
        MODEL, "cpu", example_workload(2, 3), store=tmp_path / "runs.sqlite3", runner=runner
    ) as session:
        yield session


def test_sweep_report_and_panel(session, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    records = session.sweep({"block_size": [8, 16]})
    assert [record.config.block_size for record in records] == [8, 16]
    path = session.report(created="2026-11-30T12:00:00Z")
    assert path.parent.resolve() == tmp_path or path.parent.name == ""
    page = path.read_text()
    assert all(record.run_id in page for record in records)
    assert session.report(tmp_path / "again.html", created="2026-11-30T12:00:00Z").read_text() == page
    assert session.panel().session is session


def test_report_without_a_run_shows_the_plan(session, tmp_path):
    assert "KV cache" in session.report(tmp_path / "plan.html").read_text()


def test_report_that_cannot_be_written_says_so(session, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileFormatError, match="cannot write"):
        session.report(tmp_path / "file" / "report.html")


def test_labkits_names_load_on_first_use_and_without_heavy_libraries():
    code = (
        "import sys, labkit\nassert set(labkit.__all__) <= set(dir(labkit))\n"
        "[getattr(labkit, name) for name in labkit.__all__]\n"
        "heavy = ('torch', 'triton', 'pandas', 'plotly', 'optuna', 'transformers')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stderr


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'plane'"):
        labkit.plane  # noqa: B018
