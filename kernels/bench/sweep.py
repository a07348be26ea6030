"""Design sweep: variants of the kernels on the table's shapes. usage: sweep.py OUT.json [processes] [chunks]

Needs `kernels/` on PYTHONPATH where labkit is not installed.

Variants are compiled first in several processes (the disk cache is shared), then timed in one.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from labkit_kernels.cascade import SharedPrefix, cascade_decode
from labkit_kernels.heuristics import DecodeConfig, PrefillConfig
from labkit_kernels.paged_decode import make_workspace, paged_decode
from labkit_kernels.paged_prefill import paged_prefill
from labkit_kernels.scores import Scores
from shapes import DECODE, PREFILL, Inputs, Pool, Shape, make_inputs
from timing import copy_ceiling, make_flush, read_ceiling, time_us
from warm import warm

SWEPT = ("64x4096", "256x1024", "1x32768", "8x16384", "128 ragged", "16x1024", "1x4096", "1x65536", "16x4096", "1x1024")
KV = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn, "int8": torch.int8}
TINY = Shape("tiny", (256,) * 2)
TINY_PREFILL = Shape("tiny", (256,) * 2, new=128)
POOL_ELEMENTS = 2**30 + 2**27


def decode_variants(kv: str) -> list[DecodeConfig]:
    """Variants to time; an earlier, wider grid is in kernels/NOTES.md."""
    if kv == "bf16":
        settings = (
            (64, 4, 3, True, 2),
            (64, 4, 2, True, 3),
            (64, 4, 3, False, 3),
            (64, 4, 4, False, 2),
            (64, 4, 4, True, 1),
        )
        return [DecodeConfig(tile, warps, stages, swap, True, c) for tile, warps, stages, swap, c in settings]
    words = (
        (64, 4, 3, 4),
        (64, 4, 3, 5),
        (64, 4, 2, 4),
        (128, 4, 3, 2),
        (128, 4, 3, 3),
        (128, 4, 2, 3),
        (128, 8, 3, 2),
        (128, 8, 3, 3),
    )
    return [DecodeConfig(tile, warps, stages, False, True, c, 4096, True) for tile, warps, stages, c in words]


CHUNKED = {
    "1x1024": (128, 256, 512, 1024),
    "1x4096": (128, 192, 256, 384, 512, 1024),
    "16x1024": (256, 384, 512, 1024),
    "16x4096": (512, 1024, 1408, 2048, 4096),
    "1x32768": (512, 768, 1024, 1280, 2048, 4096),
    "8x16384": (1024, 2048, 2752, 4096, 8192, 16384),
    "1x65536": (1024, 1536, 2048, 2560, 4096, 8192),
    "128 ragged": (1024, 2048, 4096, 8192),
    "64x4096": (1024, 2048, 4096),
}


def sweep_chunks(kv: str, configs: list[DecodeConfig], pool: Pool, flush, rows: list[dict]) -> None:
    """Times fixed chunk lengths: what the plan's estimate must find."""
    for shape in (s for s in DECODE if s.name in CHUNKED):
        inputs = make_inputs(shape, 16, KV[kv], pool)
        for config in configs:
            for chunk in (None, *CHUNKED[shape.name]):
                workspace, call = decode_call(inputs, config, chunk)
                us = time_us(call, flush, 15)
                row = {"what": "chunk", "kv": kv, "shape": shape.name, "chunk": chunk, "us": us}
                rows.append(row | {"plan": workspace.meta.tolist()[:2]} | asdict(config))


def prefill_variants() -> list[PrefillConfig]:
    """Variants to time: rows, tile, warps, stages, and tile and stages on the diagonal."""
    settings = ((128, 128, 8, 3, 128, 1), (128, 128, 8, 3, 64, 1), (128, 128, 8, 3, 32, 2), (128, 128, 8, 2, 128, 1))
    smaller = ((128, 64, 8, 2, 64, 1), (128, 64, 8, 3, 64, 2), (64, 64, 4, 2, 64, 1), (64, 64, 4, 3, 64, 1))
    return [PrefillConfig(*values) for values in (*settings, *smaller)]


def decode_call(inputs: Inputs, config: DecodeConfig | None, chunk_tokens: int | None = None):
    """A planned decode call and its workspace."""
    scores = Scores(scale=inputs.shape.head_dim**-0.5)
    workspace = make_workspace(inputs.q, inputs.k, inputs.tables, scores, config=config, chunk_tokens=chunk_tokens)
    workspace.plan(inputs.lens)
    out = torch.empty_like(inputs.q)
    args = (inputs.q, inputs.k, inputs.v, inputs.tables, inputs.lens, scores)
    return workspace, lambda: paged_decode(*args, workspace=workspace, out=out)


def prefill_call(inputs: Inputs, config: PrefillConfig | None):
    """A prefill call."""
    scores = Scores(scale=inputs.shape.head_dim**-0.5)
    out = torch.empty_like(inputs.q)
    args = (inputs.q, inputs.k, inputs.v, inputs.tables, inputs.lens, inputs.starts, scores)
    return lambda: paged_prefill(*args, max_query_len=inputs.shape.new, out=out, config=config)


def shared_variants() -> list[PrefillConfig]:
    """Variants of the shared part of a cascade: rows, tile, warps, stages, and the stages of the rest."""
    settings = ((64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 2), (128, 128, 8, 2), (32, 64, 4, 2), (32, 128, 4, 2))
    return [PrefillConfig(rows, tile, warps, stages, tile, stages) for rows, tile, warps, stages in settings]


