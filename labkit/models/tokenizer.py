"""Text to tokens and back, from tokenizer.json or a GGUF file's vocabulary, through the `tokenizers` library."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RustTokenizer

from labkit.errors import FileFormatError, LabkitError, OutOfRangeError, UnsupportedError
from labkit.models.chat import ControlTokens, render_chat_template
from labkit.models.gguf_vocabulary import tokenizer_from_gguf
from labkit.models.hub import find_model_files
from labkit.models.json_files import read_json_object
from labkit.specs.gguf import read_gguf
from labkit.text import plain

MAX_TOKENIZER_BYTES = 128 * 2**20
MAX_TEXT_CHARACTERS = 16 * 2**20
_MAX_SETTINGS_BYTES = 8 * 2**20
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


class Tokenizer:
    """A tokenizer with its chat template.

    Control tokens come from the template and the tokenizer's own frame (such as a first BOS) only: their texts in
    what `encode` is given become ordinary tokens.

    Args:
        backend: of the `tokenizers` library.
        where: file that it came from, for errors.
        eos_token_ids: tokens that end a generation.
        chat_template: Jinja text, or None.
        named_tokens: texts of "bos_token", "eos_token", … for the template.
    """

    def __init__(
        self,
        backend: RustTokenizer,
        where: str,
        *,
        eos_token_ids: Sequence[int] = (),
        chat_template: str | None = None,
        named_tokens: Mapping[str, str] | None = None,
    ) -> None:
        self._backend = backend
        self._where = where
        self._named_tokens = dict(named_tokens or {})
        self.eos_token_ids = tuple(dict.fromkeys(eos_token_ids))
        self.chat_template = chat_template
        with _contained(where):
            backend.no_padding()
            backend.no_truncation()
            backend.encode_special_tokens = True
            added = backend.get_added_tokens_decoder()
            self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self._control = ControlTokens({token.content: number for number, token in added.items() if token.special})

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, with the tokenizer's own first and last tokens unless switched off.

        Raises:
            OutOfRangeError: no text, or more than 16 Mi characters.
            FileFormatError: the tokenizer fails on it; the message names its file.
        """
        if not isinstance(text, str):
            raise OutOfRangeError(f"only text can be encoded, not {type(text).__name__}")
        if len(text) > MAX_TEXT_CHARACTERS:
            raise OutOfRangeError(
                "the text is too long", needed=f"{len(text)} characters", available=f"{MAX_TEXT_CHARACTERS} characters"
            )
        with _contained(self._where):
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`.

        Raises:
            OutOfRangeError: an id that is no token.
        """
        ids = [int(token) for token in token_ids]
        for token in ids:
            if not 0 <= token < 2**31:
                raise OutOfRangeError(f"{token} is no token id", works=f"0 to {self.vocab_size - 1}")
        with _contained(self._where):
            return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation: `messages` are `{"role": …, "content": …}`.

        The template runs in a process of its own with limits. Control tokens written in the messages stay text.

        Raises:
            UnsupportedError: the model has no chat template.
            FileFormatError: the template fails or exceeds its limits.
            OutOfRangeError: messages that are no plain values or too long.
        """
        if self.chat_template is None:
            raise UnsupportedError(f"{self._where} has no chat template", works="encode(text)")
        given = {"messages": list(messages), **(variables or {})}
        try:
            marker = self._control.pick_marker(given)
        except (TypeError, ValueError, RecursionError) as error:
            if isinstance(error, LabkitError):
                raise
            raise OutOfRangeError(f"messages must be plain values: {plain(error, 200)}") from error
        own = {**self._named_tokens, "add_generation_prompt": add_generation_prompt}
        text = render_chat_template(self.chat_template, {**self._control.broken(given, marker), **own})
        tokens: list[int] = []
        for part in self._control.split(text, marker):
            tokens += [part] if isinstance(part, int) else self.encode(part, add_special_tokens=False)
        return tokens


def load_tokenizer(source: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer of a folder with tokenizer.json, a .gguf file, or a hub id (cached or reachable).

    Raises:
        FileFormatError: no such source, or a file that is broken or over its limit; it is named.
        UnsupportedError: a kind of vocabulary that labkit does not read from GGUF.
    """
    path = find_model_files(source, "tokenizer.json")
    if path.name == "tokenizer.json" or path.name == "config.json":
        path = path.parent
    return _from_folder(path) if path.is_dir() else _from_gguf(path)


def _from_gguf(path: Path) -> Tokenizer:
    file = read_gguf(path)
    where = plain(path, 200)
    with _contained(where):
        backend, texts = tokenizer_from_gguf(file)
    metadata = file.metadata
    named = {}
    for name, key in zip(_NAMED_TOKENS, ("bos", "eos", "unknown", "padding"), strict=True):
        token = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if type(token) is int and 0 <= token < len(texts):
            named[name] = texts[token]
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    template = metadata.get("tokenizer.chat_template")
    return Tokenizer(
        backend,
        where,
        eos_token_ids=[token for token in ends if type(token) is int and 0 <= token < len(texts)],
        chat_template=template if isinstance(template, str) else None,
        named_tokens=named,
    )


def _from_folder(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    where = plain(path, 200)
    try:
        data = path.read_bytes() if path.stat().st_size <= MAX_TOKENIZER_BYTES else None
    except OSError as error:
        raise FileFormatError(f"cannot read {where}: {error.strerror or error}", works="a folder with it") from error
    if data is None:
        raise FileFormatError(f"{where} is too large", needed=f"at most {MAX_TOKENIZER_BYTES} bytes")
    with _contained(where):
        backend = RustTokenizer.from_buffer(data)
    settings = _optional_object(folder / "tokenizer_config.json")
    named = {}
    for name in _NAMED_TOKENS:
        value = settings.get(name)
        text = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(text, str):
            named[name] = text
    return Tokenizer(
        backend,
        where,
        eos_token_ids=_eos_token_ids(folder, backend, named.get("eos_token")),
        chat_template=_chat_template(folder, settings),
        named_tokens=named,
    )


def _eos_token_ids(folder: Path, backend: RustTokenizer, eos_token: str | None) -> list[int]:
    """From generation_config.json, else config.json, and the tokenizer's own."""
    own = backend.token_to_id(eos_token) if eos_token else None
    found = [] if own is None else [own]
    for name in ("generation_config.json", "config.json"):
        value = _optional_object(folder / name).get("eos_token_id")
        listed = value if isinstance(value, list) else [value]
        if value is not None:
            return found + [token for token in listed if type(token) is int]
    return found


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        with path.open("rb") as file:
            data = file.read(_MAX_SETTINGS_BYTES)
        return data.decode(errors="replace")
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, Mapping)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _optional_object(path: Path) -> dict[str, Any]:
    return read_json_object(path, max_bytes=_MAX_SETTINGS_BYTES) if path.is_file() else {}


@contextmanager
def _contained(where: str) -> Iterator[None]:
    """Turn what the library raises into a `FileFormatError` that names the file; its panics are no `Exception`."""
    try:
        yield
    except LabkitError:
        raise
    except Exception as error:
        raise FileFormatError(f"the tokenizer of {where} failed: {plain(error, 300)}") from error
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise FileFormatError(f"the tokenizer of {where} panicked: {plain(error, 300)}") from None
