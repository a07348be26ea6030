"""Measures candidates on this card and rewrites its settings. usage: tune.py [OUT] [--quick | --shared]

Times come from sweep.py's variants; for each KV kind the candidate with the smallest geometric mean over the shapes
wins, once for batches below 128 and once for larger ones. Only rules of this card's architecture for head sizes up to
128 change; OUT (default: the package's heuristics.json) receives the table. --shared measures the shared part of a
cascade alone. --quick takes two candidates on small shapes, to see that the script works here: its choice is not for
use, so it needs an OUT of its own.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path

import labkit_kernels
import torch
from shapes import DECODE, PREFILL, Pool, Shape, make_inputs
from sweep import (
    KV,
    POOL_ELEMENTS,
    decode_call,
    decode_variants,
    first_call,
    first_shared_call,
    prefill_call,
    prefill_variants,
    shared_call,
    shared_variants,
)
from timing import make_flush, time_us
from warm import warm

TABLE = Path(labkit_kernels.__file__).with_name("heuristics.json")
LARGE_BATCH = 128
SHARED = (32, 8192, 512)
KINDS = {"bf16": ["native"], "fp8": ["fp8"], "int8": ["int8", "e4m3_bits"]}
DEFAULTS = {"prefetch": True, "evict": "", "swap": False, "words": False}


def best(candidates: list, make_call, shapes: list[Shape], kv: torch.dtype, pool: Pool, flush):
    """The candidate with the smallest geometric mean time; candidates that do not run are left out."""
    scores: dict[int, float] = {}
    for i, candidate in enumerate(candidates):
        try:
            times = [time_us(make_call(make_inputs(shape, 16, kv, pool), candidate), flush, 11) for shape in shapes]
        except Exception as error:
            print(f"{candidate}: {type(error).__name__}: {str(error)[:120]}")
            continue
        scores[i] = sum(map(math.log, times)) / len(times)
    if not scores:
        raise RuntimeError(f"none of the {len(candidates)} candidates ran on this card")
    return candidates[min(scores, key=scores.__getitem__)]


def decode_rules(pool: Pool, flush, quick: bool) -> list[dict]:
    """Rules for head sizes up to 128 and up to 16 rows, measured."""
    rules = []
    for name, kinds in KINDS.items():
        for large in (True, False):
            shapes = [shape for shape in DECODE if (len(shape.lens) >= LARGE_BATCH) == large]
            shapes = shapes[:1] if quick else shapes
            candidates = decode_variants(name)[: 2 if quick else None]
            choice = best(candidates, lambda i, c: decode_call(i, c)[1], shapes, KV[name], pool, flush)
            use = {key: value for key, value in asdict(choice).items() if DEFAULTS.get(key) != value}
            when = {"kv": kinds, "max_head_dim": 128, "max_rows": 16} | ({"min_batch": LARGE_BATCH} if large else {})
            rules.append({"when": when, "use": use})
            print(json.dumps(rules[-1]), flush=True)
    return rules


def shared_rules(pool: Pool, flush, base: list[dict]) -> list[dict]:
    """The rule for batches of more than 64 rows of a KV head, measured on 32 sequences, before those of `base`."""
    times = {}
    for candidate in shared_variants():
        try:
            times[candidate] = time_us(shared_call(pool, candidate, *SHARED)[0], flush, 21)
        except Exception as error:
            print(f"{candidate}: {type(error).__name__}: {str(error)[:120]}")
    for candidate, us in sorted(times.items(), key=lambda entry: entry[1]):
        print(f"{us:.1f} us {candidate}", flush=True)
    use = asdict(min(times, key=times.__getitem__))
    return [{"when": {"kv": ["native"], "max_head_dim": 128, "min_rows": 65}, "use": use}, *base]


def dump(table: dict) -> str:
    """The table with one rule a line."""
    architectures = []
    for arch, sections in table["architectures"].items():
        parts = [
            f'      "{name}": [\n' + ",\n".join(f"        {json.dumps(rule)}" for rule in rules) + "\n      ]"
            for name, rules in sections.items()
        ]
        architectures.append(f'    "{arch}": {{\n' + ",\n".join(parts) + "\n    }")
    return '{\n  "architectures": {\n' + ",\n".join(architectures) + "\n  }\n}\n"


def tuned(base: dict[str, list[dict]], quick: bool) -> dict[str, list[dict]]:
    """The sections of this card's architecture: measured rules first, then those of `base`."""
    pool, flush = Pool(POOL_ELEMENTS), make_flush()
    chunks = prefill_variants()[: 2 if quick else None]
    shapes = list(PREFILL)[-1:] if quick else list(PREFILL)
    chunk = best(chunks, prefill_call, shapes, torch.bfloat16, pool, flush)
    long_chunks = {"when": {"kv": ["native"], "max_head_dim": 128}, "use": asdict(chunk)}
    short = [rule for rule in base["prefill"] if "max_rows" in rule["when"]]
    others = [rule for rule in base["prefill"] if "max_rows" not in rule["when"]]
    decode = decode_rules(pool, flush, quick) + base["decode"]
    return base | {"decode": decode, "prefill": [*short, long_chunks, *others]}


def main() -> None:
    """Compiles, measures and writes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, nargs="?", default=TABLE)
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--quick", action="store_true")
    kinds.add_argument("--shared", action="store_true")
    options = parser.parse_args()
    if options.quick and options.out == TABLE:
        parser.error("--quick needs a file of its own: its choice is not for use")
    started, limit = time.time(), 2 if options.quick else None
    jobs = [partial(first_call, kv, config, 16) for kv in KV for config in decode_variants(kv)[:limit]]
    jobs += [partial(first_call, "bf16", config, 16) for config in prefill_variants()[:limit]]
    if options.shared:
        jobs = [partial(first_shared_call, config) for config in shared_variants()]
    print(f"{len(jobs)} candidates; failed: {warm(jobs)}; {time.time() - started:.0f} s", flush=True)
    major, minor = torch.cuda.get_device_capability()
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    known = sorted(table["architectures"], key=int)
    arch = str(10 * major + minor)
    base = table["architectures"].get(arch) or table["architectures"][known[-1]]
    if options.shared:
        rules = [rule for rule in base["shared"] if "min_rows" not in rule["when"]]
        table["architectures"][arch] = base | {"shared": shared_rules(Pool(POOL_ELEMENTS), make_flush(), rules)}
    else:
        table["architectures"][arch] = tuned(base, options.quick)
    options.out.write_text(dump(table), encoding="utf-8")
    print(f"{options.out} written after {time.time() - started:.0f} s")


if __name__ == "__main__":
    main()
