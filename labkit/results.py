"""Results files: what a benchmark measured, with the bars it is held to, in one form for all of them.

`{made, command, card, versions, rows, summary, …}`; `summary` has one entry for each number that was promised:
`{value, at_least | at_most, aim, ok}`, misses included.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from labkit.files import write_atomic
from labkit.versions import versions


def at_least(value: float | None, bar: float, aim: float | None = None) -> dict[str, Any]:
    """A number that must not be smaller than `bar`; None was not measured and is a miss."""
    return _entry("at_least", value, bar, aim, value is not None and value >= bar)


def at_most(value: float | None, bar: float, aim: float | None = None) -> dict[str, Any]:
    """A number that must not be larger than `bar`; None was not measured and is a miss."""
    return _entry("at_most", value, bar, aim, value is not None and value <= bar)


def _entry(kind: str, value: float | None, bar: float, aim: float | None, ok: bool) -> dict[str, Any]:
    return {"value": value, kind: bar, "aim": bar if aim is None else aim, "ok": bool(ok)}


def write_results(
    path: str | os.PathLike[str],
    *,
    command: str,
    rows: Sequence[Mapping[str, Any]],
    summary: Mapping[str, Mapping[str, Any]],
    card: str = "none (CPU)",
    **details: Any,
) -> dict[str, Any]:
    """Write a results file and return its content.

    Args:
        command: what anyone can type to make it again.
        rows: the single measurements.
        summary: promised number → `at_least(…)` or `at_most(…)`.
        card: the GPU, with its memory.
        details: anything else worth keeping, plain values.

    Raises:
        FileFormatError: the folder cannot be written.
    """
    content = {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "card": card,
        "versions": versions(),
        "summary": dict(summary),
        **details,
        "rows": list(rows),
    }
    write_atomic(Path(path), json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    return content
