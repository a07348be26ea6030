"""The README: its numbers are those of the results, its files exist, its commands are commands."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

from labkit import cli

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


def test_the_accuracy_table_is_that_of_the_results_file():
    done = subprocess.run([sys.executable, str(ROOT / "tools" / "make_accuracy_table.py"), "--check"])
    assert done.returncode == 0, "run tools/make_accuracy_table.py"


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\]\(([^)#]+)\)", README)) - {""}))
def test_linked_files_exist(path):
    assert path.startswith("http") or (ROOT / path).exists()


@pytest.mark.parametrize("name", sorted(set(re.findall(r"labkit ([a-z][a-z-]+)(?: |`|$)", README, re.MULTILINE))))
def test_commands_exist(name):
    assert name in typer.main.get_command(cli.app).commands


@pytest.mark.parametrize("target", sorted(set(re.findall(r"make ([a-z]+)", README))))
def test_make_targets_exist(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_python_of_the_tour_runs():
    code = re.search(r"```python\n(.*?)```", README, re.DOTALL).group(1).replace("session.panel()\n", "")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def shell_lines() -> list[str]:
    """The lines of the shell blocks that call labkit, continued lines joined, comments left out."""
    blocks = re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line.partition("  #")[0].strip() for line in lines if line.startswith("labkit ")]


# What a command needs that a page does not say: it starts nothing, and does a part of what takes minutes.
SHORTER = {"panel": ["--no-start"], "doctor": ["--no-test"], "claims": ["C06"]}
WITHOUT_CARD = "the microbenchmark needs an NVIDIA card"


@pytest.mark.parametrize("line", shell_lines(), ids=lambda line: " ".join(line.split()[:4]))
def test_every_labkit_line_runs(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    log = ROOT / "tests" / "memory" / "data" / "logs" / "v1-0.10.0-card-not-free.log"
    (tmp_path / "server.log").write_bytes(log.read_bytes())
    words = shlex.split(line)[1:]
    result = CliRunner().invoke(cli.app, [*words, *SHORTER.get(words[0], [])])
    if words[0] == "calibrate" and WITHOUT_CARD in str(result.exception):
        return
    allowed = {0, 1} if words[0] == "doctor" else {0}
    assert result.exit_code in allowed, result.output + str(result.exception)
    assert result.output.strip()


def test_the_page_has_its_parts():
    assert len(shell_lines()) >= 12
    headings = re.findall(r"^## (.+)$", README, re.MULTILINE)
    for wanted in ("Two commands", "Five minutes", "Your own model, GPU and trace", "How accurate", "Contributing"):
        assert wanted in headings
