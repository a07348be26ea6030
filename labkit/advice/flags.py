"""vLLM's command-line flags by version, as data: what exists, its kind, default and choices, and what replaced it."""

from __future__ import annotations

import difflib
import functools
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from labkit.errors import OutOfRangeError
from labkit.specs.knob_text import parse_size
from labkit.text import plain

# Flags of the HTTP server, not of the engine: the recorded table covers engine flags only.
_SWITCH_PREFIXES = ("--enable-", "--disable-", "--no-", "--use-")
# vLLM reads these with `human_readable_int`: 8k is 8,000, 8K is 8,192.
_SIZES = ("--max-model-len", "--max-num-batched-tokens", "--kv-cache-memory-bytes")
_SERVER_FLAGS = ("--host", "--port", "--api-key", "--model", "--uvicorn-log-level", "--disable-log-requests")


@dataclass(frozen=True)
class Flag:
    """One flag in one version.

    Attributes:
        kind: "bool" (has a --no- form), "flag" (no value), "int", "float", "str", "list" or "json".
        default: as the parser states it; None where it is computed at start-up.
        choices: the only values that the parser takes; empty where it takes any.
        known: values that are listed but not enforced by the parser.
    """

    name: str
    since: str
    until: str
    kind: str
    default: Any
    choices: tuple[Any, ...] = ()
    known: tuple[Any, ...] = ()
    nargs: str = ""
    aliases: tuple[str, ...] = ()
    deprecated: bool = False


@dataclass(frozen=True)
class FlagHistory:
    """A flag over all recorded versions; `until` is None while the newest recorded version has it."""

    name: str
    since: str
    until: str | None
    replaced_by: str | None
    difference: str
    entries: tuple[Flag, ...]


@functools.lru_cache(maxsize=1)
def _table() -> Mapping[str, Any]:
    return MappingProxyType(json.loads(files(__package__).joinpath("vllm_flags.json").read_text()))


@functools.lru_cache(maxsize=1)
def flag_notes() -> Mapping[str, Any]:
    """What the recorded parsers do not say: replacements, differences, values by attention backend."""
    return MappingProxyType(json.loads(files(__package__).joinpath("vllm_flag_notes.json").read_text())["flags"])


def known_versions() -> tuple[str, ...]:
    """Recorded vLLM versions, oldest first: the last patch of each minor version."""
    return tuple(_table()["versions"])


def version_tuple(version: str) -> tuple[int, ...]:
    """ "0.33.0" as (0, 33, 0); a leading v and a suffix such as .post1 are dropped.

    Raises:
        OutOfRangeError: the text is no version.
    """
    found = re.fullmatch(r"v?(\d{1,4})\.(\d{1,4})(?:\.(\d{1,4}))?(?:[.+-]?[a-z][a-z0-9.]{0,40})?", str(version).strip())
    if found is None:
        raise OutOfRangeError(f"{plain(version, 40)!r} is no vLLM version", works="0.33.0", knob="--vllm")
    return tuple(int(part or 0) for part in found.groups())


def recorded_version(version: str) -> tuple[str, str]:
    """The recorded version that stands for `version`, and a sentence where it is another one, else "".

    The same minor version is taken as equal; an unknown one is replaced by the nearest older one, or the oldest.
    """
    wanted = version_tuple(version)
    known = known_versions()
    same_minor = [name for name in known if version_tuple(name)[:2] == wanted[:2]]
    if same_minor:
        older = [name for name in same_minor if version_tuple(name) <= wanted]
        return (older[-1] if older else same_minor[0]), ""
    older = [name for name in known if version_tuple(name) <= wanted]
    nearest = older[-1] if older else known[0]
    return nearest, f"the flags of vLLM {plain(version, 40)} are not recorded; those of {nearest} are used"


def flags_for(version: str) -> Mapping[str, Flag]:
    """Flag name → flag, for the recorded version that stands for `version`."""
    return _flags_of(recorded_version(version)[0])


@functools.lru_cache(maxsize=64)
def _flags_of(recorded: str) -> Mapping[str, Flag]:
    wanted = version_tuple(recorded)
    found = {}
    for name, entries in _table()["flags"].items():
        for entry in entries:
            if version_tuple(entry["since"]) <= wanted <= version_tuple(entry["until"]):
                found[name] = _flag(name, entry)
    return MappingProxyType(found)


def _flag(name: str, entry: Mapping[str, Any]) -> Flag:
    default = entry.get("default")
    return Flag(
        name=name,
        since=entry["since"],
        until=entry["until"],
        kind=entry["kind"],
        default=None if isinstance(default, dict) else default,
        choices=tuple(entry.get("choices", ())),
        known=tuple(entry.get("known", ())),
        nargs=entry.get("nargs", ""),
        aliases=tuple(entry.get("aliases", ())),
        deprecated=entry.get("deprecated", False),
    )


def flag_history(name: str) -> FlagHistory | None:
    """The history of one flag; None for a flag that no recorded version has."""
    entries = _table()["flags"].get(name)
    if not entries:
        return None
    note = flag_notes().get(name, {})
    last = entries[-1]["until"]
    return FlagHistory(
        name=name,
        since=entries[0]["since"],
        until=None if last == known_versions()[-1] else last,
        replaced_by=note.get("replaced_by"),
        difference=note.get("difference", ""),
        entries=tuple(_flag(name, entry) for entry in entries),
    )


