"""The README: its numbers are those of the results, its files exist, its commands are commands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

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
