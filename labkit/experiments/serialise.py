"""Records as plain dicts and back: deterministic, versioned, and strict about what it does not know.

Only dataclasses of labkit are rebuilt, field by field from their annotations; nothing is ever imported or called
by a name that stands in the data.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import types
import typing
from collections.abc import Callable, Mapping
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
    try:
        return _reader(cls)(data)
    except _BadFieldError as error:
        place = where or getattr(cls, "__name__", str(cls))
        raise FileFormatError(f"{place}{error.path} {error.problem}", works=error.works) from error


class _BadFieldError(Exception):
    """What is wrong, and the path to it, which grows on the way up: only a failing read pays for it."""

    def __init__(self, problem: str, works: str | None = None) -> None:
        super().__init__(problem)
        self.problem = problem
        self.works = works
        self.path = ""

    def inside(self, step: str) -> _BadFieldError:
        self.path = step + self.path
        return self


Reader = Callable[[Any], Any]


@functools.cache
def _reader(cls: Any) -> Reader:
    """What turns plain data into a `cls`; made once for each annotation."""
    if dataclasses.is_dataclass(cls):
        return functools.partial(_read_dataclass, cls)
    origin, arguments = typing.get_origin(cls), typing.get_args(cls)
    if origin in (typing.Union, types.UnionType):
        return _union_reader(cls, arguments)
    if origin is typing.Literal:
        return functools.partial(_read_literal, arguments)
    if origin is tuple:
        return _tuple_reader(arguments)
    if origin is not None and issubclass(origin, Mapping):
        return functools.partial(_read_mapping, _reader(arguments[1]))
    if cls is Any:
        return _untyped
    if cls is float:
        return _read_float
    if cls is int:
        return _read_int
    return functools.partial(_read_instance, cls)


@functools.cache
def _fields(cls: Any) -> dict[str, Reader]:
    hints = typing.get_type_hints(cls)
    return {entry.name: _reader(hints[entry.name]) for entry in dataclasses.fields(cls) if entry.init}


def _read_dataclass(cls: Any, data: Any) -> Any:
    if not isinstance(data, Mapping):
        raise _mismatch("an object", data)
    readers = _fields(cls)
    values = {}
    for name, value in data.items():
        if name not in readers:
            close = nearest(name, readers)
            raise _BadFieldError(
                f"has a field that this version of labkit does not know: {plain(name, 80)!r}",
                works=f"a newer labkit{f', or the field {close}' if close else ''}",
            )
        try:
            values[name] = readers[name](value)
        except _BadFieldError as error:
            raise error.inside(f".{name}") from None
    try:
        return cls(**values)
    except LabkitError as error:
        raise _BadFieldError(f"is refused: {error}") from error
    except TypeError as error:
        raise _BadFieldError(f"lacks a field: {plain(error, 200)}") from error


def _union_reader(cls: Any, options: tuple) -> Reader:
    readers = [_reader(option) for option in options if option is not type(None)]

    def read(data: Any) -> Any:
        if data is None:
            if type(None) in options:
                return None
            raise _mismatch(str(cls), data)
        for reader in readers[:-1]:
            try:
                return reader(data)
            except _BadFieldError:
                continue
        return readers[-1](data)

    return read


def _read_literal(choices: tuple, data: Any) -> Any:
    if data not in choices:
        raise _mismatch(f"one of {', '.join(map(str, choices))}", data)
    return data


def _tuple_reader(arguments: tuple) -> Reader:
    if not arguments:
        return _untyped
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return functools.partial(_read_list, _reader(arguments[0]))
    readers = [_reader(kind) for kind in arguments]

    def read(data: Any) -> tuple:
        if not isinstance(data, (list, tuple)) or len(data) != len(readers):
            raise _mismatch(f"a list of {len(readers)}", data)
        return tuple(reader(entry) for reader, entry in zip(readers, data, strict=True))

    return read


def _read_list(reader: Reader, data: Any) -> tuple:
    if not isinstance(data, (list, tuple)):
        raise _mismatch("a list", data)
    values = []
    for entry in data:
        try:
            values.append(reader(entry))
        except _BadFieldError as error:
            raise error.inside(f"[{len(values)}]") from None
    return tuple(values)


def _read_mapping(reader: Reader, data: Any) -> dict:
    if not isinstance(data, Mapping):
        raise _mismatch("an object", data)
    values = {}
    for key, entry in data.items():
        try:
            values[str(key)] = reader(entry)
        except _BadFieldError as error:
            raise error.inside(f".{plain(key, 40)}") from None
    return values


def _read_float(data: Any) -> float:
    number = _untyped(data) if isinstance(data, Mapping) else data
    if isinstance(number, (int, float)) and not isinstance(number, bool):
        with contextlib.suppress(OverflowError):
            return float(number)
    raise _mismatch("float", data)


def _read_int(data: Any) -> int:
    if isinstance(data, int) and not isinstance(data, bool):
        return data
    raise _mismatch("int", data)


def _read_instance(cls: type, data: Any) -> Any:
    if isinstance(data, cls):
        return data
    raise _mismatch(cls.__name__, data)


def _untyped(data: Any) -> Any:
    if isinstance(data, Mapping):
        if set(data) == {"$float"} and data["$float"] in ("inf", "-inf", "nan"):
            return float(data["$float"])
        return {key: _untyped(entry) for key, entry in data.items()}
    return tuple(_untyped(entry) for entry in data) if isinstance(data, (list, tuple)) else data


def _mismatch(needed: str, data: Any) -> _BadFieldError:
    return _BadFieldError(f"must be {needed}, not {plain(repr(data)[:200], 80)}")


def rows_to_plain(rows: tuple) -> list[list]:
    """Request or step rows as lists of values in the order of their fields: a third of the bytes of dicts."""
    return [[to_plain(getattr(row, entry.name)) for entry in dataclasses.fields(row)] for row in rows]


def rows_from_plain(kind: str, data: Any, where: str) -> tuple:
    """Rows of `kind` ("request" or "step") from `rows_to_plain`'s lists.

    Raises:
        FileFormatError: a row has the wrong count or types of values.
    """
    row_type = ROW_TYPES[kind]
    readers = list(_fields(row_type).values())
    names = list(_fields(row_type))

    def read(entry: Any) -> Any:
        if not isinstance(entry, list) or len(entry) != len(readers):
            raise _mismatch(f"a row of {len(readers)} values", entry)
        for index, reader in enumerate(readers):
            try:
                entry[index] = reader(entry[index])
            except _BadFieldError as error:
                raise error.inside(f".{names[index]}") from None
        return row_type(*entry)

    try:
        return _read_list(read, data)
    except _BadFieldError as error:
        raise FileFormatError(f"{where}{error.path} {error.problem}") from error


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
