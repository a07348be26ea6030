"""A `tokenizers` tokenizer from the vocabulary of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from labkit.errors import FileFormatError, UnsupportedError
from labkit.specs.gguf import GgufFile
from labkit.text import plain

_CONTROL, _USER_DEFINED = 3, 4
# Splits before byte-level BPE, as llama.cpp (llama-vocab.cpp) and the families' own tokenizer.json have them.
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_HEAD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_SPLITS: Mapping[str, str] = MappingProxyType(
    {"qwen2": _HEAD + r"|\p{N}" + _TAIL, "llama-bpe": _HEAD + r"|\p{N}{1,3}" + _TAIL}
)
_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell")
_PLAIN = ("gpt-2", "gpt2", "default")


def tokenizer_from_gguf(file: GgufFile) -> tuple[Tokenizer, tuple[str, ...]]:
    """The tokenizer and the texts of its tokens by id.

    Raises:
        FileFormatError: the vocabulary is missing or its arrays do not fit each other.
        UnsupportedError: a vocabulary or a way to split text that labkit does not have.
    """
    metadata = file.metadata
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, tuple) or not tokens:
        raise FileFormatError(f"{plain(file.path, 200)}: tokenizer.ggml.tokens is missing or no array of strings")
    kinds = _array(file, "tokenizer.ggml.token_type", len(tokens), "iu")
    kind = metadata.get("tokenizer.ggml.model")
    vocabulary = dict(zip(tokens, range(len(tokens)), strict=True))
    if len(vocabulary) != len(tokens):
        raise FileFormatError(f"{plain(file.path, 200)}: tokenizer.ggml.tokens has a token twice")
    if kind == "gpt2":
        tokenizer = _byte_level(file, vocabulary)
    elif kind == "llama":
        tokenizer = _sentence_piece(file, tokens, vocabulary)
    else:
        raise UnsupportedError(
            f"{plain(file.path, 200)}: tokenizer.ggml.model is {plain(repr(kind), 60)}, which labkit does not read",
            works="gpt2 or llama, or a folder with tokenizer.json",
        )
    if kinds is not None:
        _add_special(tokenizer, tokens, kinds)
    begin = metadata.get("tokenizer.ggml.bos_token_id")
    adds_begin = metadata.get("tokenizer.ggml.add_bos_token", kind == "llama")
    if adds_begin is True and type(begin) is int and 0 <= begin < len(tokens):
        # A token's text may hold the template language's own signs, so the frame names it by a word of ours.
        frame = processors.TemplateProcessing(
            single="begin $A", pair="begin $A $B", special_tokens=[{"id": "begin", "ids": [begin], "tokens": ["begin"]}]
        )
        tokenizer.post_processor = frame
    return tokenizer, tokens


def _array(file: GgufFile, key: str, length: int, kinds: str) -> np.ndarray | None:
    values = file.metadata.get(key)
    if values is None:
        return None
    if not isinstance(values, np.ndarray) or values.dtype.kind not in kinds or len(values) != length:
        raise FileFormatError(f"{plain(file.path, 200)}: {key} is no array of {length} numbers, one for each token")
    return values


def _add_special(tokenizer: Tokenizer, tokens: Sequence[str], kinds: np.ndarray) -> None:
    control = [
        AddedToken(tokens[index], special=True, normalized=False)
        for index in np.flatnonzero(kinds == _CONTROL).tolist()
    ]
    tokenizer.add_special_tokens([token for token in control if token.content])
    defined = np.flatnonzero(kinds == _USER_DEFINED).tolist()
    own = [AddedToken(tokens[index], special=False, normalized=False) for index in defined]
    tokenizer.add_tokens([token for token in own if token.content])


def _byte_level(file: GgufFile, vocabulary: Mapping[str, int]) -> Tokenizer:
    merges = file.metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, tuple):
        raise FileFormatError(f"{plain(file.path, 200)}: tokenizer.ggml.merges is missing or no array of strings")
    pairs = [_pair(file, merge, vocabulary) for merge in merges]
    split = file.metadata.get("tokenizer.ggml.pre", "default")
    tokenizer = Tokenizer(models.BPE(vocab=dict(vocabulary), merges=pairs, ignore_merges=split == "llama-bpe"))
    if split in _SPLITS:
        if split == "qwen2":
            tokenizer.normalizer = normalizers.NFC()
        cut = pre_tokenizers.Split(Regex(_SPLITS[split]), behavior="isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, byte_level])
    elif split in _DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    elif split in _PLAIN:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        raise UnsupportedError(
            f"{plain(file.path, 200)}: tokenizer.ggml.pre is {plain(repr(split), 60)}, which labkit does not know",
            works=", ".join((*_SPLITS, *_DIGITS, *_PLAIN)),
        )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pair(file: GgufFile, merge: str, vocabulary: Mapping[str, int]) -> tuple[str, str]:
    first, gap, second = merge.partition(" ")
    if not gap or first not in vocabulary or second not in vocabulary or first + second not in vocabulary:
        raise FileFormatError(
            f"{plain(file.path, 200)}: merge {plain(repr(merge), 80)} is not made of two tokens of the vocabulary"
        )
    return first, second


def _sentence_piece(file: GgufFile, tokens: Sequence[str], vocabulary: Mapping[str, int]) -> Tokenizer:
    """SentencePiece BPE: merges follow from the scores, best first, as transformers' converter derives them."""
    scores = _array(file, "tokenizer.ggml.scores", len(tokens), "f")
    if scores is None:
        raise FileFormatError(f"{plain(file.path, 200)}: tokenizer.ggml.scores is missing")
    found: list[tuple[float, int, int, str, str]] = []
    for index, token in enumerate(tokens):
        for cut in range(1, min(len(token), 64)):
            left, right = vocabulary.get(token[:cut]), vocabulary.get(token[cut:])
            if left is not None and right is not None:
                found.append((-float(scores[index]), left, right, token[:cut], token[cut:]))
    found.sort(key=lambda entry: entry[:3])
    pairs = [(left, right) for *_, left, right in found]
    unknown = file.metadata.get("tokenizer.ggml.unknown_token_id")
    unk_token = tokens[unknown] if type(unknown) is int and 0 <= unknown < len(tokens) else None
    tokenizer = Tokenizer(
        models.BPE(vocab=dict(vocabulary), merges=pairs, unk_token=unk_token, fuse_unk=True, byte_fallback=True)
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    changes: list[normalizers.Normalizer] = [normalizers.Replace(" ", "▁")]
    if file.metadata.get("tokenizer.ggml.add_space_prefix", True) is True:
        changes.insert(0, normalizers.Prepend("▁"))
        steps.append(decoders.Strip(content=" ", left=1))
    tokenizer.normalizer = normalizers.Sequence(changes)
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer
