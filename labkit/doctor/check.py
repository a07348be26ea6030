"""`Check` and `Examination`: what the doctor looked at, what it saw, why it matters and what mends it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from labkit.text import plain

Status = Literal["ok", "warning", "problem", "unknown"]
Confidence = Literal["", "certain", "likely", "possible"]
COLUMNS = ("status", "check", "evidence", "cause", "fix")
STATUSES: tuple[Status, ...] = ("problem", "warning", "unknown", "ok")


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: short and stable, such as "driver-runtime"; scripts may look for it.
        status: "ok"; "warning" where it works but costs or may fail later; "problem" where it will not work;
            "unknown" where it could not be looked at.
        evidence: what was seen, with values and units.
        cause: why that is so; "" where all is well.
        fix: the command or change that mends it, shown and never run; "" where there is nothing to mend.
        confidence: of the cause: "certain", "likely" or "possible"; "" where the evidence is the cause itself.
    """

    name: str
    status: Status
    evidence: str
    cause: str = ""
    fix: str = ""
    confidence: Confidence = ""

    def to_dict(self) -> dict[str, str]:
        """As JSON: every text on one line, without control characters."""
        return {
            "name": self.name,
            "status": self.status,
            "evidence": plain(self.evidence, 1000),
            "cause": plain(self.cause, 1000),
            "fix": plain(self.fix, 1000),
            **({"confidence": self.confidence} if self.confidence else {}),
        }


@dataclass(frozen=True)
class Examination:
    """Checks under one title, with facts for machines beside them.

    Attributes:
        title: what was examined.
        checks: in the order of looking.
        facts: JSON values for scripts, such as the releases that run here.
    """

    title: str
    checks: tuple[Check, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """0: nothing to mend; 1: warnings; 2: a problem. What could not be looked at changes nothing."""
        found = {check.status for check in self.checks}
        return 2 if "problem" in found else 1 if "warning" in found else 0

    @property
    def sentence(self) -> str:
        """The answer in one sentence."""
        counts = {status: sum(check.status == status for check in self.checks) for status in STATUSES}
        worst = next((check for check in self.checks if check.status == "problem"), None)
        words = [
            _counted(counts["problem"], "problem"),
            _counted(counts["warning"], "warning"),
            f"{counts['unknown']} not looked at" if counts["unknown"] else "",
            f"{counts['ok']} well" if counts["ok"] else "",
        ]
        first = f"; first: {worst.cause or worst.evidence}" if worst else ""
        return plain(f"{self.title}: {', '.join(word for word in words if word) or 'nothing to look at'}{first}", 1000)

    def rows(self) -> list[list[str]]:
        """Status, name, evidence, cause and fix as text, the worst first: under `COLUMNS`."""
        ordered = sorted(self.checks, key=lambda check: STATUSES.index(check.status))
        return [[entry["status"], entry["name"], entry["evidence"], entry["cause"], entry["fix"]]
                for entry in (check.to_dict() for check in ordered)]  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """As `labkit doctor --json` prints it."""
        return {
            "title": self.title,
            "answer": self.sentence,
            "exit_code": self.exit_code,
            "checks": [check.to_dict() for check in self.checks],
            **({"facts": dict(self.facts)} if self.facts else {}),
        }


def joined(title: str, parts: Iterable[Examination]) -> Examination:
    """Several examinations as one."""
    found = tuple(parts)
    facts = {key: value for part in found for key, value in part.facts.items()}
    return Examination(title, tuple(check for part in found for check in part.checks), facts)


def looked(look: Callable[..., Check], *arguments: Any) -> Check:
    """The check that `look` makes; one that fails itself is unknown, and the others still run."""
    try:
        return look(*arguments)
    except Exception as error:
        # A foreign machine has states that nobody thought of; whatever was raised is the evidence.
        name = getattr(look, "__name__", "look").removeprefix("check_").replace("_", "-")
        return Check(name, "unknown", f"{type(error).__name__}: {plain(error, 300)}", "this look failed")


def _counted(number: int, word: str) -> str:
    return f"{number} {word}{'s' if number > 1 else ''}" if number else ""