def shared_inputs(pool: Pool, batch: int, shared: int, own: int) -> Inputs:
    """Sequences of `own` tokens each after the same `shared` tokens, in shuffled blocks of 16."""
    first, each = shared // 16, own // 16
    total = first + batch * each
    k, v = pool.take(torch.bfloat16, (total, 16, 8, 128))
    order = torch.randperm(total, generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    tables = torch.cat([order[:first].expand(batch, first), order[first:].view(batch, each)], 1)
    q = torch.randn(batch, 32, 128, device="cuda", dtype=torch.bfloat16)
    lens = torch.full((batch,), shared + own, dtype=torch.int32, device="cuda")
    starts = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
    return Inputs(Shape("shared", (shared + own,) * batch), 16, q, k, v, tables.cuda(), lens, starts)


def shared_call(pool: Pool, config: PrefillConfig | None, batch: int, shared: int, own: int):
    """A cascade over a prefix of `shared` tokens, and the plain kernel on the same tables."""
    inputs = shared_inputs(pool, batch, shared, own)
    blocks = shared // 16
    scores = Scores(scale=inputs.shape.head_dim**-0.5)
    own_tables = inputs.tables[:, blocks:]
    own_lens = torch.full((batch,), own, dtype=torch.int32, device="cuda")
    workspace = make_workspace(inputs.q, inputs.k, own_tables, scores)
    workspace.plan(own_lens)
    prefix = SharedPrefix.make(inputs.tables[0, :blocks].contiguous(), shared, batch)
    out = torch.empty_like(inputs.q)
    args = (inputs.q, inputs.k, inputs.v, prefix, own_tables, own_lens, scores)
    return (lambda: cascade_decode(*args, workspace=workspace, out=out, config=config)), decode_call(inputs, None)[1]


def first_shared_call(config: PrefillConfig | None, batch: int = 32, shared: int = 8192) -> None:
    """Compiles a cascade as it is for a long prefix, and the plain kernel."""
    for call in shared_call(Pool(2**27), config, batch, shared, 64):
        call()


def first_call(kv: str, config: DecodeConfig | PrefillConfig, block_size: int) -> None:
    """Compiles a variant on a small shape."""
    pool = Pool(2**22)
    if isinstance(config, DecodeConfig):
        decode_call(make_inputs(TINY, block_size, KV[kv], pool), config)[1]()
    else:
        prefill_call(make_inputs(TINY_PREFILL, block_size, KV[kv], pool), config)()


def sweep_decode(kv: str, pool: Pool, flush, rows: list[dict]) -> None:
    """Times every variant on every swept shape."""
    for shape in (s for s in DECODE if s.name in SWEPT):
        inputs = make_inputs(shape, 16, KV[kv], pool)
        for config in decode_variants(kv):
            try:
                workspace, call = decode_call(inputs, config)
                us = time_us(call, flush, 15)
                plan_us = time_us(lambda w=workspace, i=inputs: w.plan(i.lens), flush, 11)
            except Exception as error:
                rows.append(
                    {"what": "decode", "kv": kv, "shape": shape.name, **asdict(config), "error": str(error)[:200]}
                )
                continue
            rows.append(
                {
                    "what": "decode", "kv": kv, "shape": shape.name, **asdict(config), "us": us, "plan_us": plan_us,
                    "gb_s": inputs.kv_bytes / us / 1e3, "plan": workspace.meta.tolist()[:2],
                }
            )  # fmt: skip


def sweep_prefill(pool: Pool, flush, rows: list[dict]) -> None:
    """Times every prefill variant on every prefill shape."""
    for shape in PREFILL:
        inputs = make_inputs(shape, 16, torch.bfloat16, pool)
        for config in prefill_variants():
            try:
                us = time_us(prefill_call(inputs, config), flush, 7)
            except Exception as error:
                rows.append({"what": "prefill", "shape": shape.name, **asdict(config), "error": str(error)[:200]})
                continue
            rows.append(
                {"what": "prefill", "shape": shape.name, **asdict(config), "us": us, "tflops": inputs.flops / us / 1e6}
            )


def main() -> None:
    """Compiles, times, writes JSON, prints the best of each shape."""
    out = Path(sys.argv[1])
    started = time.time()
    jobs = [partial(first_call, kv, config, 16) for kv in KV for config in decode_variants(kv)]
    jobs += [partial(first_call, "bf16", config, 16) for config in prefill_variants()]
    failed = warm(jobs, int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    print(f"{len(jobs)} variants compiled in {time.time() - started:.0f} s; failed:", *failed, sep="\n  ", flush=True)
    flush, pool = make_flush(), Pool(POOL_ELEMENTS)
    rows: list[dict] = [{"what": "ceiling", "read_gb_s": read_ceiling(flush), "copy_gb_s": copy_ceiling(flush)}]
    print(rows[0], flush=True)
    for kv in KV:
        sweep_decode(kv, pool, flush, rows)
        out.write_text(json.dumps(rows, indent=1))
        print(f"{kv} decode at {time.time() - started:.0f} s", flush=True)
    if "chunks" in sys.argv:
        sweep_chunks("bf16", [DecodeConfig(64, 4, 3, True, True, 2)], pool, flush, rows)
        sweep_chunks("fp8", [DecodeConfig(64, 4, 3, False, True, 4, 4096, True)], pool, flush, rows)
    sweep_prefill(pool, flush, rows)
    out.write_text(json.dumps(rows, indent=1))
    timed = [row for row in rows if "us" in row]
    for key in dict.fromkeys((row["what"], row.get("kv"), row["shape"]) for row in timed):
        group = sorted((r for r in timed if (r["what"], r.get("kv"), r["shape"]) == key), key=lambda r: r["us"])
        for row in group[:2]:
            print(*key, {k: v for k, v in row.items() if k not in ("what", "kv", "shape", "merge", "evict")})
    print(f"done in {time.time() - started:.0f} s")


if __name__ == "__main__":
    main()
