"""Rows of traffic traces in the forms that their publishers use, as requests."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from labkit.errors import FileFormatError
from labkit.specs.workload import RequestSpec
from labkit.text import nearest, plain

MAX_TOKENS = 10**8
MAX_SECONDS = 1e12
MAX_PREFIX_RANGES = 10**6
_MAX_DIGITS = 20


@dataclass(frozen=True)
class TraceForm:
    """How one kind of file says a request.

    Attributes:
        name: of the form, for the record of what was done.
        arrival, inputs, outputs: columns; `arrival` is None where the file has no times.
        arrival_unit_s: seconds of one unit of `arrival`; 0 for a date and time.
        prefixes: column of the prefix blocks, or None.
        block_tokens: tokens of one prefix block.
    """

    name: str
    arrival: str | None
    inputs: str
    outputs: str
    arrival_unit_s: float = 1.0
    prefixes: str | None = None
    block_tokens: int = 0


_AZURE = TraceForm("Azure", "timestamp", "contexttokens", "generatedtokens", arrival_unit_s=0.0)
_BURST = TraceForm("BurstGPT", "timestamp", "request tokens", "response tokens")
_LENGTHS = TraceForm("lengths", None, "input_tokens", "output_tokens")
_LABKIT = TraceForm("labkit", "arrival_s", "input_tokens", "output_tokens")
_MOONCAKE = TraceForm("Mooncake", "timestamp", "input_length", "output_length", 1e-3, "hash_ids", 512)
_HEADERS = (
    "arrival_s,input_tokens,output_tokens[,block_hashes_N]; TIMESTAMP,ContextTokens,GeneratedTokens; "
    "Timestamp,Model,Request tokens,Response tokens,…; or JSON lines with timestamp, input_length, output_length"
)
_PREFIX_COLUMN = "block_hashes_"


def read_rows(lines: Iterable[tuple[int, str]], name: str) -> tuple[TraceForm, Iterator[RequestSpec]]:
    """The form of a trace and its requests in the file's order; arrivals in seconds, not yet from zero.

    Args:
        lines: as `trace_lines.read_lines` gives them.
        name: of the file, for errors.

    Raises:
        FileFormatError: an unknown header, or (while iterating) a row that is wrong, with line, column and value.
    """
    iterator = iter(lines)
    first = next(iterator, None)
    if first is None:
        raise FileFormatError(f"{name} is empty", works=_HEADERS)
    if first[1].lstrip().startswith("{"):
        return _MOONCAKE, _json_rows(_chained(first, iterator), name)
    if first[1].lstrip().startswith("["):
        raise FileFormatError(f"{name} is one JSON list", works="JSON lines: one object on each line")
    columns = [column.strip().casefold() for column in _split(first[1], name, first[0])]
    form = _form_of(columns, name)
    return form, _csv_rows(iterator, name, columns, form)


def _chained(first: tuple[int, str], rest: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    yield first
    yield from rest


def _form_of(columns: list[str], name: str) -> TraceForm:
    if len(set(columns)) < len(columns):
        raise FileFormatError(f"{name} names a column twice: {plain(','.join(columns), 200)}")
    for form in (_AZURE, _BURST, _LABKIT, _LENGTHS):
        needed = [column for column in (form.arrival, form.inputs, form.outputs) if column is not None]
        if all(column in columns for column in needed):
            return _with_prefixes(form, columns)
    close = nearest(
        ",".join(columns), ("arrival_s,input_tokens,output_tokens", "timestamp,contexttokens,generatedtokens")
    )
    raise FileFormatError(
        f"the header of {name} is not one that labkit knows: {plain(','.join(columns), 200)!r}",
        needed=_HEADERS,
        works=close,
    )


def _with_prefixes(form: TraceForm, columns: list[str]) -> TraceForm:
    column = next((column for column in columns if column.startswith(_PREFIX_COLUMN)), None)
    if column is None:
        return form
    size = column.removeprefix(_PREFIX_COLUMN)
    if not (size.isdecimal() and size.isascii() and len(size) <= 6 and int(size) > 0):
        raise FileFormatError(
            f"column {plain(column, 80)!r} does not name the tokens of a block", works="block_hashes_512"
        )
    return TraceForm(form.name, form.arrival, form.inputs, form.outputs, form.arrival_unit_s, column, int(size))


def _split(line: str, name: str, number: int) -> list[str]:
    if '"' not in line:
        return line.split(",")
    try:
        return next(csv.reader([line], strict=True))
    except (csv.Error, StopIteration) as error:
        raise FileFormatError(f"line {number} of {name} is no CSV: {plain(error)}") from error


def _csv_rows(
    lines: Iterator[tuple[int, str]], name: str, columns: list[str], form: TraceForm
) -> Iterator[RequestSpec]:
    places = {column: index for index, column in enumerate(columns)}
    arrival = places[form.arrival] if form.arrival is not None else None
    inputs, outputs = places[form.inputs], places[form.outputs]
    prefixes = places[form.prefixes] if form.prefixes is not None else None
    read_time = _read_date if form.arrival_unit_s == 0 else _read_seconds
    ranges_left = MAX_PREFIX_RANGES
    place = _Place(name)
    for number, line in lines:
        place.line = number
        cells = _split(line, name, number)
        if len(cells) != len(columns):
            raise FileFormatError(
                f"line {number} of {name} has the wrong number of columns",
                needed=f"{len(columns)}",
                available=f"{len(cells)}",
            )
        input_tokens = _read_tokens(cells[inputs], place, columns[inputs])
        blocks: tuple[tuple[int, int], ...] = ()
        if prefixes is not None:
            blocks = _read_ranges(cells[prefixes], place, columns[prefixes], -(-input_tokens // form.block_tokens))
            ranges_left -= len(blocks)
            _check_ranges(ranges_left, name, number)
        yield RequestSpec(
            0.0 if arrival is None else read_time(cells[arrival], place, columns[arrival]),
            input_tokens,
            _read_tokens(cells[outputs], place, columns[outputs]),
            blocks,
        )


def _json_rows(lines: Iterator[tuple[int, str]], name: str) -> Iterator[RequestSpec]:
    ranges_left = MAX_PREFIX_RANGES
    place = _Place(name)
    for number, line in lines:
        place.line = number
        try:
            row = json.loads(line, parse_int=_short_int)
        except (ValueError, RecursionError) as error:
            raise FileFormatError(f"line {number} of {name} is no JSON: {plain(error, 200)}") from error
        if not isinstance(row, dict):
            raise FileFormatError(f"line {number} of {name} is no JSON object")
        input_tokens = _json_number(row, _MOONCAKE.inputs, place, MAX_TOKENS, whole=True)
        blocks = _compressed(row.get("hash_ids", []), place, -(-int(input_tokens) // _MOONCAKE.block_tokens))
        ranges_left -= len(blocks)
        _check_ranges(ranges_left, name, number)
        yield RequestSpec(
            _json_number(row, "timestamp", place, MAX_SECONDS) * _MOONCAKE.arrival_unit_s,
            int(input_tokens),
            int(_json_number(row, _MOONCAKE.outputs, place, MAX_TOKENS, whole=True)),
            blocks,
        )


@dataclass(slots=True)
class _Place:
    """Where a reader stands; one for a file, moved from line to line."""

    name: str
    line: int = 0

    def wrong(self, column: str, value: object, needed: str) -> FileFormatError:
        shown = plain(repr(value), 80)
        return FileFormatError(f"{self.name}, line {self.line}, column {plain(column, 80)}: {shown}", needed=needed)


def _check_ranges(ranges_left: int, name: str, number: int) -> None:
    if ranges_left < 0:
        raise FileFormatError(
            f"{name} names too many prefix blocks at line {number}", needed=f"at most {MAX_PREFIX_RANGES:,} ranges"
        )


def _short_int(digits: str) -> int:
    if len(digits) > _MAX_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits; at most {_MAX_DIGITS} are read")
    return int(digits)


def _read_tokens(text: str, place: _Place, column: str) -> int:
    text = text.strip()
    if not (text.isdecimal() and text.isascii() and len(text) <= _MAX_DIGITS):
        whole = text.removesuffix(".0")
        if not (whole.isdecimal() and whole.isascii() and len(whole) <= _MAX_DIGITS):
            raise place.wrong(column, text, f"a whole number of tokens, 0 to {MAX_TOKENS:,}")
        text = whole
    tokens = int(text)
    if tokens > MAX_TOKENS:
        raise place.wrong(column, text, f"at most {MAX_TOKENS:,} tokens")
    return tokens


def _read_seconds(text: str, place: _Place, column: str) -> float:
    try:
        seconds = float(text) if len(text) <= 40 else math.nan
    except ValueError:
        seconds = math.nan
    if not abs(seconds) <= MAX_SECONDS:
        raise place.wrong(column, text, "a time in seconds")
    return seconds


def _read_date(text: str, place: _Place, column: str) -> float:
    try:
        moment = datetime.fromisoformat(text.strip()[:40])
        # Azure's 2023 files have no zone, those of 2024 say +00:00: both are UTC.
        return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError) as error:
        raise place.wrong(column, text, "a date and time such as 2023-11-16 18:17:03.9799600") from error


def _read_ranges(text: str, place: _Place, column: str, most: int) -> tuple[tuple[int, int], ...]:
    ranges = []
    count = 0
    for word in text.split():
        first, dash, last = word.partition("-")
        pair = (first, last if dash else first)
        if not all(part.isdecimal() and part.isascii() and len(part) <= _MAX_DIGITS for part in pair):
            raise place.wrong(column, word, "block ids and ranges such as 0-13 20 31-33")
        low, high = int(pair[0]), int(pair[1])
        count += high - low + 1
        if high < low or count > most:
            raise place.wrong(column, word, f"rising ranges of at most {most:,} blocks in all, as the prompt has")
        ranges.append((low, high))
    return tuple(ranges)


def _compressed(ids: object, place: _Place, most: int) -> tuple[tuple[int, int], ...]:
    """Block ids as ranges of consecutive ids."""
    if not isinstance(ids, list) or len(ids) > most:
        raise place.wrong("hash_ids", ids, f"a list of at most {most:,} block ids, as the prompt has")
    ranges: list[tuple[int, int]] = []
    for entry in ids:
        if not isinstance(entry, int) or isinstance(entry, bool) or entry < 0:
            raise place.wrong("hash_ids", entry, "whole numbers from 0")
        if ranges and entry == ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], entry)
        else:
            ranges.append((entry, entry))
    return tuple(ranges)


def _json_number(row: dict, key: str, place: _Place, largest: float, *, whole: bool = False) -> float:
    value = row.get(key)
    correct = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not correct or not 0 <= value <= largest:  # type: ignore[operator]
        raise place.wrong(key, value, f"a {'whole ' if whole else ''}number, 0 to {largest:,.0f}")
    return value  # type: ignore[return-value]
