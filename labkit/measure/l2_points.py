"""The launches on which the simulated L2 is held against a card's counters."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

from labkit.measure.attention_shape import AttentionShape, BatchShape

UNPACKED = "one program for each query head"
# Points that ncu counts as well: plain, unpacked, shared and prefill.
NCU_POINTS = ("decode 64 × 4096 block 16 bfloat16", "decode 64 × 4096 group 4 unpacked", "shared 50 % of 32 × 4096",
              "prefill 4 × 2048 over 2048")  # fmt: skip

UNSEEN_VARIANTS = ("full", UNPACKED, "shared prefix", "full", "prefill", "shared prefix")
# Enough bytes that counting tells something, and few enough that a count takes less than a second.
UNSEEN_KV_BYTES, UNSEEN_MAX_FLOPS = (16e6, 1.2e9), 2e12


@dataclass(frozen=True)
class Point:
    """One launch to be compared; `group` is what its series varies."""

    name: str
    shape: AttentionShape
    variant: str
    group: str


def points() -> tuple[Point, ...]:
    """The grid: block size, KV type, packing, head group, shared prefix, prefill and batch size."""
    decode, found = BatchShape.decode, []
    for block, dtype in itertools.product((8, 16, 32, 64, 128, 256), ("bfloat16", "fp8")):
        shape = AttentionShape(decode(64, 4096), block_size=block, kv_cache_dtype=dtype)
        found.append(Point(f"decode 64 × 4096 block {block} {dtype}", shape, "full", "block size"))
    for block in (16, 32, 64, 128):
        shape = AttentionShape(decode(64, 4096), block_size=block)
        found.append(Point(f"decode 64 × 4096 tile = block {block}", shape, "tile = block", "tile"))
    for group, (variant, word) in itertools.product((1, 2, 4, 8), (("full", "packed"), (UNPACKED, "unpacked"))):
        shape = AttentionShape(decode(64, 4096), num_heads=8 * group)
        found.append(Point(f"decode 64 × 4096 group {group} {word}", shape, variant, "packing"))
    for head_dim, dtype, group in ((64, "bfloat16", 4), (64, "bfloat16", 8), (64, "fp8", 4), (64, "fp8", 8),
                                   (128, "fp8", 4), (128, "fp8", 8)):  # fmt: skip
        shape = AttentionShape(decode(64, 4096), 8 * group, head_dim=head_dim, kv_cache_dtype=dtype)
        name = f"decode 64 × 4096 heads of {head_dim} {dtype} group {group} unpacked"
        found.append(Point(name, shape, UNPACKED, "head size"))
    for percent, variant in itertools.product((0, 25, 50, 75, 100), ("full", UNPACKED)):
        shape = AttentionShape(decode(32, 4096, 4096 * percent // 100))
        word = "" if variant == "full" else " unpacked"
        found.append(Point(f"shared {percent} % of 32 × 4096{word}", shape, variant, "shared prefix"))
    for percent, block in itertools.product((25, 50, 95), (16, 128)):
        shape = AttentionShape(decode(32, 8192, 8192 * percent // 100), block_size=block)
        found.append(
            Point(f"prefix kernel {percent} % of 32 × 8192 block {block}", shape, "shared prefix", "prefix kernel")
        )
    for batch, dtype in itertools.product((1, 4, 16, 128, 256), ("bfloat16", "fp8")):
        context = 32768 if batch == 1 else 1024 if batch >= 128 else 8192
        shape = AttentionShape(decode(batch, context), kv_cache_dtype=dtype)
        found.append(Point(f"decode {batch} × {context} {dtype}", shape, "full", "batch size"))
    for (batch, new, cached), group in itertools.product(
        ((1, 8192, 0), (1, 2048, 14336), (4, 2048, 2048), (16, 512, 2048), (4, 512, 8192)), (1, 4)
    ):
        shape = AttentionShape(BatchShape((new + cached,) * batch, (new,) * batch), num_heads=8 * group)
        word = "" if group == 4 else " group 1"
        found.append(Point(f"prefill {batch} × {new} over {cached}{word}", shape, "prefill", "prefill"))
    for percent, group in itertools.product((50, 100), (1, 4)):
        shape = AttentionShape(decode(64, 2048, 2048 * percent // 100), num_heads=8 * group, kv_cache_dtype="fp8")
        name = f"shared {percent} % of 64 × 2048 fp8 group {group} unpacked"
        found.append(Point(name, shape, UNPACKED, "shared prefix in fp8"))
    for batch in (8, 32, 128, 256):
        shape = AttentionShape(decode(batch, 2048, 1024), block_size=64)
        found.append(Point(f"shared 50 % of {batch} × 2048 block 64", shape, "full", "shared prefix, batch size"))
    for shared in (1024, 2048):
        shape = AttentionShape(BatchShape((2560,) * 16, (512,) * 16, shared))
        found.append(Point(f"prefill 16 × 512 over 2048, {shared} shared", shape, "prefill", "prefill, shared prefix"))
    return (*found, *_one_wave())


def _one_wave() -> Iterator[Point]:
    """Launches whose programs, or most of them, all start at once and keep step: their reads meet before the L2."""
    decode = BatchShape.decode
    for (batch, context), head_dim, dtype in itertools.product(
        ((6, 9415), (33, 4096), (66, 4096)), (64, 128), ("bfloat16", "fp8")
    ):
        shape = AttentionShape(decode(batch, context), 8, 2, head_dim, 128, dtype)
        name = f"one wave {batch} × {context}, 8/2 heads of {head_dim} {dtype} unpacked"
        yield Point(name, shape, UNPACKED, "one wave")
    for group in (2, 8, 16):
        shape = AttentionShape(decode(6, 9415), 2 * group, 2, 64, 128)
        yield Point(f"one wave 6 × 9415, {2 * group}/2 heads of 64 unpacked", shape, UNPACKED, "one wave, head group")
    for batch in (8, 16, 32):
        shape = AttentionShape(decode(batch, 4096, 2048), 8, 2, 64, 128)
        yield Point(f"one wave, shared 50 % of {batch} × 4096, 8/2 heads of 64", shape, "full", "one wave, shared")


def unseen_points(count: int = 36, seed: int = 2) -> tuple[Point, ...]:
    """Launches that no fit has seen: drawn at random, of uneven lengths, with head counts and sizes of other models."""
    # Those of seed 0 were looked at when it was found that short rows meet less often, those of seed 1 for what meets
    # in one wave.
    draw = random.Random(seed)
    found: list[Point] = []
    while len(found) < count:
        variant = UNSEEN_VARIANTS[len(found) % len(UNSEEN_VARIANTS)]
        batch, kv_heads = draw.choice((1, 2, 3, 6, 12, 24, 48, 96, 160)), draw.choice((2, 4, 8))
        longest = min(16384, 262_144 // batch)
        contexts = tuple(draw.randint(longest // 4, longest) for _ in range(batch))
        has_prefix = variant == "shared prefix" or draw.random() < 0.4
        shared = round(min(contexts) * draw.choice((0.3, 0.6, 0.9))) if has_prefix else 0
        queries = (1,) * batch
        if variant == "prefill":
            queries = tuple(draw.randint(context // 4, context // 2) for context in contexts)
        shape = AttentionShape(
            BatchShape(contexts, queries, shared), num_heads=kv_heads * draw.choice((1, 2, 4, 5, 7, 8)),
            num_kv_heads=kv_heads, head_dim=draw.choice((64, 128)), block_size=draw.choice((8, 16, 32, 64, 128, 256)),
            kv_cache_dtype=draw.choice(("bfloat16", "fp8")),
        )  # fmt: skip
        if not UNSEEN_KV_BYTES[0] <= shape.kv_bytes <= UNSEEN_KV_BYTES[1] or shape.flops > UNSEEN_MAX_FLOPS:
            continue
        name = (
            f"{variant}: {batch} × {sum(contexts) // batch} of {shared} shared, {shape.num_heads}/{kv_heads} heads of "
            f"{shape.head_dim}, block {shape.block_size} {shape.kv_cache_dtype}"
        )
        found.append(Point(name, shape, variant, "unseen"))
    return tuple(found)
