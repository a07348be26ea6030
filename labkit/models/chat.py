"""Chat templates: rendered in a limited process, and turned into tokens so that users cannot write control tokens."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from labkit.errors import FileFormatError, OutOfRangeError
from labkit.format import memory
from labkit.models import chat_sandbox
from labkit.text import plain

MAX_TEMPLATE_CHARACTERS = 2**20
MAX_REQUEST_BYTES = 16 * 2**20
_WALL_SECONDS = 15
# Code points that Unicode keeps free for a program's own use inside its own text.
_NONCHARACTERS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))


def render_chat_template(template: str, variables: Mapping[str, Any]) -> str:
    """The text that `template` (Jinja, as Hugging Face uses it) makes of `variables` (plain JSON values).

    Raises:
        OutOfRangeError: template or variables are over the limits of this module, or no JSON.
        FileFormatError: the template is wrong, or needs more than 5 s of CPU time, 768 MiB or 8 Mi characters.
    """
    if len(template) > MAX_TEMPLATE_CHARACTERS:
        raise OutOfRangeError(
            "the chat template is too long",
            needed=f"{len(template)} characters",
            available=f"{MAX_TEMPLATE_CHARACTERS} characters",
        )
    try:
        request = json.dumps({"template": template, "variables": variables}).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise OutOfRangeError(f"messages must be plain values: {plain(error, 200)}") from error
    if len(request) > MAX_REQUEST_BYTES:
        raise OutOfRangeError(
            "the messages are too long", needed=f"{len(request)} bytes", available=f"{MAX_REQUEST_BYTES} bytes"
        )
    command = [sys.executable, "-I", chat_sandbox.__file__]
    try:
        done = subprocess.run(command, input=request, capture_output=True, timeout=_WALL_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise FileFormatError(f"the chat template ran longer than {_WALL_SECONDS} s and was stopped") from error
    return _answer(done)


def _answer(done: subprocess.CompletedProcess[bytes]) -> str:
    try:
        answer = json.loads(done.stdout)
    except ValueError as error:
        limits = f"{chat_sandbox.CPU_SECONDS} s of CPU time or {memory(chat_sandbox.MEMORY_BYTES)}"
        raise FileFormatError(f"the chat template needed more than {limits} and was stopped") from error
    if "error" in answer:
        raise FileFormatError(f"the chat template failed: {plain(answer['error'], 300)}")
    return answer["text"]


class ControlTokens:
    """The texts of a tokenizer's control tokens, found in a template's output and kept out of users' text.

    Args:
        ids: token id by text.
    """

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = {text: token for text, token in ids.items() if text}
        longest_first = sorted(self._ids, key=len, reverse=True)
        pattern = "|".join(map(re.escape, longest_first)) or r"(?!)"
        self._found = re.compile(f"({pattern})")
        self._starts = re.compile(f"(?={pattern})")

    def pick_marker(self, values: Any) -> str:
        """A character that no text in `values` has.

        Raises:
            OutOfRangeError: the texts have all 32 of them.
        """
        whole = json.dumps(values, ensure_ascii=False)
        free = [char for char in _NONCHARACTERS if char not in whole]
        if not free:
            raise OutOfRangeError("the messages hold all 32 noncharacters U+FDD0 to U+FDEF")
        return free[0]

    def broken(self, value: Any, marker: str) -> Any:
        """`value` with `marker` after the first character of every control token in any of its texts."""
        if isinstance(value, str):
            starts = [match.start() + 1 for match in self._starts.finditer(value)]
            return marker.join(value[start:end] for start, end in zip([0, *starts], [*starts, None], strict=True))
        if isinstance(value, Mapping):
            return {str(key): self.broken(entry, marker) for key, entry in value.items()}
        if isinstance(value, Sequence):
            return [self.broken(entry, marker) for entry in value]
        return value

    def split(self, text: str, marker: str) -> list[str | int]:
        """`text` as runs of ordinary text, without `marker`, and ids of control tokens."""
        pieces = self._found.split(text)
        parts: list[str | int] = []
        for index, piece in enumerate(pieces):
            if index % 2:
                parts.append(self._ids[piece])
            elif piece:
                parts.append(piece.replace(marker, ""))
        return parts
