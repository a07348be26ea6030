"""Tokenizer files of a model folder, and the minimal tokenizer_config.json that `--write-missing` writes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.doctor.check import Check
from labkit.doctor.folder_files import is_lfs_pointer
from labkit.errors import FileFormatError, LabkitError
from labkit.files import write_atomic
from labkit.models.json_files import read_json_object
from labkit.specs.config_fields import read_config_file
from labkit.text import plain

MAX_TOKENIZER_BYTES = 128 * 2**20
SETTINGS = "tokenizer_config.json"
_OTHERS = ("tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "spiece.model", "sentencepiece.bpe.model")
_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>")
_STARTS = ("<|begin_of_text|>", "<s>", "<bos>")
_PADS = ("<|finetune_right_pad_id|>", "<pad>", "<|endoftext|>")


def tokenizer_checks(folder: Path, config: Mapping[str, Any]) -> list[Check]:
    """Tokenizer there, whole, and of the same vocabulary as the model."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return [_no_tokenizer(folder)]
    if is_lfs_pointer(path):
        return [Check("tokenizer", "problem", "tokenizer.json is a Git LFS pointer", "cloned without git-lfs",
                      "git lfs pull")]  # fmt: skip
    try:
        entries = read_vocabulary(path)
    except LabkitError as error:
        return [Check(
            "tokenizer", "problem", plain(error, 300), "tokenizer.json is cut or damaged",
            "hf download <model> tokenizer.json --local-dir . --force-download",
        )]  # fmt: skip
    checks = [check_vocabulary(entries, config), check_settings(folder, entries), check_end_token(folder, entries)]
    return [*checks, check_chat_template(folder)]


def _no_tokenizer(folder: Path) -> Check:
    others = [name for name in _OTHERS if (folder / name).is_file()]
    if others:
        return Check(
            "tokenizer", "ok", f"{', '.join(others)} instead of tokenizer.json",
            "vLLM converts it at each start",
        )  # fmt: skip
    return Check(
        "tokenizer", "problem", "no tokenizer.json, tokenizer.model or vocab.json",
        "vLLM says: Can't load tokenizer for …",
        "hf download <model> --include 'tokenizer*' --local-dir ., or --tokenizer <hub id>",
    )  # fmt: skip


def read_vocabulary(path: Path) -> dict[str, int]:
    """Text → id of a tokenizer.json, added tokens included.

    Raises:
        FileFormatError: missing, damaged, or of a kind without a vocabulary.
    """
    values = read_json_object(path, max_bytes=MAX_TOKENIZER_BYTES)
    model = values.get("model")
    vocabulary = model.get("vocab") if isinstance(model, Mapping) else None
    if isinstance(vocabulary, list):
        found = {str(entry[0]): index for index, entry in enumerate(vocabulary) if isinstance(entry, list) and entry}
    elif isinstance(vocabulary, Mapping):
        found = {str(text): number for text, number in vocabulary.items() if type(number) is int}
    else:
        raise FileFormatError(f"{plain(path, 200)} holds no vocabulary")
    added = values.get("added_tokens")
    for entry in added if isinstance(added, list) else ():
        if isinstance(entry, Mapping) and type(entry.get("id")) is int:
            found[str(entry.get("content"))] = entry["id"]
    if not found:
        raise FileFormatError(f"{plain(path, 200)} holds an empty vocabulary")
    return found


def check_vocabulary(entries: Mapping[str, int], config: Mapping[str, Any]) -> Check:
    """No token id beyond the model's embedding."""
    section = config.get("text_config")
    size = config.get("vocab_size") or (section.get("vocab_size") if isinstance(section, Mapping) else None)
    largest = max(entries.values())
    if type(size) is not int:
        return Check("vocabulary", "unknown", f"{largest + 1} tokens; config.json names no vocab_size")
    if largest >= size:
        return Check(
            "vocabulary", "problem", f"tokens up to {largest}, the model's vocabulary is {size}",
            "the tokenizer is of another model, or tokens were added without growing the embedding",
            "take tokenizer and weights from one revision",
        )  # fmt: skip
    return Check("vocabulary", "ok", f"{largest + 1} tokens in a vocabulary of {size}")


