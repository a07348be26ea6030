"""Numbers are formatted in `labkit.format` alone: no unit of bytes is written anywhere else in the rooms that show."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

LABKIT = Path(__file__).resolve().parents[2] / "labkit"
UNIT = re.compile(r"\b[KMGT]i?B(/s)?\b")
FILES = sorted(path for room in ("figures", "widgets") for path in (LABKIT / room).glob("*.py"))


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


@pytest.mark.parametrize("text", ["83 GB used", "1.5 GiB", "{x} TB/s", "12 KiB"])
def test_the_search_finds_what_it_looks_for(text):
    assert UNIT.search(text)
