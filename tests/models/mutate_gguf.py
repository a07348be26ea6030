"""Structure-aware mutation of GGUF files: one to three numbers, texts or sizes of a valid file are changed."""

from __future__ import annotations

import random
import struct
from functools import cache

from tests.models.gguf_files import GgufImage, build_gguf, tiny_llama

_EDGES = (0, 1, 2, 3, 4, 5, 7, 8, 9, 31, 32, 33, 64, 127, 128, 255, 256, 2**15, 2**16, 2**20, 2**31 - 1, 2**31,
          2**32 - 1, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 32, 2**64 - 1)  # fmt: skip


@cache
def seeds() -> tuple[GgufImage, ...]:
    """Valid files: the smallest, one with values of every kind, and whole tiny models."""
    mixed = build_gguf(
        [("a", "str", "x"), ("b", "[str]", ["y", "zz"]), ("c", "[i16]", [1, -1]), ("d", "f64", 0.5), ("e", "bool", 1),
         ("general.alignment", "u32", 64), ("general.architecture", "str", "gemma3")],
        [("t", (2, 32), "Q8_0", bytes(68)), ("u", (4,), "F16", bytes(8))], alignment=64,
    )  # fmt: skip
    window = [("llama.attention.sliding_window", "u32", 16), ("llama.rope.scaling.type", "str", "linear")]
    return build_gguf([], []), mixed, tiny_llama("Q4_1"), tiny_llama("Q5_0", changes=window)


def mutated(rng: random.Random) -> bytes:
    """A damaged file. The header's numbers are hit far more often than the weights."""
    image = rng.choice(seeds())
    data = bytearray(image.data)
    for _ in range(rng.randint(1, 3)):
        kind = rng.random()
        if kind < 0.7 and image.fields:
            _change_number(rng, image, data)
        elif kind < 0.8:
            data[rng.randrange(len(data))] = rng.randrange(256)
        elif kind < 0.9:
            start = rng.randrange(len(data))
            del data[start : start + rng.choice((1, 8, 100, len(data)))]
        else:
            start = rng.randrange(len(data))
            data[start:start] = rng.randbytes(rng.choice((1, 8, 64)))
        if not data:
            break
    return bytes(data)


def _change_number(rng: random.Random, image: GgufImage, data: bytearray) -> None:
    names = tuple(image.fields)
    if rng.random() < 0.5:
        # Values and types of metadata: otherwise the lengths of the vocabulary's texts take nearly every hit.
        names = tuple(name for name in names if "length" not in name and "entry" not in name)
    start, layout = image.fields[rng.choice(names)]
    size = struct.calcsize(layout)
    if start + size > len(data):
        return
    value = rng.choice((rng.choice(_EDGES), int.from_bytes(data[start : start + size], "little") + rng.choice((-1, 1))))
    data[start : start + size] = (value % 2 ** (8 * size)).to_bytes(size, "little")
