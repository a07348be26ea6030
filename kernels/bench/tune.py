"""Measures the decode and prefill candidates on this card and rewrites its settings. usage: tune.py [OUT.json]

Times come from sweep.py's variants; for each KV kind the candidate with the smallest geometric mean over the shapes
wins, once for batches below 128 and once for larger ones. Only rules of this card's architecture for head sizes up to
128 change; OUT.json (default: the package's heuristics.json) receives the table.
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import asdict
from pathlib import Path

import labkit_kernels
import torch
from shapes import DECODE, PREFILL, Pool, Shape, make_inputs
from sweep import KV, POOL_ELEMENTS, decode_call, decode_variants, prefill_call, prefill_variants
from timing import make_flush, time_us

TABLE = Path(labkit_kernels.__file__).with_name("heuristics.json")
LARGE_BATCH = 128
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


def decode_rules(pool: Pool, flush) -> list[dict]:
    """Rules for head sizes up to 128 and up to 16 rows, measured."""
    rules = []
    for name, kinds in KINDS.items():
        for large in (True, False):
            shapes = [shape for shape in DECODE if (len(shape.lens) >= LARGE_BATCH) == large]
            choice = best(decode_variants(name), lambda i, c: decode_call(i, c)[1], shapes, KV[name], pool, flush)
            use = {key: value for key, value in asdict(choice).items() if DEFAULTS.get(key) != value}
            when = {"kv": kinds, "max_head_dim": 128, "max_rows": 16} | ({"min_batch": LARGE_BATCH} if large else {})
            rules.append({"when": when, "use": use})
    return rules


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


def main() -> None:
    """Measures and writes."""
    major, minor = torch.cuda.get_device_capability()
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    known = sorted(table["architectures"], key=int)
    arch = str(10 * major + minor)
    base = table["architectures"].get(arch) or table["architectures"][known[-1]]
    pool, flush = Pool(POOL_ELEMENTS), make_flush()
    sections = dict(base)
    sections["decode"] = decode_rules(pool, flush) + base["decode"]
    chunk = best(prefill_variants(), prefill_call, list(PREFILL), torch.bfloat16, pool, flush)
    long_chunks = {"when": {"kv": ["native"], "max_head_dim": 128}, "use": asdict(chunk)}
    short = [rule for rule in base["prefill"] if "max_rows" in rule["when"]]
    sections["prefill"] = [*short, long_chunks, *(rule for rule in base["prefill"] if "max_rows" not in rule["when"])]
    table["architectures"][arch] = sections
    Path(sys.argv[1] if len(sys.argv) > 1 else TABLE).write_text(dump(table), encoding="utf-8")


if __name__ == "__main__":
    main()
