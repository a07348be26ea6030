"""tokenizer.json and safetensors: small valid files of several kinds, mutated as JSON and as bytes."""

from __future__ import annotations

import json
import random
import struct
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from labkit.models.tokenizer import load_tokenizer
from labkit.models.weight_sources import SafetensorsSource
from tests.models.gguf_files import byte_vocabulary
from tests.reader_fuzz import ReaderTarget, mutate_bytes, mutate_json

_TEXT = "he hehe 12  <|im_end|> é\n"


@lru_cache(maxsize=1)
def tokenizer_seeds() -> tuple[dict[str, Any], ...]:
    """tokenizer.json of byte-level BPE with a frame, SentencePiece-like BPE, WordPiece and Unigram."""
    tokens, merges, _ = byte_vocabulary()
    vocab = {token: index for index, token in enumerate(tokens)}
    added = [
        {"id": index, "content": tokens[index], "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": True}
        for index in range(3)
    ]  # fmt: skip
    frame = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": tokens[1], "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {tokens[1]: {"id": tokens[1], "ids": [1], "tokens": [tokens[1]]}},
    }
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    digits = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, level]}
    base = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
            "pre_tokenizer": digits, "post_processor": frame, "decoder": level}  # fmt: skip
    bpe = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
           "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
           "vocab": vocab, "merges": merges}  # fmt: skip
    pieces = {"type": "WordPiece", "unk_token": "<|endoftext|>", "continuing_subword_prefix": "##",
              "max_input_chars_per_word": 100, "vocab": vocab}  # fmt: skip
    unigram = {"type": "Unigram", "unk_id": 0, "byte_fallback": False, "vocab": [[token, -1.0] for token in tokens]}
    replaced = {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Prepend", "prepend": "Ġ"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "Ġ"}]}  # fmt: skip
    split = {"type": "Split", "pattern": {"Regex": "\\p{N}{1,3}| ?\\p{L}+"}, "behavior": "Isolated", "invert": False}
    steps = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]}
    return (
        {**base, "model": bpe},
        {**base, "model": {**bpe, "byte_fallback": True, "unk_token": tokens[0]}, "normalizer": replaced,
         "pre_tokenizer": None, "decoder": steps},
        {**base, "model": pieces, "pre_tokenizer": {"type": "BertPreTokenizer"}, "decoder": {"type": "WordPiece",
         "prefix": "##", "cleanup": True}},
        {**base, "model": unigram, "pre_tokenizer": split, "padding": {"strategy": "BatchLongest", "direction": "Right",
         "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "x"}},
    )  # fmt: skip


def make_tokenizer(rng: random.Random) -> bytes:
    """One mutated tokenizer.json; the vocabulary takes few of the changes."""
    value: Any = rng.choice(tokenizer_seeds())
    vocab = value["model"]["vocab"]
    for _ in range(rng.randint(1, 3)):
        if rng.random() < 0.8 and isinstance(value, dict) and isinstance(value.get("model"), dict):
            small = {**value, "model": {**value["model"], "vocab": None}}
            value = mutate_json(small, rng)
            if isinstance(value, dict) and isinstance(value.get("model"), dict) and value["model"].get("vocab") is None:
                value["model"]["vocab"] = vocab
        else:
            value = mutate_json(value, rng)
    data = json.dumps(value).encode()
    return mutate_bytes(data, rng) if rng.random() < 0.2 else data


def read_tokenizer(path: Path) -> object:
    """Load, encode and decode."""
    named = path.with_name("tokenizer.json")
    path.replace(named)
    tokenizer = load_tokenizer(named)
    return tokenizer.decode(tokenizer.encode(_TEXT))


def make_safetensors(rng: random.Random) -> bytes:
    """One mutated safetensors file of three tensors."""
    header: Any = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
        "c": {"dtype": "F16", "shape": [], "data_offsets": [32, 34]},
    }
    for _ in range(rng.randint(0, 2)):
        header = mutate_json(header, rng, ("shape", "data_offsets", "dtype", "d"))
    text = json.dumps(header).encode()
    length = (
        len(text) if rng.random() < 0.8 else rng.choice((0, 1, len(text) - 1, len(text) + 1, 2**32, 2**63, 2**64 - 1))
    )
    data = struct.pack("<Q", length) + text + bytes(range(34))
    return mutate_bytes(data, rng) if rng.random() < 0.4 else data


def read_safetensors(path: Path) -> object:
    """Open the folder and read every tensor."""
    path.replace(path.with_name("model.safetensors"))
    source = SafetensorsSource(path.parent)
    for name in source.names():
        shape = source.shape(name) or ()
        # The header was checked against the file, so no shape is larger than the file.
        source.fill(name, torch.empty(shape))
    return source


TARGETS = (
    ReaderTarget("tokenizer.json", make_tokenizer, read_tokenizer, ".json"),
    ReaderTarget("safetensors", make_safetensors, read_safetensors, ".safetensors"),
)
