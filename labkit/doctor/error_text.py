"""`labkit doctor --error-text`: from any line or log to cause, fix and how sure that is; unknown text stays unknown."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import files

from labkit.doctor.check import Check, Confidence, Examination
from labkit.errors import LabkitError
from labkit.format import MISSING
from labkit.memory.log_explanation import explain_log
from labkit.memory.logs import read_log
from labkit.text import plain

MAX_LINES = 500_000
MAX_LINE = 4_096
MAX_ANSWERS = 12
# Causes of which the log reader says less than the table.
_TABLE_SAYS_MORE = frozenset({"unknown-flag", "dtype-unsupported", "too-few-state-blocks"})


@dataclass(frozen=True)
class Known:
    """One error text of `error_texts.json`.

    Attributes:
        needle: plain text, lower case, that the line must hold.
        pattern: bounded expression whose groups fill {0}, {1} of cause and fix.
        generic: says only that something failed; shown last.
        cases: public reports that show it.
    """

    name: str
    needle: str
    pattern: re.Pattern[str]
    cause: str
    fix: str
    confidence: Confidence
    generic: bool = False
    cases: tuple[str, ...] = ()


@lru_cache(maxsize=1)
def known_errors() -> tuple[Known, ...]:
    """The table, in the order in which a line is compared with it."""
    rows = json.loads(files(__package__).joinpath("error_texts.json").read_text())["errors"]
    return tuple(
        Known(
            row["name"], row["needle"].lower(), re.compile(row.get("pattern") or re.escape(row["needle"]), re.I),
            row["cause"], row["fix"], row.get("confidence", "certain"), row.get("generic", False),
            tuple(row.get("cases", ())),
        )
        for row in rows
    )  # fmt: skip


def explain_error_text(text: str | Iterable[str]) -> Examination:
    """What a pasted line or a log says.

    Args:
        text: one line or many; control characters and colours do no harm.

    Returns:
        One check a known error, the most telling first; one "unknown" check where nothing is known.
    """
    lines = (text.splitlines() if isinstance(text, str) else list(text))[:MAX_LINES]
    found = _known_lines(lines)
    memory = _memory_answer(lines)
    names = {known.name for known, _ in found}
    checks = [_merged(check, memory) for known, check in found if not known.generic]
    if memory is not None and memory.cause and memory.name not in names and memory.name not in _TABLE_SAYS_MORE:
        checks.insert(0, memory)
    checks += [check for known, check in found if known.generic]
    if not checks:
        checks = [_nothing_known(lines)]
    facts = {"lines": len(lines), "errors": [check.name for check in checks if check.status == "problem"]}
    return Examination("error text", tuple(checks[:MAX_ANSWERS]), facts)


def _known_lines(lines: Iterable[str]) -> list[tuple[Known, Check]]:
    """The first line of each known error, in the log's order."""
    table = known_errors()
    needles = re.compile("|".join(sorted({re.escape(known.needle) for known in table}, key=len, reverse=True)), re.I)
    found: dict[str, tuple[Known, Check]] = {}
    for number, line in enumerate(lines, 1):
        line = line[:MAX_LINE]
        if not needles.search(line):
            continue
        shown = plain(line.strip(), MAX_LINE)
        for known, match in _matches(shown, table):
            found.setdefault(known.name, (known, _check(known, match, shown, number)))
    return list(found.values())


def _matches(line: str, table: Iterable[Known]) -> list[tuple[Known, re.Match[str]]]:
    """Known errors of one line; of two that overlap the one that stands earlier in the table."""
    folded = line.lower()
    found: list[tuple[Known, re.Match[str]]] = []
    for known in table:
        match = known.pattern.search(line) if known.needle in folded else None
        if match and all(match.end() <= other.start() or other.end() <= match.start() for _, other in found):
            found.append((known, match))
    return found


def _check(known: Known, match: re.Match[str], line: str, number: int) -> Check:
    words = [plain(group or "", 120) for group in match.groups()]
    evidence = f"line {number}: {_around(line, match)}"
    return Check(
        known.name, "problem", evidence, _filled(known.cause, words), _filled(known.fix, words), known.confidence
    )


def _around(line: str, match: re.Match[str]) -> str:
    if len(line) <= 240:
        return line
    start = max(0, match.start() - 60)
    return ("…" if start else "") + line[start : start + 240] + "…"


def _filled(text: str, words: list[str]) -> str:
    for index, word in enumerate(words):
        text = text.replace(f"{{{index}}}", word)
    return text


def _merged(check: Check, memory: Check | None) -> Check:
    """The table's answer with the log reader's numbers before it, where both found the same cause."""
    if memory is None or memory.name != check.name or check.name in _TABLE_SAYS_MORE:
        return check
    parts = [(memory.cause, check.cause), (memory.fix, check.fix)]
    cause, fix = ("; ".join(dict.fromkeys(text for text in pair if text)) for pair in parts)
    return replace(check, cause=cause, fix=fix)


def _memory_answer(lines: list[str]) -> Check | None:
    """The memory log reader's answer, where the text has numbers for it."""
    try:
        record = read_log(lines)
        if not record.errors:
            return None
        found = explain_log(record)
    except LabkitError:
        return None
    if found.cause in ("not_vllm", "fits", "incomplete"):
        return None
    # A single line often lacks half of the numbers: what can be done about it then still helps.
    answer = "" if MISSING in found.answer else found.answer
    cures = "; ".join(cure.text for cure in found.cures[:3])
    evidence = f"{record.num_used} of {record.num_lines} lines are vLLM's memory output"
    sure: Confidence = "certain" if found.plan is not None else "likely"
    return Check(found.cause.replace("_", "-"), "problem", evidence, answer, cures, sure)


def _nothing_known(lines: list[str]) -> Check:
    words = sum(bool(line.strip()) for line in lines)
    first = next((plain(line.strip(), 120) for line in reversed(lines) if line.strip()), "")
    return Check(
        "error-text",
        "unknown",
        f"{words} lines; the last: {first}" if words else "no text",
        "none of the known error texts is in it: labkit does not know this one",
        "give the whole log from the start: the first error is often far above the last line",
    )


def covered_cases() -> Mapping[str, str]:
    """Public case → the error that answers it."""
    return {case: known.name for known in known_errors() for case in known.cases}
