"""Records as plain dicts and back: deterministic, versioned, and strict about what it does not know.

Only dataclasses of labkit are rebuilt, field by field from their annotations; nothing is ever imported or called
by a name that stands in the data.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import types
import typing
from collections.abc import Mapping
from typing import Any

from labkit.errors import FileFormatError, LabkitError
from labkit.measure.run_record import RequestRow, RunRecord, StepRow
from labkit.text import nearest, plain

FORMAT = "labkit-run"
VERSION = 1
ROW_TYPES: Mapping[str, type] = {"request": RequestRow, "step": StepRow}


def to_plain(value: Any) -> Any:
    """`value` as JSON types: dataclasses and mappings become dicts, tuples and lists become lists.

    Raises:
        FileFormatError: a value that is none of these.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": str(float(value))}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {entry.name: to_plain(getattr(value, entry.name)) for entry in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_plain(entry) for key, entry in value.items()}
    if isinstance(value, (tuple, list, frozenset, set)):
        entries = sorted(value, key=repr) if isinstance(value, (frozenset, set)) else value
        return [to_plain(entry) for entry in entries]
    if hasattr(value, "item"):
        return to_plain(value.item())
    raise FileFormatError(f"cannot store a value of type {type(value).__name__}", works="numbers, text and tuples")


def dumps(value: Any) -> str:
    """`value` as JSON text; equal values give equal bytes."""
    return json.dumps(to_plain(value), sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)


