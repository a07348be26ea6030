"""Text that comes from outside (model names, notes, trace columns, log lines) made safe to show."""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Iterable

# Bidirectional overrides and isolates reorder what a reader sees (CVE-2021-42574).
_BIDI = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")

# The last two end a line in YAML, JavaScript and Python's splitlines.
_BREAKS = "\t\r\n\u2028\u2029"


def plain(text: object, limit: int = 500) -> str:
    """`text` as one line without control or bidirectional characters, at most `limit` characters long.

    For terminals, logs and error messages: no escape sequence survives.
    """
    cleaned = "".join(
        " " if char in _BREAKS else char
        for char in str(text)[: limit * 4]
        if char in _BREAKS or (unicodedata.category(char) not in ("Cc", "Cs") and char not in _BIDI)
    )
    return cleaned if len(cleaned) <= limit else cleaned[: limit - 1] + "…"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The entry of `known` that looks most like `name`, or None when nothing does."""
    by_folded = {entry.casefold(): entry for entry in known}
    matches = difflib.get_close_matches(str(name).casefold(), by_folded, n=1, cutoff=0.5)
    return by_folded[matches[0]] if matches else None


def brief(record: object, *fields: str) -> str:
    """One line for the `repr` of a large record: a few of its fields, so that a notebook's cell stays readable.

    A field that has a name itself (a model, a card) is shown by it; text is made plain, floats get four digits.
    """
    shown = ((field, getattr(record, field)) for field in fields)
    words = (f"{field}={_brief_value(getattr(value, 'name', value))}" for field, value in shown)
    return f"{type(record).__name__}({', '.join(words)})"


def _brief_value(value: object) -> str:
    if isinstance(value, str):
        return repr(plain(value, 120))
    return f"{value:.4g}" if isinstance(value, float) else plain(repr(value), 200)
