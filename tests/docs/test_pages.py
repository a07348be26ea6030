"""The documentation runs: every Python block, every command, every link, every error class."""

from __future__ import annotations

import importlib.util
import inspect
import re
import shlex
from pathlib import Path

import pytest

from labkit import errors

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
BLOCK = re.compile(r"^```python([^\n]*)\n(.*?)^```", re.M | re.S)


def python_blocks(page: Path) -> list[str]:
    """The Python of a page; a block marked `python no-run: reason` is left out."""
    found = []
    for mark, code in BLOCK.findall(page.read_text()):
        if "no-run" in mark:
            assert re.fullmatch(r" no-run: \S.*", mark), f"{page.name}: a block that does not run says why"
        else:
            found.append(code)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_python_of_a_page_runs_from_top_to_bottom(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    scope: dict = {"__name__": "docs"}
    for index, code in enumerate(python_blocks(page)):
        exec(compile(code, f"{page.name}, block {index + 1}", "exec"), scope)
    printed = capsys.readouterr().out
    assert "None" not in printed


def test_there_are_pages_with_python():
    assert sum(len(python_blocks(page)) for page in PAGES) >= 12


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_link_has_its_target(page):
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        name, _, anchor = target.partition("#")
        assert not target.startswith("http"), "the docs are read offline"
        linked = page.parent / name if name else page
        assert linked.is_file(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", linked.read_text(), re.M)
            assert anchor in {re.sub(r"[^\w-]", "", heading.lower().replace(" ", "-")) for heading in headings}


def test_every_page_is_linked_from_the_index():
    linked = set(re.findall(r"\((\w[\w-]*\.md)\)", (ROOT / "docs" / "index.md").read_text()))
    assert linked == {page.name for page in PAGES} - {"index.md"}


def test_every_command_exists():
    from labkit.cli import app

    known = {command.name or command.callback.__name__.replace("_", "-") for command in app.registered_commands}
    known |= {group.name for group in app.registered_groups}
    named = {name for page in PAGES for name in re.findall(r"(?:^|`)labkit ([a-z-]+)", "\n".join(code_of(page)), re.M)}
    assert {"plan", "export", "explain-log", "tune"} <= named
    assert named <= known


def code_of(page: Path) -> list[str]:
    """Shell blocks and inline code of a page."""
    pairs = re.findall(r"^```sh\n(.*?)^```|(`labkit [^`]+`)", page.read_text(), re.M | re.S)
    return [part for pair in pairs for part in pair]


def shell_commands() -> list[str]:
    blocks = [block for page in PAGES for block in re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.M | re.S)]
    return [line for block in blocks for line in block.splitlines() if line.startswith("labkit ")]


@pytest.mark.parametrize("line", shell_commands(), ids=lambda line: line.split()[1])
def test_every_shell_line_runs(line):
    from typer.testing import CliRunner

    from labkit.cli import app

    result = CliRunner().invoke(app, shlex.split(line)[1:])
    assert result.exit_code == 0, result.output
    assert result.output.strip()


def test_every_error_class_has_its_section():
    text = (ROOT / "docs" / "errors.md").read_text()
    classes = [name for name, entry in inspect.getmembers(errors, inspect.isclass) if issubclass(entry, Exception)]
    assert {name for name in classes if f"\n## {name}\n" not in text} == set()
    headings = {heading.lower() for heading in re.findall(r"^## (\w+)$", text, re.M)}
    assert {getattr(errors, name)("x").section.partition("#")[2] for name in classes} <= headings


def test_the_knob_reference_is_that_of_the_code():
    place = ROOT / "tools" / "make_knob_reference.py"
    loaded = importlib.util.spec_from_file_location("make_knob_reference", place)
    module = importlib.util.module_from_spec(loaded)
    loaded.loader.exec_module(module)
    assert (ROOT / "docs" / "knobs.md").read_text() == module.text(), "run python tools/make_knob_reference.py"
