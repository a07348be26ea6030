"""Reading config.json: size, nesting and number limits, then typed access to named keys and to no others."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from labkit.errors import FileFormatError
from labkit.text import plain

MAX_CONFIG_BYTES = 2 * 2**20
MAX_NESTING = 32
MAX_NUMBER_DIGITS = 40
# Keys that make other libraries import code or fetch from elsewhere; labkit never reads them.
_UNSAFE_KEYS = frozenset({"auto_map", "trust_remote_code", "custom_pipelines"})


def read_config_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The JSON object in `path`.

    Raises:
        FileFormatError: missing, over 2 MiB, no UTF-8, no JSON object, nested deeper than 32, or a number of more than
            40 digits.
    """
    path = Path(path)
    try:
        if not path.is_file():
            raise FileFormatError(f"there is no file {plain(path)}", works="the path of a config.json")
        with path.open("rb") as file:
            data = file.read(MAX_CONFIG_BYTES + 1)
    except FileFormatError:
        raise
    except OSError as error:
        raise FileFormatError(f"cannot read {plain(path)}: {error.strerror or error}") from error
    except ValueError as error:
        raise FileFormatError(f"{plain(path)} is no file name: {plain(error)}") from error
    return parse_config(data, plain(path.name))


def parse_config(data: bytes, where: str) -> dict[str, Any]:
    """The JSON object in `data`; the limits and errors of `read_config_file`."""
    if len(data) > MAX_CONFIG_BYTES:
        raise FileFormatError(
            f"{where} is too large for a config", needed="at most 2 MiB", available=f"over {MAX_CONFIG_BYTES} bytes"
        )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FileFormatError(f"{where} is not UTF-8 at byte {error.start}") from error
    try:
        values = json.loads(text, parse_int=_int_within_limits, parse_float=_float_within_limits)
    except json.JSONDecodeError as error:
        raise FileFormatError(
            f"{where} is no JSON: {error.msg} at line {error.lineno}, column {error.colno}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise FileFormatError(f"{where} is no JSON that labkit reads: {plain(error)}") from error
    _check_nesting(values, where)
    if not isinstance(values, dict):
        raise FileFormatError(f"{where} holds a {type(values).__name__}, not a JSON object")
    return values


def strip_unsafe(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` without the keys that could make transformers run or fetch code (auto_map, `_…`), at every depth."""
    return {
        key: strip_unsafe(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if isinstance(key, str) and not key.startswith("_") and key not in _UNSAFE_KEYS
    }


def _check_nesting(values: Any, where: str) -> None:
    level = [values] if isinstance(values, (dict, list)) else []
    depth = 0
    while level:
        depth += 1
        if depth > MAX_NESTING:
            raise FileFormatError(f"{where} is nested too deep", needed=f"at most {MAX_NESTING} levels")
        children: list[Any] = []
        for value in level:
            entries = value.values() if isinstance(value, dict) else value
            children += [entry for entry in entries if isinstance(entry, (dict, list))]
        level = children


def _int_within_limits(digits: str) -> int:
    if len(digits) > MAX_NUMBER_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits; at most {MAX_NUMBER_DIGITS} are read")
    return int(digits)


def _float_within_limits(digits: str) -> float:
    if len(digits) > 400:
        raise ValueError(f"a number of {len(digits)} digits; at most 400 are read")
    return float(digits)


class ConfigFields:
    """Typed and bounded access to the keys of one config, by name only.

    A key whose value is null is silent, but no default is put in its place. Every method takes several names, of
    which the first present one is read: families name the same thing differently.

    Args:
        values: the config, or one of its sections.
        where: how errors name it.
        fallback: a config asked for keys that `values` lacks, such as the wrapper of a `text_config`.
    """

    def __init__(self, values: Mapping[str, Any], where: str, fallback: Mapping[str, Any] | None = None) -> None:
        self._values = values
        self._fallback = fallback or {}
        self.where = where

    def raw(self, *names: str) -> Any:
        """The first present value, unchecked; None when there is none or the config says null."""
        if any(name in self._values for name in names):
            return self.own(*names)
        return next((self._fallback[name] for name in names if self._fallback.get(name) is not None), None)

    def own(self, *names: str) -> Any:
        """As `raw`, without the fallback."""
        return next((self._values[name] for name in names if self._values.get(name) is not None), None)

    def with_fallback(self, other: ConfigFields) -> ConfigFields:
        """These fields, with those of `other` where they are silent."""
        return ConfigFields(self._values, self.where, {**other._fallback, **other._values, **self._fallback})

    def with_values(self, **values: Any) -> ConfigFields:
        """These fields with `values` set."""
        return ConfigFields({**self._values, **values}, self.where, self._fallback)

    def only(self, *names: str) -> ConfigFields:
        """The fields called `names`."""
        kept = {name: value for name, value in {**self._fallback, **self._values}.items() if name in names}
        return ConfigFields(kept, self.where)

    def has(self, name: str) -> bool:
        """`name` is there and not null."""
        return self.raw(name) is not None

    def integer(self, *names: str, default: int | None = None, minimum: int = 1, maximum: int = 2**31) -> int:
        """A whole number within the range.

        Raises:
            FileFormatError: no such key and no default, another type, or out of range.
        """
        found = self.optional_integer(*names, minimum=minimum, maximum=maximum)
        if found is not None:
            return found
        if default is None:
            raise FileFormatError(f"{self.where} does not say {names[0]}", works=f"a config.json with {names[0]}")
        return default

    def optional_integer(self, *names: str, minimum: int = 0, maximum: int = 2**31) -> int | None:
        """A whole number within the range, or None when no key is there."""
        value = self.raw(*names)
        return None if value is None else self._whole(names, value, minimum, maximum)

    def integers(self, *names: str, minimum: int = 0, maximum: int = 2**31, longest: int = 8192) -> tuple[int, ...]:
        """A list of whole numbers; () when no key is there."""
        value = self.raw(*names)
        if value is None:
            return ()
        if not isinstance(value, list) or len(value) > longest:
            raise self._error(names, value, f"a list of at most {longest} whole numbers")
        return tuple(self._whole(names, entry, minimum, maximum) for entry in value)

    def number(self, *names: str, default: float, minimum: float = -1e30, maximum: float = 1e30) -> float:
        """A finite number within the range."""
        value = self.raw(*names)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self._error(names, value, "a finite number")
        if not minimum <= value <= maximum:
            raise self._error(names, value, f"{minimum:g} to {maximum:g}")
        return float(value)

    def optional_number(self, *names: str, minimum: float = -1e30, maximum: float = 1e30) -> float | None:
        """A finite number within the range, or None when no key is there."""
        if self.raw(*names) is None:
            return None
        return self.number(*names, default=0.0, minimum=minimum, maximum=maximum)

    def flag(self, *names: str, default: bool = False) -> bool:
        """True or False; 0 and 1 are accepted."""
        value = self.raw(*names)
        if value is None:
            return default
        if isinstance(value, bool) or value in (0, 1):
            return bool(value)
        raise self._error(names, value, "true or false")

    def text(self, *names: str, default: str = "") -> str:
        """A string of at most 1000 characters."""
        value = self.raw(*names)
        if value is None:
            return default
        if not isinstance(value, str) or len(value) > 1000:
            raise self._error(names, value, "text of at most 1000 characters")
        return value

    def texts(self, *names: str, longest: int = 8192) -> tuple[str, ...]:
        """A list of strings of at most 200 characters; () when no key is there."""
        value = self.raw(*names)
        if value is None:
            return ()
        if not isinstance(value, list) or len(value) > longest:
            raise self._error(names, value, f"a list of at most {longest} texts")
        for entry in value:
            if not isinstance(entry, str) or len(entry) > 200:
                raise self._error(names, entry, "text of at most 200 characters")
        return tuple(value)

    def section(self, *names: str) -> ConfigFields | None:
        """A nested object, or None when no key is there."""
        value = self.raw(*names)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self._error(names, value, "a JSON object")
        return ConfigFields(value, f"{names[0]} of {self.where}")

    def keys(self) -> tuple[str, ...]:
        """Names of this section's own keys."""
        return tuple(str(key) for key in self._values)

    def _whole(self, names: tuple[str, ...], value: Any, minimum: int, maximum: int) -> int:
        if isinstance(value, float) and math.isfinite(value) and value == int(value):
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._error(names, value, "a whole number")
        if not minimum <= value <= maximum:
            raise self._error(names, value, f"{minimum:,} to {maximum:,}")
        return value

    def _error(self, names: tuple[str, ...], value: Any, allowed: str) -> FileFormatError:
        shown = plain(repr(value), 80)
        return FileFormatError(f"{names[0]} in {self.where} is {shown}", needed=allowed)
