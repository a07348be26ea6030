"""`labkit panel`: the notebook that it writes runs and shows the settings of its text."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from labkit import panel_notebook as panel_notebook_module
from labkit.cli import app
from labkit.errors import UnknownNameError, UnsupportedError
from labkit.panel_notebook import open_notebook, panel_notebook
from labkit.specs.engine_config import EngineConfig
from tests.figures.samples import HOSTILE


def cell_of(text: str) -> str:
    return "".join(json.loads(text)["cells"][0]["source"])


def test_the_notebook_shows_the_panel_of_the_text(tmp_path):
    path = tmp_path / "panel.ipynb"
    result = CliRunner().invoke(
        app, ["panel", "block_size=32 kv_cache_dtype=fp8", "--gpu=A10", "--out", str(path), "--no-start"]
    )
    assert result.exit_code == 0
    assert str(path) in result.output.replace("\n", "")
    scope: dict = {}
    lines = cell_of(path.read_text()).splitlines()
    exec("\n".join([*lines[:-1], f"panel = {lines[-1]}"]), scope)
    panel = scope["panel"]
    assert panel.config == EngineConfig(block_size=32, kv_cache_dtype="fp8")
    assert (panel.session.gpu.name, panel.session.workload.name) == ("A10", "azure-2023-conv")
    panel.close_parts()
    panel.settle(60)
    panel.session.close()


def test_names_are_only_ever_strings():
    cell = cell_of(panel_notebook("", model=HOSTILE + '"\n__import__("os")', gpu="'", workload="\\", limit=3))
    strings = compile(cell, "cell", "exec").co_names
    assert "__import__" not in strings
    assert cell.splitlines()[-1] == "session.panel()"


def test_a_text_that_this_version_does_not_know_is_refused():
    with pytest.raises(UnknownNameError, match="warp_size"):
        panel_notebook("warp_size=3", model="m", gpu="g", workload="w", limit=1)


def test_a_lab_that_does_not_start_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setattr(panel_notebook_module.sys, "executable", "false")
    with pytest.raises(UnsupportedError, match="pip install jupyterlab"):
        open_notebook(tmp_path / "panel.ipynb")
