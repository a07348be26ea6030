"""Record what `vllm serve` accepts, version by version, into `labkit/advice/vllm_flags.json`.

Reads the Python sources of unpacked vLLM wheels (Apache-2.0) by their syntax tree, without importing them, and keeps
facts only: names, types, defaults and choices of the engine's command-line flags.

    python tools/record_vllm_parser.py FOLDER

FOLDER has one folder for each version (`0.33.0/vllm/engine/arg_utils.py`, `0.33.0/vllm/config/…`), as `unzip` leaves
a wheel. Equal descriptions of neighbouring versions are merged into one entry with `since` and `until`.
"""

from __future__ import annotations

import argparse
import ast
import json
from pathlib import Path
from typing import Any

OUTPUT = Path(__file__).resolve().parent.parent / "labkit" / "advice" / "vllm_flags.json"
COMPUTED = {"computed": True}


class Sources:
    """Classes, their fields and the type aliases of one vLLM version."""

    def __init__(self, folder: Path) -> None:
        self.classes: dict[str, ast.ClassDef] = {}
        self.aliases: dict[str, ast.expr] = {}
        self.arguments = ast.parse((folder / "vllm/engine/arg_utils.py").read_text())
        for path in sorted((folder / "vllm").rglob("*.py")):
            self._collect(ast.parse(path.read_text()))

    def _collect(self, tree: ast.Module) -> None:
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                self.classes[node.name] = node
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self.aliases.setdefault(node.targets[0].id, node.value)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
                self.aliases.setdefault(node.target.id, node.value)

    def field(self, class_name: str, name: str) -> ast.AnnAssign | None:
        """The declaration of a field, looked for in the class and then in its bases."""
        node = self.classes.get(class_name)
        if node is None:
            return None
        for entry in node.body:
            if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name) and entry.target.id == name:
                return entry
        for base in node.bases:
            found = self.field(base.id, name) if isinstance(base, ast.Name) else None
            if found is not None:
                return found
        return None

    def default(self, node: ast.expr | None) -> Any:
        """The value of a default where it is a literal, else COMPUTED."""
        if node is None:
            return None
        if isinstance(node, ast.Call):
            return self._field_default(node)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            declared = self.field(node.value.id, node.attr)
            return self.default(declared.value) if declared is not None else COMPUTED
        try:
            value = ast.literal_eval(node)
        except (ValueError, SyntaxError, TypeError):
            return COMPUTED
        return value if isinstance(value, (bool, int, float, str, type(None))) else COMPUTED

    def _field_default(self, node: ast.Call) -> Any:
        for keyword in node.keywords:
            if keyword.arg == "default":
                return self.default(keyword.value)
        is_field = isinstance(node.func, ast.Name) and node.func.id in ("Field", "field")
        return self.default(node.args[0]) if is_field and node.args else COMPUTED

    def choices(self, node: ast.expr | None) -> list[Any] | None:
        """Values of the `Literal` inside a type, aliases followed; None where any text is allowed."""
        if isinstance(node, ast.Name) and node.id in self.aliases:
            return self.choices(self.aliases[node.id])
        if isinstance(node, ast.BinOp):
            return self.choices(node.left) or self.choices(node.right)
        if not isinstance(node, ast.Subscript):
            return None
        inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if isinstance(node.value, ast.Name) and node.value.id == "Literal":
            return [value for entry in inner for value in self._literal(entry)]
        return next((found for entry in inner if (found := self.choices(entry))), None)

    def _literal(self, node: ast.expr) -> list[Any]:
        return [node.value] if isinstance(node, ast.Constant) else self.choices(node) or []


def type_names(node: ast.expr | None) -> set[str]:
    """Names that occur in a type."""
    return {entry.id for entry in ast.walk(node) if isinstance(entry, ast.Name)} if node is not None else set()


def kind_of(names: set[str], choices: list[Any] | None) -> str:
    """The kind of value that vLLM's `get_kwargs` makes of a field's type."""
    if "bool" in names:
        return "bool"
    if choices:
        return "int" if all(isinstance(value, int) for value in choices) else "str"
    for name in ("list", "List", "tuple", "set", "dict", "Dict"):
        if name in names:
            return "json" if name.lower() == "dict" else "list"
    return next((name for name in ("int", "float", "str") if name in names), "str")


def from_field(sources: Sources, class_name: str, field_name: str) -> dict[str, Any]:
    """Description of a flag that comes from a configuration field."""
    declared = sources.field(class_name, field_name)
    if declared is None:
        return {"kind": "str", "default": COMPUTED}
    names = type_names(declared.annotation)
    if {"bool", "str"} <= names:  # a bare flag means True, a value is text
        return {"kind": "str", "default": sources.default(declared.value), "nargs": "?"}
    for name in list(names):
        names |= type_names(sources.aliases.get(name)) if name in sources.aliases else set()
    choices = sources.choices(declared.annotation)
    open_ended = "str" in type_names(declared.annotation)
    entry = {"kind": kind_of(names, choices), "default": sources.default(declared.value)}
    if choices and entry["kind"] != "bool" and not open_ended:
        entry["choices"] = choices
    elif choices and entry["kind"] != "bool":
        entry["known"] = choices
    return entry


