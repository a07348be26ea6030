"""Rules for every line: no code out of files, nothing that listens, no hidden state, sizes that one sitting takes in,
no file left out of the wheel."""

from __future__ import annotations

import ast
import fnmatch
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("labkit", "kernels/labkit_kernels")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

# Calls that run what a file or a message says, or let the network in. `eval` and `compile` of torch and re are methods.
FORBIDDEN_NAMES = frozenset({"eval", "exec", "compile", "__import__"})
FORBIDDEN_METHODS = frozenset(
    {
        "pickle.load", "pickle.loads", "torch.load", "joblib.load", "marshal.loads", "os.system", "os.popen",
        "socket.create_server", "socketserver.TCPServer", "http.server", "yaml.load", "asyncio.start_server",
    }
)  # fmt: skip
FORBIDDEN_KEYWORDS = {"trust_remote_code": True, "shell": True, "allow_pickle": True, "weights_only": False}


def dotted(node: ast.expr) -> str:
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def forbidden_calls(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        binds = name.endswith(".bind")
        if binds or name in FORBIDDEN_METHODS or (isinstance(node.func, ast.Name) and name in FORBIDDEN_NAMES):
            found.append(f"line {node.lineno}: {name}")
        for keyword in node.keywords:
            value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
            if keyword.arg in FORBIDDEN_KEYWORDS and value is FORBIDDEN_KEYWORDS[keyword.arg]:
                found.append(f"line {node.lineno}: {keyword.arg}={value}")
    return found


def test_no_code_is_run_from_a_file_and_nothing_listens():
    found = {str(path.relative_to(ROOT)): forbidden_calls(path.read_text()) for path in SOURCES}
    assert len(found) > 200
    assert {name: calls for name, calls in found.items() if calls} == {}


@pytest.mark.parametrize(
    "line",
    ["exec(text)", "torch.load(path)", "pickle.loads(data)", "f(x, trust_remote_code=True)", "eval('1')", "s.bind(a)"],
)
def test_the_search_finds_what_it_looks_for(line):
    assert forbidden_calls(line)
    assert not forbidden_calls("model.eval(); re.compile('x'); torch.compile(f); json.load(file)")


MOST_LINES_OF_A_FUNCTION, MOST_LINES_OF_A_FILE = 80, 500


def too_long(source: str) -> list[str]:
    num_lines = len(source.splitlines())
    found = [f"file of {num_lines} lines"] if num_lines > MOST_LINES_OF_A_FILE else []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = node.end_lineno - node.lineno + 1
            if length > MOST_LINES_OF_A_FUNCTION:
                found.append(f"{node.name} of {length} lines")
    return found


def hidden_state(source: str) -> list[str]:
    """Asserts, which -O removes, and names of the module that functions set."""
    return [
        f"line {node.lineno}: {type(node).__name__.lower()}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Assert | ast.Global)
    ]


@pytest.mark.parametrize("search", [too_long, hidden_state])
def test_every_file_keeps_the_measure(search):
    found = {str(path.relative_to(ROOT)): search(path.read_text()) for path in SOURCES}
    assert {name: what for name, what in found.items() if what} == {}


def test_the_measures_find_what_they_look_for():
    long_function = "def f():\n" + "    x = 1\n" * MOST_LINES_OF_A_FUNCTION
    assert too_long(long_function) == ["f of 81 lines"]
    assert too_long("\n" * 501) == ["file of 501 lines"]
    assert too_long("def f():\n" + "    x = 1\n" * 79) == []
    assert hidden_state("def f():\n    global x\n    assert x") == ["line 2: global", "line 3: assert"]


def test_every_data_file_is_in_the_wheel():
    """A file that git tracks beside the code is one that the code reads."""
    globs = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    missing = []
    for package in PACKAGES:
        tracked = subprocess.run(
            ["git", "ls-files", "-z", package], cwd=ROOT, capture_output=True, text=True, check=False
        ).stdout.split("\0")
        names = [name.removeprefix(f"{package}/") for name in tracked if name and not name.endswith(".py")]
        patterns = [pattern.replace("**/", "*") for pattern in globs[Path(package).name]]
        missing += [name for name in names if not any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]
    assert missing == []