def in_range(version: str, ranges: Sequence[Mapping[str, Any]]) -> Any:
    """The `value` of the entry of `ranges` (minor versions, both ends included) that covers `version`, else None."""
    minor = version_tuple(version)[:2]
    for entry in ranges:
        if version_tuple(entry["since"])[:2] <= minor <= version_tuple(entry["until"])[:2]:
            return entry["value"]
    return None


def effective_default(name: str, version: str) -> Any:
    """What vLLM does when the flag is not given: from the notes, else the parser's default, else None."""
    noted = in_range(version, flag_notes().get(name, {}).get("effective_default", ()))
    if noted is not None:
        return noted
    flag = flags_for(version).get(name)
    return flag.default if flag else None


@dataclass(frozen=True)
class GivenFlag:
    """One flag of a command.

    Attributes:
        written: as it stands there, with dashes instead of underscores.
        flag: what the recorded parser takes it for; None where it knows none.
        value: its value as text, "" for a switch.
        is_on: False for a switch that is turned off.
    """

    written: str
    flag: Flag | None
    value: str
    is_on: bool = True


def split_command(command: str) -> list[str]:
    """The words of a command as a shell sees them: lines joined, comments left out.

    Raises:
        ValueError: a quotation that does not end.
    """
    return shlex.split(command.replace("\\\n", " "), comments=True)


def given_flags(words: Sequence[str], version: str) -> tuple[tuple[str, ...], tuple[GivenFlag, ...]]:
    """The words of a server's command, without the program, as the parser of `version` takes them apart.

    Returns:
        Words that belong to no flag (the model), and the flags in their order.
    """
    by_name = {alias: flag for flag in flags_for(version).values() for alias in (flag.name, *flag.aliases)}
    free: list[str] = []
    found: list[GivenFlag] = []
    position = 0
    while position < len(words):
        written, equals, value = words[position].partition("=")
        position += 1
        # vLLM's parser takes --max_model_len for --max-model-len.
        name = written.replace("_", "-") if written.startswith("--") else written
        if not name.startswith("-") or name == "-":
            free.append(words[position - 1])
            continue
        negated = _negated(name, by_name, version)
        flag = by_name.get(name) or negated
        is_switch = flag is not None and (flag.kind in ("bool", "flag") or flag.nargs == "?")
        is_switch = is_switch or (flag is None and name.startswith(_SWITCH_PREFIXES))
        if not is_switch and not equals and position < len(words) and not words[position].startswith("--"):
            value = words[position]
            position += 1
        is_on = name in by_name or negated is None
        found.append(GivenFlag(name, flag, value, is_on and value.casefold() != "false"))
    return tuple(free), tuple(found)


def check_command(command: str | Sequence[str], version: str) -> tuple[str, ...]:
    """What the recorded parser of `version` would refuse in a `vllm serve` command; empty when it takes all of it."""
    words = split_command(command) if isinstance(command, str) else list(command)
    words = words[2:] if words[:2] == ["vllm", "serve"] else words
    names = {alias: flag for flag in flags_for(version).values() for alias in (flag.name, *flag.aliases)}
    problems: list[str] = []
    for given in given_flags(words, version)[1]:
        if given.written in _SERVER_FLAGS or not given.written.startswith("--"):
            continue
        if given.flag is None:
            problems.append(_unknown(given.written, version, names))
        elif given.flag.kind not in ("bool", "flag") and given.flag.nargs != "?":
            problems.extend(_check_value(given.flag, given.value))
    return tuple(problems)


def _negated(name: str, by_name: Mapping[str, Flag], version: str) -> Flag | None:
    """The switch that `name` turns off: --no-x, and since 0.33 --disable-x for --enable-x and the other way round."""
    candidates = [name.replace("--no-", "--", 1)] if name.startswith("--no-") else []
    since = _table()["inverse_forms_since"]
    if since and version_tuple(recorded_version(version)[0]) >= version_tuple(since):
        for prefix, inverse in (("--enable-", "--disable-"), ("--disable-", "--enable-")):
            if name.startswith(prefix):
                candidates.append(inverse + name.removeprefix(prefix))
    found = (by_name.get(candidate) for candidate in candidates)
    return next((flag for flag in found if flag is not None and flag.kind == "bool"), None)


def _unknown(name: str, version: str, by_name: Mapping[str, Flag]) -> str:
    history = flag_history(name)
    if history is not None:
        gone = f"{name} is not in vLLM {version}: it is known from {history.since} to {history.until or 'now'}"
        return f"{gone}; the nearest is {history.replaced_by}" if history.replaced_by else gone
    close = difflib.get_close_matches(name, by_name, n=1)
    return f"{plain(name, 80)} is not in vLLM {version}" + (f"; did you mean {close[0]}?" if close else "")


def _check_value(flag: Flag, value: str) -> list[str]:
    if not value:
        return [f"{flag.name} needs a value"]
    if flag.kind in ("int", "float"):
        try:
            is_size = flag.name in _SIZES and value[-1].isalpha()
            number: Any = parse_size(value) if is_size else int(value) if flag.kind == "int" else float(value)
        except ValueError:
            return [f"{flag.name} needs a plain {'whole ' * (flag.kind == 'int')}number, not {plain(value, 40)!r}"]
        return _check_choice(flag, number)
    return _check_choice(flag, value)


def _check_choice(flag: Flag, value: Any) -> list[str]:
    if flag.choices and value not in flag.choices:
        return [f"{flag.name} takes {', '.join(map(str, flag.choices))}, not {plain(value, 40)!r}"]
    return []