def from_call(sources: Sources, call: ast.Call, maps: dict[str, str]) -> dict[str, Any]:
    """Description of the flag of one `add_argument` call."""
    entry: dict[str, Any] = {"kind": "str", "default": None}
    for keyword in call.keywords:
        if keyword.arg is not None:
            apply_keyword(sources, entry, keyword.arg, keyword.value)
        elif isinstance(keyword.value, ast.Dict):
            for key, value in zip(keyword.value.keys, keyword.value.values, strict=True):
                if key is None:
                    entry |= from_map(sources, value, maps)
                elif isinstance(key, ast.Constant):
                    apply_keyword(sources, entry, key.value, value)
        else:
            entry |= from_map(sources, keyword.value, maps)
    return entry


def from_map(sources: Sources, node: ast.expr, maps: dict[str, str]) -> dict[str, Any]:
    """Description of `x_kwargs["field"]`; nothing where the expression is another one."""
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and isinstance(node.slice, ast.Constant):
        class_name = maps.get(node.value.id)
        return from_field(sources, class_name, node.slice.value) if class_name else {}
    return {}


def apply_keyword(sources: Sources, entry: dict[str, Any], name: str, value: ast.expr) -> None:
    """Put one keyword of `add_argument` into `entry`."""
    text = ast.unparse(value)
    if name == "type":
        entry["kind"] = next((kind for kind in ("int", "float") if kind in text), "str")
        if "loads" in text or "json" in text:
            entry["kind"] = "json"
    elif name == "action":
        entry["kind"] = "bool" if "BooleanOptional" in text else "flag" if "tore" in text else "str"
    elif name == "default":
        entry["default"] = sources.default(value)
    elif name == "choices":
        found = literal_list(sources, value)
        entry |= {"choices": found} if found else {}
    elif name == "nargs":
        entry["nargs"] = text.strip("'")
    elif name == "deprecated":
        entry["deprecated"] = True


def literal_list(sources: Sources, node: ast.expr) -> list[Any] | None:
    """A list of plain values, or None where vLLM computes it."""
    if isinstance(node, ast.Name) and node.id in sources.aliases:
        return literal_list(sources, sources.aliases[node.id])
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("get_args"):
        return sources.choices(node.args[0])
    try:
        return list(ast.literal_eval(node))
    except (ValueError, SyntaxError, TypeError):
        return None


def kwargs_maps(tree: ast.AST) -> dict[str, str]:
    """Variable → configuration class, from `x_kwargs = get_kwargs(Class)`."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and isinstance(node.targets[0], ast.Name):
            call = node.value
            if ast.unparse(call.func).endswith("get_kwargs") and call.args and isinstance(call.args[0], ast.Name):
                found[node.targets[0].id] = call.args[0].id
    return found


def flags_of(folder: Path) -> dict[str, dict[str, Any]]:
    """Flag → description for one version."""
    sources = Sources(folder)
    maps = kwargs_maps(sources.arguments)
    found: dict[str, dict[str, Any]] = {}
    for node in ast.walk(sources.arguments):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument":
            names = [
                entry.value for entry in node.args if isinstance(entry, ast.Constant) and isinstance(entry.value, str)
            ]
            long = [name for name in names if name.startswith("--")]
            if long:
                entry = from_call(sources, node, maps)
                if len(names) > 1:
                    entry["aliases"] = [name for name in names if name != long[0]]
                found.setdefault(long[0], entry)
    return found


def merged(by_version: dict[str, dict[str, dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
    """Flag → entries with `since` and `until`, from the oldest version to the newest."""
    versions = list(by_version)
    table: dict[str, list[dict[str, Any]]] = {}
    for name in sorted({name for flags in by_version.values() for name in flags}):
        entries: list[dict[str, Any]] = []
        previous = None
        for version in versions:
            entry = by_version[version].get(name)
            if entry is not None and entry == previous:
                entries[-1]["until"] = version
            elif entry is not None:
                entries.append({"since": version, "until": version, **entry})
            previous = entry
        table[name] = entries
    return table


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    folders = [path for path in parser.parse_args().folder.iterdir() if (path / "vllm/engine/arg_utils.py").exists()]
    folders.sort(key=lambda path: [int(part) for part in path.name.split(".")[:3]])
    by_version = {path.name: flags_of(path) for path in folders}
    inverse = [path.name for path in folders if "EnableDisableAction" in Sources(path).classes]
    record = {
        "source": "vLLM wheels on PyPI (Apache-2.0), read by tools/record_vllm_parser.py; facts only",
        "versions": list(by_version),
        "inverse_forms_since": inverse[0] if inverse else None,
        "flags": merged(by_version),
    }
    lines = [f"  {json.dumps(name)}: {json.dumps(entries)}" for name, entries in record["flags"].items()]
    head = json.dumps({key: record[key] for key in ("source", "versions", "inverse_forms_since")})[:-1]
    OUTPUT.write_text(f'{head}, "flags": {{\n' + ",\n".join(lines) + "\n}}\n")


if __name__ == "__main__":
    main()
