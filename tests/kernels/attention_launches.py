"""Compiles the attention kernels of the named cases without a card and prints what came out, as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict

import torch
from labkit_kernels import cascade, cascade_launch, kv_write, paged_decode, paged_prefill
from labkit_kernels.compile_check import CompileReport, compile_report, record_launch
from labkit_kernels.heuristics import decode_config, prefill_config
from labkit_kernels.scores import Scores

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
KINDS = {BF16: "native", FP8: "fp8", torch.int8: "int8", torch.uint8: "e4m3_bits"}


def decode_report(arch: int, kv: torch.dtype, *, heads=(32, 8), batch=2, block_size=16) -> CompileReport:
    cache = torch.zeros(9, block_size, heads[1], 128, dtype=kv)
    q = torch.zeros(batch, heads[0], 128, dtype=BF16)
    tables, lens = torch.zeros(batch, 4, dtype=torch.int32), torch.ones(batch, dtype=torch.int32)
    scores = Scores(scale=0.1)
    config = decode_config(arch, KINDS[kv], 128, heads[0] // heads[1], batch)
    workspace = paged_decode.make_workspace(q, cache, tables, scores, config=config)
    launch = record_launch(
        paged_decode, "_decode_kernel",
        lambda: paged_decode.paged_decode(q, cache, cache, tables, lens, scores, workspace=workspace),
    )  # fmt: skip
    return compile_report(launch, arch)


def prefill_report(arch: int, rows: int) -> CompileReport:
    cache = torch.zeros(9, 16, 8, 128, dtype=BF16)
    q = torch.zeros(64, 32, 128, dtype=BF16)
    starts, lens = torch.tensor([0, 64], dtype=torch.int32), torch.tensor([64], dtype=torch.int32)
    tables = torch.zeros(1, 4, dtype=torch.int32)
    config = prefill_config(arch, "native", 128, rows)
    launch = record_launch(
        paged_prefill, "_prefill_kernel",
        lambda: paged_prefill.paged_prefill(
            q, cache, cache, tables, lens, starts, Scores(scale=0.1), max_query_len=64, config=config, num_splits=1
        ),
    )  # fmt: skip
    return compile_report(launch, arch)


def cascade_report(arch: int, batch: int) -> CompileReport:
    cache = torch.zeros(9, 16, 8, 128, dtype=BF16)
    q = torch.zeros(batch, 32, 128, dtype=BF16)
    tables, lens = torch.zeros(batch, 4, dtype=torch.int32), torch.ones(batch, dtype=torch.int32)
    prefix, scores = cascade.SharedPrefix.make(torch.zeros(512, dtype=torch.int32), 8192, batch), Scores(scale=0.1)
    workspace = paged_decode.make_workspace(q, cache, tables, scores)
    launch = record_launch(
        cascade_launch, "_cascade_decode_kernel",
        lambda: cascade.cascade_decode(q, cache, cache, prefix, tables, lens, scores, workspace=workspace),
    )  # fmt: skip
    return compile_report(launch, arch)


def write_report(arch: int) -> CompileReport:
    cache = torch.zeros(9, 16, 8, 128, dtype=torch.uint8)
    key = torch.zeros(3, 8, 128, dtype=BF16)
    slots = torch.zeros(3, dtype=torch.int64)
    target = kv_write.KVTarget(cache, cache)
    launch = record_launch(kv_write, "_write_kernel", lambda: kv_write.write_kv(key, key, slots, target))
    return compile_report(launch, arch)


CASES = {
    "decode 90 bf16": lambda: decode_report(90, BF16),
    "decode 90 bf16, block 128": lambda: decode_report(90, BF16, block_size=128),
    "decode 90 fp8": lambda: decode_report(90, FP8),
    "decode 90 int8": lambda: decode_report(90, torch.int8),
    "decode 80 e4m3 bits": lambda: decode_report(80, torch.uint8),
    "decode 80 bf16": lambda: decode_report(80, BF16),
    "decode 89 fp8": lambda: decode_report(89, FP8),
    "cascade 90": lambda: cascade_report(90, 32),
    "prefill 90": lambda: prefill_report(90, 4096),
    "prefill 80": lambda: prefill_report(80, 4096),
    "write 80 e4m3 bits": lambda: write_report(80),
}

if __name__ == "__main__":
    print(json.dumps({name: asdict(make()) for name, make in CASES.items()}))
