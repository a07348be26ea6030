"""One call, the command line and its exit codes; nothing on the machine changes, and it is quick."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from labkit.cli import app
from labkit.doctor import FixedMachine, Machine, Request, doctor, examine
from labkit.doctor.run import read_error_text
from labkit.errors import FileFormatError, OutOfRangeError
from tests.doctor.folders import good_folder

STATUSES = {"ok", "warning", "problem", "unknown"}


def _run(*words: str, text: str | None = None):
    return CliRunner().invoke(app, ["doctor", *words], input=text)


def test_this_machine_is_examined_without_a_card():
    found = examine(test=False)
    assert {check.status for check in found.checks} <= STATUSES
    names = [check.name for check in found.checks]
    assert len(names) == len(set(names))
    assert "cards" in names
    assert found.exit_code in (0, 1, 2)


def test_the_commands_json_is_one_document_with_the_exit_code():
    result = _run("--json", "--no-test")
    document = json.loads(result.stdout)
    assert result.exit_code == document["exit_code"]
    assert {"title", "answer", "checks"} <= set(document)
    assert all({"name", "status", "evidence", "cause", "fix"} <= set(check) for check in document["checks"])


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--error-text", "RuntimeError: UVA is not available"), 2, "WSL2"),
        (("--error-text", "hello"), 0, "does not know this one"),
        (("--which-vllm",), 0, "0.33.0"),
        (("--preflight", "--gpu", "H100 SXM", "--model", "meta-llama/Llama-3.1-8B-Instruct", "--max-model-len", "4096",
          "--enforce-eager"), 1, "eager"),
        (("--preflight", "--gpu", "T4", "--model", "meta-llama/Llama-3.1-8B-Instruct"), 2, "fit"),
        (("--model-folder", "/no/such/folder"), 2, "no folder"),
        (("--vllm", "0.99", "--no-test", "--error-text", "hello"), 0, "not in the table"),
    ],
)  # fmt: skip
def test_exit_codes_and_text(words, code, said):
    result = _run(*words)
    assert result.exit_code == code, result.output
    assert said in result.output


def test_error_text_from_standard_input_and_from_a_file(tmp_path):
    log = "INFO start\nImportError: libcudart.so.12: cannot open shared object file\n"
    (tmp_path / "log.txt").write_text(log)
    for words, text in ((("--error-text", "-"), log), (("--error-text", str(tmp_path / "log.txt")), None)):
        result = _run(*words, "--json", text=text)
        assert json.loads(result.stdout)["facts"]["errors"] == ["libcudart-missing"]


def test_a_log_that_is_too_long_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("labkit.doctor.run.MAX_ERROR_BYTES", 10)
    (tmp_path / "log.txt").write_text("x" * 11)
    with pytest.raises(FileFormatError, match="too long"):
        read_error_text(str(tmp_path / "log.txt"))


def test_write_missing_says_what_it_wrote(tmp_path):
    folder = good_folder(tmp_path / "model")
    (folder / "tokenizer_config.json").unlink()
    result = _run("--model-folder", str(folder), "--write-missing", "--json")
    document = json.loads(result.stdout)
    assert document["facts"]["written"] == str(folder / "tokenizer_config.json")
    assert any("eos_token" in sentence for sentence in document["facts"]["assumed"])
    again = doctor(Request(model_folder=str(folder), write_missing=True), FixedMachine())
    assert "nothing written" in again.checks[0].evidence


def test_several_questions_make_one_answer(tmp_path):
    folder = good_folder(tmp_path / "model")
    found = doctor(Request(which_vllm=True, model_folder=str(folder), error_text="hello"), FixedMachine())
    assert {"answer", "config", "error-text"} <= {check.name for check in found.checks}
    assert "runs" in found.facts


def test_nothing_is_changed_and_nothing_is_imported(tmp_path):
    """A process of its own: no file appears or changes, torch stays unimported, and CPU time is within 3 s."""
    home = tmp_path / "home"
    home.mkdir()
    code = (
        "import sys, time, json\n"
        "from labkit.doctor import Request, doctor\n"
        "found = doctor(Request(true_test=False))\n"
        "more = doctor(Request(which_vllm=True, error_text='CUDA error: no kernel image is available'))\n"
        "print(json.dumps([len(found.checks), 'torch' in sys.modules, time.process_time()]))\n"
    )
    environment = os.environ | {"HOME": str(home), "LABKIT_HOME": str(home / "lab"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=environment,
        cwd=home,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    number, has_torch, cpu_s = json.loads(done.stdout)
    assert number > 15
    assert not has_torch
    assert cpu_s < 3
    assert list(home.iterdir()) == []


def test_the_real_machine_answers_every_look(tmp_path):
    machine = Machine()
    assert machine.read(str(tmp_path / "missing")) is None
    assert machine.read("x\0y") is None
    assert machine.exists("/") is True
    assert machine.exists("x\0y") is False
    assert machine.package("no-such-package-xyz") is None
    assert machine.package("numpy").version
    assert machine.run("no-such-command-xyz") is None
    assert machine.run("sleep", "5", timeout_s=0.05) is None
    assert machine.disk(str(tmp_path / "a" / "b")).total > 0
    assert machine.loads("libnothing-xyz.so.9") is False
    assert machine.fetch("file:///etc/passwd") is None
    assert machine.fetch("http://127.0.0.1:9/health") is None
    assert machine.torch() is None or machine.torch().version
    assert isinstance(machine.libraries("libcudart.so."), tuple)
    assert machine.memory().total >= machine.memory().free > 0


def test_both_machines_have_the_same_looks():
    def looks(kind) -> set[str]:
        return {name for name in vars(kind) if not name.startswith("_") and callable(getattr(kind, name))}

    assert looks(Machine) == looks(FixedMachine)


def test_the_tables_are_in_the_package():
    folder = Path(sys.modules["labkit.doctor.run"].__file__).parent
    for name in ("vllm_wheels.json", "vllm_builds.json", "error_texts.json"):
        assert json.loads((folder / name).read_text())["source"]


def test_write_missing_without_a_folder_is_refused():
    with pytest.raises(OutOfRangeError, match="where to write"):
        doctor(Request(write_missing=True), FixedMachine())
