"""Reading a log: limits on file, line and number, control characters removed, one pass, linear time."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from labkit.errors import FileFormatError
from labkit.format import memory
from labkit.memory.logs.flags import command_flags, config_flags, model_name
from labkit.memory.logs.patterns import ERROR_TEXTS, PATTERNS, RANK, RANK_PART, SIZES, VERSIONS, Pattern
from labkit.memory.logs.record import LogRecord
from labkit.text import plain

MAX_BYTES = 64 * 2**20
MAX_LINE = 16_384
# Terminal control sequences: colours and cursor moves, and window titles.
_ESCAPES = re.compile(
    r"\x1b\[[0-9;?]{0,24}[A-Za-z]|\x1b\][^\x07\x1b]{0,200}(?:\x07|\x1b\\)?|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)
# Fields of which the rank that binds has the smallest value; of the others it has the largest.
_SMALLEST = frozenset(
    {"available_kv_bytes", "free_bytes", "num_gpu_blocks", "kv_cache_tokens", "free_at_failure_bytes"}
)


def read_log_file(path: str | os.PathLike[str]) -> LogRecord:
    """The record of a log file.

    Raises:
        FileFormatError: missing, unreadable or over 64 MiB.
    """
    path = Path(path)
    try:
        size = path.stat().st_size
        if not path.is_file():
            raise FileFormatError(f"{plain(path)} is no file", works="the path of a log")
        if size > MAX_BYTES:
            raise FileFormatError(
                f"{plain(path.name)} is too long for a log",
                needed=f"at most {memory(MAX_BYTES)}",
                available=memory(size),
                works="the part from the server's start to the first request",
            )
        with path.open("rb") as file:
            return read_log(_decoded(file))
    except (OSError, ValueError) as error:
        if isinstance(error, FileFormatError):
            raise
        why = "there is no such file" if isinstance(error, FileNotFoundError) else plain(error)
        raise FileFormatError(f"cannot read {plain(path)}: {why}", works="the path of a log") from error


def _decoded(file: Any) -> Iterator[str]:
    """Lines of at most MAX_LINE characters; the rest of a longer one is dropped."""
    while raw := file.readline(MAX_LINE):
        yield raw.decode("utf-8", errors="replace")
        while len(raw) == MAX_LINE and not raw.endswith(b"\n"):
            raw = file.readline(MAX_LINE)


def read_log(text: str | Iterable[str]) -> LogRecord:
    """The record of a log's text or lines; anything else than vLLM's words is passed over.

    Raises:
        FileFormatError: a text over 64 MiB.
    """
    if isinstance(text, str):
        if len(text) > MAX_BYTES:
            raise FileFormatError("the text is too long for a log", needed=f"at most {memory(MAX_BYTES)}")
        text = text.splitlines()
    collected = _Collected()
    for line in text:
        collected.add(line[:MAX_LINE])
    return collected.record()


class _Collected:
    """What has been found so far."""

    def __init__(self) -> None:
        self.ranks: dict[str, dict[str, Any]] = {}
        self.flags: dict[str, Any] = {}
        self.errors: list[str] = []
        self.unknown: list[str] = []
        self.version: str | None = None
        self.model: str | None = None
        self.num_lines = self.num_used = self.num_cut = 0

    def add(self, raw: str) -> None:
        """Take one line."""
        self.num_lines += 1
        self.num_cut += len(raw) >= MAX_LINE
        line = _ESCAPES.sub("", raw) if not raw.isprintable() else raw
        used = self._versions(line)
        used |= self._settings(line)
        for text, cause in ERROR_TEXTS:
            if text in line and cause not in self.errors:
                self.errors.append(cause)
                used = True
        if "unrecognized arguments" in line:
            self.unknown += [plain(word, 80) for word in line.split("unrecognized arguments:")[-1].split()[:16]]
        for pattern in PATTERNS:
            if pattern.needle in line:
                used |= self._facts(pattern, line)
        self.num_used += used

    def _versions(self, line: str) -> bool:
        if self.version is not None or ("vLLM" not in line and "vllm" not in line and "LLM engine" not in line):
            return False
        for pattern in VERSIONS:
            if found := pattern.search(line):
                self.version = found.group(1)
                return True
        return False

    def _settings(self, line: str) -> bool:
        found = config_flags(line) | command_flags(line)
        self.model = self.model or model_name(line)
        for name, value in found.items():
            self.flags.setdefault(name, value)
        return bool(found)

    def _facts(self, pattern: Pattern, line: str) -> bool:
        match = pattern.pattern.search(line)
        if match is None:
            return False
        rank = self.ranks.setdefault(_rank(line), {})
        groups = match.groups()
        step = 2 if pattern.units else 1
        for index, name in enumerate(pattern.fields):
            text = groups[index * step]
            if text is not None:
                unit = groups[index * step + 1] if pattern.units else "GiB"
                rank[name] = _value(name, text, unit)
        return True

    def record(self) -> LogRecord:
        """The finished record."""
        facts = _over_ranks(self.ranks)
        names = ("max_model_len", "max_num_batched_tokens", "max_num_seqs", "gpu_memory_utilization")
        stated = {name: facts[name] for name in names if name in facts}
        notes = _notes(self, facts)
        named = {rank: dict(values) for rank, values in self.ranks.items() if rank}
        return LogRecord(
            self.version, self.model, {**self.flags, **stated}, facts, named if len(named) > 1 else {},
            tuple(self.errors), tuple(dict.fromkeys(self.unknown)), self.num_lines, self.num_used, notes,
        )  # fmt: skip


def _rank(line: str) -> str:
    """The rank that wrote a line, as "PP1 TP0"; "" where the line does not say."""
    found = RANK.search(line)
    if found is None:
        return ""
    return " ".join(
        f"{kind.strip('= ').replace('rank', 'rank ')}{number}" for kind, number in RANK_PART.findall(found[0])
    )


def _value(name: str, text: str, unit: str) -> Any:
    number = text.replace(",", "")
    if name.endswith("_bytes"):
        return round(float(number) * SIZES[unit])
    return float(number) if name in ("max_concurrency", "gpu_memory_utilization") else int(float(number))


def _over_ranks(ranks: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """One value for each field: the binding rank's where it says one, else the one that would bind."""
    facts: dict[str, Any] = {}
    for values in ranks.values():
        for name, value in values.items():
            pick = min if name in _SMALLEST else max
            facts[name] = pick(facts[name], value) if name in facts else value
    pools = [values for rank, values in ranks.items() if rank and "available_kv_bytes" in values]
    if len(pools) > 1:
        facts |= min(pools, key=lambda values: values["available_kv_bytes"])
    if "pool_bytes" in facts:
        facts.setdefault("available_kv_bytes", facts["pool_bytes"])
    if "consumed_bytes" in facts and "weights_bytes" in facts and "non_torch_bytes" not in facts:
        facts["non_torch_bytes"] = max(0, facts["consumed_bytes"] - facts["weights_bytes"])
    if "peak_torch_bytes" in facts and "weights_bytes" in facts and "activation_bytes" not in facts:
        facts["activation_bytes"] = facts["peak_torch_bytes"] - facts["weights_bytes"]
    return facts


def _notes(found: _Collected, facts: dict[str, Any]) -> tuple[str, ...]:
    notes = []
    if found.num_cut:
        notes.append(f"{found.num_cut} lines were longer than {MAX_LINE:,} characters and were cut")
    if facts and found.version is None:
        notes.append("the log does not say vLLM's version: it was cut, or begins after the start")
    if facts.get("weights_bytes") and not {"available_kv_bytes", "num_gpu_blocks"} & facts.keys() and not found.errors:
        notes.append("the log ends before the KV cache is sized")
    return tuple(notes)