def loads(text: str | bytes, where: str) -> Any:
    """JSON text as plain values.

    Raises:
        FileFormatError: it is no JSON, too deeply nested, or holds a number of too many digits; names `where`.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise FileFormatError(f"{where} is not valid JSON: {plain(error, 200)}") from error


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def from_plain(cls: Any, data: Any, where: str = "") -> Any:
    """The record of type `cls` that `data` describes.

    Args:
        cls: a dataclass or an annotation of one of its fields.
        where: what to call the place in error messages.

    Raises:
        FileFormatError: a field is missing, unknown or of another type; the message names it.
    """
    where = where or getattr(cls, "__name__", str(cls))
    if dataclasses.is_dataclass(cls):
        return _dataclass_from(cls, data, where)
    origin = typing.get_origin(cls)
    if origin in (typing.Union, types.UnionType):
        return _union_from(cls, data, where)
    if origin is typing.Literal:
        if data not in typing.get_args(cls):
            raise _mismatch(where, f"one of {', '.join(map(str, typing.get_args(cls)))}", data)
        return data
    if origin is tuple:
        return _tuple_from(typing.get_args(cls), data, where)
    if origin is not None and issubclass(origin, Mapping):
        return _mapping_from(typing.get_args(cls), data, where)
    return _scalar_from(cls, data, where)


def _dataclass_from(cls: Any, data: Any, where: str) -> Any:
    if not isinstance(data, Mapping):
        raise _mismatch(where, "an object", data)
    hints = _hints(cls)
    for name in data:
        if name not in hints:
            close = nearest(name, hints)
            raise FileFormatError(
                f"{where} has a field that this version of labkit does not know: {plain(name, 80)!r}",
                works=f"a newer labkit{f', or the field {close}' if close else ''}",
            )
    values = {name: from_plain(hints[name], data[name], f"{where}.{name}") for name in data}
    try:
        return cls(**values)
    except LabkitError as error:
        raise FileFormatError(f"{where}: {error}") from error
    except TypeError as error:
        raise FileFormatError(f"{where} lacks a field: {plain(error, 200)}") from error


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {entry.name: hints[entry.name] for entry in dataclasses.fields(cls) if entry.init}


def _union_from(cls: Any, data: Any, where: str) -> Any:
    options = typing.get_args(cls)
    if data is None:
        if type(None) in options:
            return None
        raise _mismatch(where, str(cls), data)
    problem: FileFormatError | None = None
    for option in options:
        if option is type(None):
            continue
        try:
            return from_plain(option, data, where)
        except FileFormatError as error:
            problem = error
    raise problem or _mismatch(where, str(cls), data)


def _tuple_from(arguments: tuple, data: Any, where: str) -> tuple:
    if not isinstance(data, (list, tuple)):
        raise _mismatch(where, "a list", data)
    if not arguments:
        return tuple(_untyped(entry) for entry in data)
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return tuple(from_plain(arguments[0], entry, f"{where}[{index}]") for index, entry in enumerate(data))
    if len(arguments) != len(data):
        raise _mismatch(where, f"a list of {len(arguments)}", data)
    return tuple(from_plain(kind, entry, where) for kind, entry in zip(arguments, data, strict=True))


def _mapping_from(arguments: tuple, data: Any, where: str) -> dict:
    if not isinstance(data, Mapping):
        raise _mismatch(where, "an object", data)
    kind = arguments[1] if arguments else Any
    return {str(key): from_plain(kind, entry, f"{where}.{plain(key, 40)}") for key, entry in data.items()}


def _scalar_from(cls: Any, data: Any, where: str) -> Any:
    if cls is Any:
        return _untyped(data)
    if cls is float:
        number = _untyped(data) if isinstance(data, Mapping) else data
        if isinstance(number, (int, float)) and not isinstance(number, bool):
            return float(number)
    elif cls is int:
        if isinstance(data, int) and not isinstance(data, bool):
            return data
    elif isinstance(cls, type) and isinstance(data, cls):
        return data
    raise _mismatch(where, getattr(cls, "__name__", str(cls)), data)


def _untyped(data: Any) -> Any:
    if isinstance(data, Mapping):
        if set(data) == {"$float"} and data["$float"] in ("inf", "-inf", "nan"):
            return float(data["$float"])
        return {key: _untyped(entry) for key, entry in data.items()}
    return tuple(_untyped(entry) for entry in data) if isinstance(data, list) else data


def _mismatch(where: str, needed: str, data: Any) -> FileFormatError:
    return FileFormatError(f"{where} must be {needed}, not {plain(repr(data)[:200], 80)}")


def rows_to_plain(rows: tuple) -> list[list]:
    """Request or step rows as lists of values in the order of their fields: a third of the bytes of dicts."""
    return [[to_plain(getattr(row, entry.name)) for entry in dataclasses.fields(row)] for row in rows]


def rows_from_plain(kind: str, data: Any, where: str) -> tuple:
    """Rows of `kind` ("request" or "step") from `rows_to_plain`'s lists.

    Raises:
        FileFormatError: a row has the wrong count or types of values.
    """
    row_type = ROW_TYPES[kind]
    hints = _hints(row_type)
    if not isinstance(data, list):
        raise _mismatch(where, "a list of rows", data)
    rows = []
    for entry in data:
        if not isinstance(entry, list) or len(entry) != len(hints):
            raise _mismatch(where, f"rows of {len(hints)} values", entry)
        pairs = zip(hints.items(), entry, strict=True)
        rows.append(row_type(**{name: from_plain(hint, value, f"{where}.{name}") for (name, hint), value in pairs}))
    return tuple(rows)


def record_to_plain(record: RunRecord) -> dict[str, Any]:
    """`record` with the name and version of the format, as `record_from_plain` reads it."""
    return {"format": FORMAT, "version": VERSION, "record": to_plain(record)}


def record_from_plain(data: Any, where: str = "run") -> RunRecord:
    """The record in `data`.

    Raises:
        FileFormatError: another format, a newer version, an unknown or broken field; the message names it.
    """
    if not isinstance(data, Mapping) or data.get("format") != FORMAT:
        raise FileFormatError(f"{where} is not a labkit run", works='JSON with "format": "labkit-run"')
    version = data.get("version")
    if not isinstance(version, int) or version > VERSION or version < 1:
        raise FileFormatError(
            f"{where} has format version {plain(version, 20)}, this labkit reads up to {VERSION}",
            works="a newer labkit",
        )
    return from_plain(RunRecord, data.get("record"), where)
