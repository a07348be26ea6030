"""GGUF files made for tests: a writer that remembers where each number stands, and a tiny valid model."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

# Type numbers of ggml and of GGUF metadata, written down again here so that a slip in labkit's tables shows.
KINDS = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q4_K": 12, "Q6_K": 14, "BF16": 30}
BLOCKS = {
    "F32": (1, 4), "F16": (1, 2), "BF16": (1, 2), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22),
    "Q5_1": (32, 24), "Q8_0": (32, 34), "Q4_K": (256, 144), "Q6_K": (256, 210),
}  # fmt: skip
VALUE_LAYOUTS = {
    "u8": (0, "<B"), "i8": (1, "<b"), "u16": (2, "<H"), "i16": (3, "<h"), "u32": (4, "<I"), "i32": (5, "<i"),
    "f32": (6, "<f"), "bool": (7, "<B"), "u64": (10, "<Q"), "i64": (11, "<q"), "f64": (12, "<d"),
}  # fmt: skip
STRING, ARRAY = 8, 9


@dataclass
class GgufImage:
    """Bytes of a file, and name → (start, struct layout) of every number in its header."""

    data: bytearray = field(default_factory=bytearray)
    fields: dict[str, tuple[int, str]] = field(default_factory=dict)

    def number(self, name: str, layout: str, value: Any) -> None:
        self.fields[name] = (len(self.data), layout)
        self.data += struct.pack(layout, value)

    def string(self, name: str, text: str | bytes) -> None:
        raw = text.encode() if isinstance(text, str) else text
        self.number(f"{name} length", "<Q", len(raw))
        self.data += raw

    def changed(self, **changes: Any) -> bytes:
        """The bytes with the numbers of some fields replaced; underscores stand for spaces in their names."""
        data = bytearray(self.data)
        for name, value in changes.items():
            start, layout = self.fields[name.replace("_", " ")]
            struct.pack_into(layout, data, start, value)
        return bytes(data)


def build_gguf(
    metadata: Sequence[tuple[str, str, Any]],
    tensors: Sequence[tuple[str, Sequence[int], str, bytes]],
    *,
    version: int = 3,
    alignment: int = 32,
) -> GgufImage:
    """A file; metadata are (key, type, value) with types of `VALUE_LAYOUTS`, "str", or "[type]" for an array.

    Fields are named "version", "num tensors", "key0 length", "key0 type", "key0", "t0 dims", "t0 dim0", "t0 kind", ….
    Shapes are given rows first, as numpy has them, and stored reversed.
    """
    image = GgufImage()
    image.data += b"GGUF"
    image.number("version", "<I", version)
    image.number("num tensors", "<Q", len(tensors))
    image.number("num keys", "<Q", len(metadata))
    for index, (key, kind, value) in enumerate(metadata):
        image.string(f"key{index} name", key)
        _value(image, f"key{index}", kind, value)
    offset = 0
    for index, (name, shape, kind, data) in enumerate(tensors):
        image.string(f"t{index} name", name)
        image.number(f"t{index} dims", "<I", len(shape))
        for axis, length in enumerate(reversed(shape)):
            image.number(f"t{index} dim{axis}", "<Q", length)
        image.number(f"t{index} kind", "<I", KINDS[kind])
        image.number(f"t{index} offset", "<Q", offset)
        offset += -(-len(data) // alignment) * alignment
    image.data += bytes(-len(image.data) % alignment)
    for _, _, _, data in tensors:
        image.data += data + bytes(-len(data) % alignment)
    return image


def _value(image: GgufImage, name: str, kind: str, value: Any) -> None:
    if kind.startswith("["):
        inner = kind[1:-1]
        image.number(f"{name} type", "<I", ARRAY)
        image.number(f"{name} element type", "<I", STRING if inner == "str" else VALUE_LAYOUTS[inner][0])
        image.number(f"{name} count", "<Q", len(value))
        for index, entry in enumerate(value):
            if inner == "str":
                image.string(f"{name} entry{index}", entry)
            else:
                image.number(f"{name} entry{index}", VALUE_LAYOUTS[inner][1], entry)
    elif kind == "str":
        image.number(f"{name} type", "<I", STRING)
        image.string(name, value)
    else:
        image.number(f"{name} type", "<I", VALUE_LAYOUTS[kind][0])
        image.number(name, VALUE_LAYOUTS[kind][1], value)


def random_tensor(rng: np.random.Generator, shape: Sequence[int], kind: str = "F32", scale: float = 0.1) -> bytes:
    """Bytes of a random tensor; quantised ones have finite scales."""
    length, num_bytes = BLOCKS[kind]
    count = math.prod(shape)
    if kind in ("F32", "F16"):
        return (rng.standard_normal(count) * scale).astype("<f4" if kind == "F32" else "<f2").tobytes()
    blocks = rng.integers(0, 256, (count // length, num_bytes), dtype=np.uint8)
    halves = (rng.random((len(blocks), 2)) * 0.02).astype("<f2").view(np.uint8)
    start = num_bytes - 2 if kind == "Q6_K" else 0
    width = 4 if kind in ("Q4_1", "Q5_1", "Q4_K") else 2
    blocks[:, start : start + width] = halves[:, :width]
    return blocks.tobytes()


def byte_vocabulary() -> tuple[list[str], list[str], list[int]]:
    """A GPT-2 style vocabulary: three control tokens, the 256 bytes, two merges."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    letters = [chr(byte) for byte in visible] + [chr(256 + index) for index in range(len(hidden))]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *letters, "he", "Ġhe"]
    return tokens, ["h e", "Ġ he"], [3, 3, 3] + [1] * 258


