"""`LogRecord`: what a start-up or out-of-memory log of vLLM says, rank by rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# What torch's out-of-memory message says in any program.
TORCH_FACTS = frozenset({"failed_bytes", "total_bytes", "free_at_failure_bytes", "process_bytes", "torch_bytes"})


@dataclass(frozen=True)
class LogRecord:
    """The facts of one log.

    Attributes:
        version: vLLM's version where the log says it, else None.
        model: the model's name as printed; text from outside, escape before showing.
        flags: `EngineConfig` knobs that the log states.
        facts: field → value over all ranks: sizes in bytes; where ranks differ, the binding one's (largest use,
            smallest pool).
        ranks: rank name → field → value, for logs of several ranks.
        errors: causes named by error texts, in order, without repetition.
        unknown_arguments: what the parser of that version refused.
        num_lines, num_used: lines read, and lines that said something.
        notes: what was cut, doubtful or contradictory, one sentence each.
    """

    version: str | None = None
    model: str | None = None
    flags: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    ranks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    errors: tuple[str, ...] = ()
    unknown_arguments: tuple[str, ...] = ()
    num_lines: int = 0
    num_used: int = 0
    notes: tuple[str, ...] = ()

    @property
    def is_vllm(self) -> bool:
        """True when something in the text is vLLM's own, not torch's or any program's."""
        own_errors = set(self.errors) - {"out_of_memory", "unknown_flag"}
        return bool(self.version or self.model or own_errors or self.facts.keys() - TORCH_FACTS)
