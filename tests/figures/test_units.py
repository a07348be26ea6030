"""Numbers are formatted in `labkit.format` alone: no unit of bytes stands anywhere else in the rooms that show, and
behind a number nowhere in labkit."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

LABKIT = Path(__file__).resolve().parents[2] / "labkit"
UNIT = re.compile(r"\b[KMGT]i?B(/s)?\b")
FILES = sorted(path for room in ("figures", "widgets") for path in (LABKIT / room).glob("*.py"))

NUMBER_WITH_UNIT = re.compile(r"\{\}\s?[KMGT]i?B(/s)?\b")
ALL_FILES = sorted(path for path in LABKIT.rglob("*.py") if path.name != "format.py")


def texts_of(tree: ast.AST):
    """String constants that are no docstring."""
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    constants = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return [node for node in constants if id(node) not in docstrings]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_no_unit_outside_the_format_module(path):
    found = [
        f"line {node.lineno}: {node.value!r}"
        for node in texts_of(ast.parse(path.read_text()))
        if UNIT.search(node.value)
    ]
    assert found == []


def formatted_numbers_in(tree: ast.AST) -> list[str]:
    """f-strings that put a unit of bytes behind a value, each value as "{}"."""
    strings = [node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)]
    texts = ["".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
             for node in strings]  # fmt: skip
    return [text for text in texts if NUMBER_WITH_UNIT.search(text)]


def test_no_number_gets_its_unit_outside_the_format_module():
    found = {str(path.relative_to(LABKIT)): formatted_numbers_in(ast.parse(path.read_text())) for path in ALL_FILES}
    assert {name: texts for name, texts in found.items() if texts} == {}
    assert formatted_numbers_in(ast.parse("f'{size / 2**30:.2f} GiB used'")) == ["{} GiB used"]


@pytest.mark.parametrize("text", ["83 GB used", "1.5 GiB", "{x} TB/s", "12 KiB"])
def test_the_search_finds_what_it_looks_for(text):
    assert UNIT.search(text)
