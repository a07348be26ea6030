"""`read_command`: what a pasted `vllm serve …`, docker or api_server command means, flag by flag."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from labkit.advice.command import DEFAULT_VERSION
from labkit.advice.flags import GivenFlag, check_command, effective_default, given_flags, split_command
from labkit.errors import FileFormatError, LabkitError
from labkit.specs.engine_config import EngineConfig, Knob
from labkit.specs.knob_text import parse_knob
from labkit.text import plain

MAX_TEXT = 20_000
_IMAGE = re.compile(r"(?:[\w.:-]+/)*vllm-openai(?:\S*?:v?(\d+\.\d+(?:\.\d+)?)\S*|\S*)")
_EXAMPLE = "vllm serve Qwen/Qwen3-8B --max-model-len 8k"
# Flags without a knob here that take or give memory: what the plan then leaves out.
_MOVES_MEMORY: Mapping[str, str] = MappingProxyType(
    {
        "--cpu-offload-gb": "weights on the host leave room on the card",
        "--kv-offloading-size": "KV on the host is no part of the card",
        "--speculative-config": "a draft model has weights and KV of its own",
        "--enable-lora": "adapters take --max-loras × rank × 2 bytes × (inputs + outputs) of every product; of an 8B "
        "model at rank 16 about 80 MiB each",
        "--max-loras": "so many adapters have room on the card at once",
        "--limit-mm-per-prompt": "pictures and sound raise the activation peak",
        "--hf-overrides": "it changes the model",
        "--compilation-config": "it can change which CUDA graphs are captured",
        "--max-cudagraph-capture-size": "it changes which CUDA graphs are captured",
        "--kv-cache-dtype-skip-layers": "some layers keep the wider type",
    }
)
_DTYPES: Mapping[str, str] = MappingProxyType({"half": "float16", "float": "float32"})


@dataclass(frozen=True)
class ServeCommand:
    """A server's command as labkit understands it.

    Attributes:
        model: hub id or folder; "" where the command names none.
        version: of vLLM, from the image's tag, else as asked for.
        given: knob → value, only what the command says.
        config: all knobs: what is given, else that version's defaults.
        left_out: a sentence for each engine flag that the plan does not know.
        refused: what the parser of that version would refuse, and values that no knob takes.
    """

    model: str
    version: str
    given: Mapping[str, Any]
    config: EngineConfig
    left_out: tuple[str, ...]
    refused: tuple[str, ...]


def is_command(text: str) -> bool:
    """Whether `text` looks like a command that starts vLLM."""
    return len(text) <= MAX_TEXT and re.search(r"vllm serve\b|vllm\.entrypoints|vllm-openai", text) is not None


def read_command(text: str, version: str = DEFAULT_VERSION) -> ServeCommand:
    """Take a command apart by the recorded parser of its vLLM version.

    Args:
        text: `vllm serve …`, `python -m vllm.entrypoints.openai.api_server …` or `docker run … vllm/vllm-openai:v0.25.1
            …`, on one line or several; nothing in it is run.
        version: of vLLM where the text says none.

    Raises:
        FileFormatError: the text is too long, cannot be read, or starts no server of vLLM.
        OutOfRangeError: `version` is no version.
    """
    if len(text) > MAX_TEXT:
        raise FileFormatError("the command is too long", needed=f"at most {MAX_TEXT} characters", works=_EXAMPLE)
    try:
        words = split_command(text.replace("\r\n", "\n"))
    except ValueError as error:
        raise FileFormatError(f"the command cannot be read: {error}", works=_EXAMPLE) from error
    arguments, tagged = _arguments(words)
    version = tagged or version
    free, flags = given_flags(arguments, version)
    named = next((flag.value for flag in flags if flag.written == "--model" and flag.value), "")
    given, left_out, refused = _sorted(flags)
    return ServeCommand(
        plain(named or (free[0] if free else ""), 300), version, MappingProxyType(given),
        EngineConfig(**{**_defaults(version), **given}), tuple(left_out),
        (*check_command(arguments, version), *refused),
    )  # fmt: skip


def _arguments(words: Sequence[str]) -> tuple[list[str], str]:
    """The words after the program, and the version that an image's tag names."""
    for at, word in enumerate(words):
        image = _IMAGE.fullmatch(word)
        if image is not None:
            rest = list(words[at + 1 :])
            return rest[1:] if rest[:1] == ["serve"] else rest, image.group(1) or ""
        if word.rpartition("/")[2] == "vllm" and list(words[at + 1 : at + 2]) == ["serve"]:
            return list(words[at + 2 :]), ""
        if word.startswith("vllm.entrypoints"):
            return list(words[at + 1 :]), ""
    raise FileFormatError("this is no command that starts vLLM", works=_EXAMPLE)


def _sorted(flags: Sequence[GivenFlag]) -> tuple[dict[str, Any], list[str], list[str]]:
    """Knobs that the flags set, what the plan leaves out, and values that no knob takes."""
    knobs = {knob.flag or f"--{knob.name.replace('_', '-')}": knob for knob in EngineConfig.knobs()}
    given: dict[str, Any] = {}
    left_out: list[str] = []
    refused: list[str] = []
    for entry in flags:
        if entry.flag is None:
            continue
        knob = knobs.get(entry.flag.name)
        if knob is None:
            if entry.flag.name in _MOVES_MEMORY:
                left_out.append(f"{entry.flag.name} is not in the plan: {_MOVES_MEMORY[entry.flag.name]}")
            continue
        if knob.name == "max_model_len" and entry.value in ("-1", "auto"):
            left_out.append(
                f"{entry.flag.name} {entry.value} takes the longest that fits; the plan is for the model's own"
            )
            continue
        try:
            given[knob.name] = _value(knob, entry)
        except LabkitError as error:
            refused.append(str(error))
    return given, left_out, refused


def _value(knob: Knob, entry: GivenFlag) -> Any:
    if knob.kind is bool:
        return entry.is_on
    return parse_knob(knob, _DTYPES.get(entry.value, entry.value) if knob.name == "dtype" else entry.value)


def _defaults(version: str) -> dict[str, Any]:
    """What that version does without a flag, where it differs from the newest."""
    found = {knob: effective_default(knob.flag, version) for knob in EngineConfig.knobs() if knob.flag}
    return {
        knob.name: value
        for knob, value in found.items()
        if isinstance(value, knob.kind) and value != getattr(EngineConfig(), knob.name)
    }