def tiny_llama(kind: str = "Q4_1", *, seed: int = 0, changes: Sequence[tuple[str, str, Any]] = ()) -> GgufImage:
    """A whole llama model: 2 layers, hidden 64, 4 heads, 2 KV heads, 261 tokens, with tokenizer and chat template."""
    tokens, merges, token_types = byte_vocabulary()
    template = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    metadata = [
        ("general.architecture", "str", "llama"), ("general.name", "str", "tiny"), ("llama.block_count", "u32", 2),
        ("llama.context_length", "u32", 128), ("llama.embedding_length", "u32", 64),
        ("llama.feed_forward_length", "u32", 96), ("llama.attention.head_count", "u32", 4),
        ("llama.attention.head_count_kv", "u32", 2), ("llama.rope.freq_base", "f32", 10000.0),
        ("llama.attention.layer_norm_rms_epsilon", "f32", 1e-5), ("general.alignment", "u32", 32),
        ("tokenizer.ggml.model", "str", "gpt2"), ("tokenizer.ggml.pre", "str", "smollm"),
        ("tokenizer.ggml.tokens", "[str]", tokens), ("tokenizer.ggml.token_type", "[i32]", token_types),
        ("tokenizer.ggml.merges", "[str]", merges), ("tokenizer.ggml.eos_token_id", "u32", 2),
        ("tokenizer.ggml.add_bos_token", "bool", 0), ("tokenizer.chat_template", "str", template),
    ]  # fmt: skip
    changed = {key: (key, kind_of, value) for key, kind_of, value in changes}
    metadata = [changed.pop(entry[0], entry) for entry in metadata] + list(changed.values())
    rng = np.random.default_rng(seed)
    shapes = [("token_embd.weight", (261, 64), "Q8_0"), ("output_norm.weight", (64,), "F32")]
    for layer in range(2):
        prefix = f"blk.{layer}."
        shapes += [
            (f"{prefix}attn_norm.weight", (64,), "F32"), (f"{prefix}attn_q.weight", (64, 64), kind),
            (f"{prefix}attn_k.weight", (32, 64), kind), (f"{prefix}attn_v.weight", (32, 64), kind),
            (f"{prefix}attn_output.weight", (64, 64), kind), (f"{prefix}ffn_norm.weight", (64,), "F32"),
            (f"{prefix}ffn_gate.weight", (96, 64), kind), (f"{prefix}ffn_up.weight", (96, 64), kind),
            (f"{prefix}ffn_down.weight", (64, 96), kind),
        ]  # fmt: skip
    return build_gguf(metadata, [(name, shape, of, random_tensor(rng, shape, of)) for name, shape, of in shapes])
