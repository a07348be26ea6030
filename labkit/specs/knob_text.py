"""Settings as text: what a user types into a knob, and all knobs as one line that another panel takes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from labkit.errors import FileFormatError, UnknownNameError
from labkit.specs.engine_config import EngineConfig, Knob
from labkit.text import nearest, plain

# vLLM's own suffixes (its `human_readable_int`): small letters are decimal, capitals binary.
_FACTORS: Mapping[str, int] = MappingProxyType(
    {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
)
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,6})?)([kmgtKMGT])")
MAX_TEXT = 4000
PANEL = "labkit panel"


def parse_knob(knob: Knob, text: str) -> Any:
    """The value that `text` means for `knob`: "8k" (8,000), "8K" (8,192), "16,384", "on", "auto", "fp8".

    Raises:
        OutOfRangeError: the knob does not take it.
    """
    text = text.strip()
    if knob.optional and text.casefold() in ("", "auto", "none"):
        return None
    if knob.kind is bool:
        return knob.check({"on": True, "true": True, "off": False, "false": False}.get(text.casefold(), text))
    return knob.check(text if knob.kind is str else _number(knob, text))


def _number(knob: Knob, text: str) -> Any:
    digits = text.replace(",", "").replace("_", "")
    try:
        return parse_size(digits) if knob.kind is int else float(digits)
    except ValueError:
        return text


def parse_size(text: str) -> float:
    """A number as vLLM's command line takes it: "8k" is 8,000, "8K" 8,192, "25.6k" 25,600.

    Raises:
        ValueError: the text is none.
    """
    found = _SIZE.fullmatch(text)
    return round(float(found.group(1)) * _FACTORS[found.group(2)], 6) if found else float(text)


def config_to_text(config: EngineConfig) -> str:
    """What `config` sets other than the defaults, as "block_size=32 kv_cache_dtype=fp8"; empty for the defaults."""
    changed = EngineConfig().differences(config)
    return " ".join(f"{name}={shlex.quote(knob_word(value))}" for name, (_, value) in changed.items())


def knob_word(value: Any) -> str:
    """A value as `parse_knob` takes it."""
    if value is None:
        return "auto"
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)


def panel_command(config: EngineConfig, *, model: str, gpu: str, workload: str = "") -> str:
    """The command that opens the panel with `config`: "labkit panel 'block_size=32' --model … --gpu …"."""
    settings = config_to_text(config)
    named = {"--model": model, "--gpu": gpu, "--workload": workload}
    options = [f"{option}={shlex.quote(plain(value, 300))}" for option, value in named.items() if value]
    return " ".join([PANEL, *([shlex.quote(settings)] if settings else []), *options])


def config_from_text(text: str) -> EngineConfig:
    """The configuration of a text by `config_to_text`, or of a whole command by `panel_command`; everything that it
    does not name is a default.

    Raises:
        FileFormatError: the text is too long or not made of name=value.
        UnknownNameError: a knob that this version does not have.
        OutOfRangeError: a value that its knob does not take.
    """
    if len(text) > MAX_TEXT:
        raise FileFormatError(f"the settings are longer than {MAX_TEXT} characters", works="block_size=32 dtype=auto")
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise FileFormatError(f"the settings cannot be read: {error}", works="block_size=32 dtype=auto") from error
    if words[:2] == PANEL.split():
        return config_from_text(" ".join(word for word in words[2:] if not word.startswith("--")))
    values = {}
    for word in words:
        knob, value = _named(word)
        values[knob.name] = parse_knob(knob, value)
    return EngineConfig(**values)


def read_grid(words: Sequence[str]) -> dict[str, list[Any]]:
    """Knob → its values, of words such as "max_num_seqs=64,128" (or --max-num-seqs=64,128); the last of a knob counts.

    Raises:
        FileFormatError, UnknownNameError, OutOfRangeError: as `config_from_text`.
    """
    found = {}
    for word in words:
        knob, values = _named(word)
        found[knob.name] = [parse_knob(knob, value) for value in values.split(",")]
    return found


def _named(word: str) -> tuple[Knob, str]:
    """The knob that "name=value" names, and the value."""
    knobs = {knob.name: knob for knob in EngineConfig.knobs()}
    name, equals, value = word.partition("=")
    name = name.strip().removeprefix("--").replace("-", "_")
    if not equals:
        raise FileFormatError(f"{plain(word, 60)!r} is not of the form name=value", works="block_size=32")
    if name not in knobs:
        close = nearest(name, knobs)
        works = close or "a flag of `labkit plan --help`, with _ for -"
        raise UnknownNameError(f"this version has no knob {plain(name, 60)!r}", works=works)
    return knobs[name], value