def check_settings(folder: Path, entries: Mapping[str, int]) -> Check:
    """tokenizer_config.json: class, special tokens, all of them in the vocabulary."""
    path = folder / SETTINGS
    if not path.is_file():
        return Check(
            "tokenizer-config", "warning", f"no {SETTINGS}", "special tokens and chat template are then guessed",
            f"labkit doctor --model-folder {plain(folder, 200)} --write-missing, or fetch the original",
        )  # fmt: skip
    try:
        values = read_config_file(path)
    except LabkitError as error:
        return Check("tokenizer-config", "problem", plain(error, 300), f"{SETTINGS} is damaged", "fetch it again")
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = values.get(name)
        text = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(text, str) and text not in entries:
            return Check(
                "tokenizer-config", "problem", f"{name} {plain(text, 60)!r} is not in tokenizer.json",
                "the files are of different models", "take both from one revision",
            )  # fmt: skip
    return Check("tokenizer-config", "ok", f"{SETTINGS} fits tokenizer.json")


def check_end_token(folder: Path, entries: Mapping[str, int]) -> Check:
    """eos_token_id of config.json and generation_config.json exist in the vocabulary."""
    wanted: list[int] = []
    for name in ("config.json", "generation_config.json"):
        try:
            value = read_config_file(folder / name).get("eos_token_id") if (folder / name).is_file() else None
        except LabkitError:
            continue
        wanted += [token for token in (value if isinstance(value, list) else [value]) if type(token) is int]
    unknown = [token for token in wanted if token not in set(entries.values())]
    if unknown:
        return Check(
            "end-token", "problem", f"eos_token_id {unknown[0]} is no token of tokenizer.json",
            "generation never ends by itself", "set eos_token_id to the id of the model's end token",
        )  # fmt: skip
    if not wanted:
        return Check(
            "end-token", "warning", "no eos_token_id in config.json or generation_config.json",
            "generation may end by length only", "copy generation_config.json of the original model",
        )  # fmt: skip
    return Check("end-token", "ok", f"ends at {', '.join(str(token) for token in dict.fromkeys(wanted))}")


def check_chat_template(folder: Path) -> Check:
    """A chat template, without which /v1/chat/completions answers an error."""
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return Check("chat-template", "ok", "a file of its own")
    try:
        values = read_config_file(folder / SETTINGS) if (folder / SETTINGS).is_file() else {}
    except LabkitError:
        values = {}
    if values.get("chat_template"):
        return Check("chat-template", "ok", f"in {SETTINGS}")
    return Check(
        "chat-template", "unknown", "no chat template",
        "right for a base or embedding model; a chat model then answers /v1/chat/completions with an error",
        "vllm serve … --chat-template <file>.jinja",
    )  # fmt: skip


@dataclass(frozen=True)
class Written:
    """What `--write-missing` wrote: the file, its content, and what was assumed, one sentence each."""

    path: Path
    content: Mapping[str, Any]
    assumed: tuple[str, ...]


def write_missing(folder: str | os.PathLike[str]) -> Written | None:
    """Write a minimal tokenizer_config.json from what is in the folder; None where there is one already.

    Raises:
        FileFormatError: no folder, no readable tokenizer.json, or the file cannot be written.
    """
    place = Path(folder).expanduser()
    if (place / SETTINGS).exists():
        return None
    entries = read_vocabulary(place / "tokenizer.json")
    config = read_config_file(place / "config.json") if (place / "config.json").is_file() else {}
    by_id = {number: text for text, number in entries.items()}
    content: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    assumed = ["tokenizer_class PreTrainedTokenizerFast: reads any tokenizer.json"]
    for name, guesses in (("eos_token", _ENDS), ("bos_token", _STARTS), ("pad_token", _PADS)):
        text, reason = _special(name, guesses, config, by_id, entries)
        if text is not None:
            content[name] = text
        assumed.append(f"{name} {reason}")
    length = config.get("max_position_embeddings")
    if type(length) is int and length > 0:
        content["model_max_length"] = length
        assumed.append(f"model_max_length {length}: max_position_embeddings of config.json")
    assumed.append("no chat template: none can be derived; give --chat-template for chat")
    path = write_atomic(place / SETTINGS, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    return Written(path, content, tuple(assumed))


def _special(
    name: str, guesses: tuple[str, ...], config: Mapping[str, Any], by_id: Mapping[int, str], entries: Mapping[str, int]
) -> tuple[str | None, str]:
    """Text of a special token and where it comes from."""
    value = config.get(f"{name}_id")
    number = value[0] if isinstance(value, list) and value else value
    if type(number) is int and number in by_id:
        return by_id[number], f"{plain(by_id[number], 60)!r}: {name}_id {number} of config.json"
    guess = next((text for text in guesses if text in entries), None)
    if guess is not None:
        return guess, f"{guess!r}: a customary name in the vocabulary; config.json does not say"
    return None, "left out: neither config.json nor a customary name says it"
