"""Errors of labkit: each says what was needed, what there was, what works, and which knob to turn."""

from __future__ import annotations

from typing import Any


class LabkitError(Exception):
    """Base of every error that labkit raises on purpose.

    The four optional parts make the four-part message that the panel, the command line and the docs show;
    they are kept as attributes so that no caller has to parse text.

    Args:
        message: what is wrong, in one sentence without a final period.
        needed: what the request needs, with its unit.
        available: what there is, with its unit.
        works: the largest (or nearest) value that would work.
        knob: the setting to turn, by its vLLM name.
    """

    def __init__(
        self,
        message: str,
        *,
        needed: str | None = None,
        available: str | None = None,
        works: str | None = None,
        knob: str | None = None,
    ) -> None:
        self.message = message
        self.needed = needed
        self.available = available
        self.works = works
        self.knob = knob
        super().__init__(message)

    def __str__(self) -> str:
        parts = [
            f"needed: {self.needed}" if self.needed else "",
            f"available: {self.available}" if self.available else "",
            f"would work: {self.works}" if self.works else "",
            f"turn: {self.knob}" if self.knob else "",
        ]
        details = "; ".join(part for part in parts if part)
        return f"{self.message} ({details})" if details else self.message

    @property
    def section(self) -> str:
        """Where the docs explain this kind of error."""
        return f"docs/errors.md#{type(self).__name__.lower()}"

    def __reduce__(self) -> tuple[Any, ...]:
        keywords = {name: getattr(self, name) for name in ("needed", "available", "works", "knob")}
        return _rebuild, (type(self), self.message, keywords)


def _rebuild(cls: type[LabkitError], message: str, keywords: dict) -> LabkitError:
    return cls(message, **keywords)


class UnknownNameError(LabkitError, TypeError):
    """A knob, model, GPU, column or command that does not exist; names the nearest that does."""


class OutOfRangeError(LabkitError, ValueError):
    """A value of a known knob outside what is allowed."""


class FileFormatError(LabkitError, ValueError):
    """A file that is missing, truncated, inconsistent, over a stated limit or of another kind."""


class UnsupportedError(LabkitError):
    """Something real that this version of labkit does not do; says what it does instead."""


class DoesNotFitError(LabkitError):
    """A configuration or request that memory cannot hold."""


class StoreError(LabkitError):
    """The run store cannot be read or written."""


class WorkerError(LabkitError):
    """The worker process died, hung or answered with an error; the session stays usable."""


class RankError(WorkerError):
    """One of the processes that share a model died, hung or failed; all of them were ended."""


class CancelledError(LabkitError):
    """The user cancelled; what was finished is kept."""
