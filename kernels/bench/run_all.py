"""The table of ratios against FlashAttention-3, FlashInfer and vLLM's Triton kernel. usage: run_all.py OUT.json

Peers must be importable (kernels/bench/peers.py); what is missing is named in the result. KV bytes count each K and V
byte once. All times: CUDA-graph replay, L2 flushed before each, median; our plan and the peers' are made outside.
Everything is called once in several processes first, so that no compiler runs between times.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import first_calls
import peers
import torch
import triton
from labkit_kernels.heuristics import as_dict
from labkit_kernels.kv_write import KVTarget, write_kv
from labkit_kernels.paged_decode import paged_decode
from labkit_kernels.scores import Scores
from labkit_kernels.teaching import VARIANTS, variant_workspace
from shapes import DECODE, PREFILL, Inputs, Pool, Shape, make_inputs, with_heads
from summary import by_name, summarise
from sweep import KV, POOL_ELEMENTS, decode_call, prefill_call, shared_call
from timing import copy_ceiling, make_flush, read_ceiling, time_us
from warm import warm

MAIN = DECODE[:5]
WRITES = tuple((kv, tokens) for kv in ("bf16", "fp8", "int8") for tokens in (1, 64, 256, 1024, 4096, 8192, 32768))
LAYERS = 28
SHARED_BATCH = 32


class Bench:
    """Flush, pool and rows of one run."""

    def __init__(self) -> None:
        self.flush, self.pool = make_flush(), Pool(POOL_ELEMENTS)
        self.rows: list[dict] = []
        self.missing: dict[str, str] = {}

    def peer(self, name: str, maker, ours: torch.Tensor | None, repeats: int) -> dict:
        """Time of a peer, and how far its result is from ours; empty where it cannot run."""
        try:
            call = maker()
            result = call()
            torch.cuda.synchronize()
            entry = {f"{name}_us": time_us(call, self.flush, repeats)}
        except Exception as error:
            self.missing.setdefault(name, f"{type(error).__name__}: {str(error)[:200]}")
            return {}
        result = result[0] if isinstance(result, tuple) else result
        if result is not None and ours is not None:
            entry[f"{name}_differs"] = float((result.float() - ours.float()).norm() / ours.float().norm())
        return entry

    def decode(self, shape: Shape, kv: str, block_size: int, repeats: int = 30) -> None:
        """One row of the decode table."""
        inputs = make_inputs(shape, block_size, KV[kv], self.pool)
        workspace, call = decode_call(inputs, None)
        ours = call().clone()
        row = {
            "table": "decode", "shape": shape.name, "heads": f"{shape.q_heads}/{shape.kv_heads}", "kv": kv,
            "block_size": block_size, "kv_bytes": inputs.kv_bytes, "us": time_us(call, self.flush, repeats),
            "plan_us": time_us(lambda: workspace.plan(inputs.lens), self.flush, 11),
            "items_and_chunk": workspace.meta.tolist()[:2], "settings": as_dict(workspace.config),
        }  # fmt: skip
        if kv != "int8":
            row |= self.peer("fa3", lambda: peers.fa3(inputs), ours, repeats)
            row |= self.peer("flashinfer_tc", lambda: peers.flashinfer(inputs), ours, repeats)
            if block_size == 16:
                cuda_mode = self.peer("flashinfer_cuda", lambda: peers.flashinfer(inputs, tensor_cores=False), ours, 5)
                row |= cuda_mode
                row |= self.peer("vllm_triton", lambda: peers.vllm_triton(inputs), None, 11)
        row["gb_s"] = inputs.kv_bytes / row["us"] / 1e3
        self.rows.append(row)

    def prefill(self, shape: Shape) -> None:
        """One row of the prefill table."""
        inputs = make_inputs(shape, 16, torch.bfloat16, self.pool)
        call = prefill_call(inputs, None)
        ours = call().clone()
        us = time_us(call, self.flush, 15)
        row = {"table": "prefill", "shape": shape.name, "us": us, "tflops": inputs.flops / us / 1e6}
        row |= self.peer("fa3", lambda: peers.fa3(inputs), ours, 15)
        row |= self.peer("vllm_triton", lambda: peers.vllm_triton(inputs), None, 3)
        self.rows.append(row)

    def kv_write(self, kv: str, num_tokens: int) -> None:
        """One row of the KV write table: bytes read (bf16) plus bytes written; a copy of as many bytes beside it.

        Once alone in a graph, and from 4096 to 8192 tokens also as an engine has it, the writes of 28 layers in one.
        """
        heads, dim = 8, 128
        layers = LAYERS if num_tokens in (4096, 8192) else 1
        sets, slots = _write_inputs(KV[kv], num_tokens, heads, dim, layers)
        num_bytes = 2 * num_tokens * heads * dim * (2 + sets[0][2].k_cache.element_size())
        source, target = (
            [torch.empty(num_bytes // 8, dtype=torch.float32, device="cuda") for _ in range(layers)] for _ in range(2)
        )

        def write(count: int) -> None:
            for key, value, cache in sets[:count]:
                write_kv(key, value, slots, cache)

        def copy(count: int) -> None:
            for x, y in zip(source[:count], target, strict=False):
                torch.add(x, 0, out=y)

        us, copy_us = (time_us(lambda call=call: call(1), self.flush) for call in (write, copy))
        row = {"table": "kv_write", "tokens": num_tokens, "kv": kv, "us": us, "gb_s": num_bytes / us / 1e3}
        row["copy_of_same_bytes_us"] = copy_us
        if layers > 1:
            us, copy_us = (time_us(lambda call=call: call(layers), self.flush, 11) / layers for call in (write, copy))
            row |= {"layer_us": us, "layer_gb_s": num_bytes / us / 1e3, "layer_copy_us": copy_us}
        self.rows.append(row)

    def shared_prefix(self, batch: int = SHARED_BATCH, shared: int = 8192, own: int = 512) -> None:
        """Cascade against the plain kernel on the same shared tables."""
        cascade, plain = shared_call(self.pool, None, batch, shared, own)
        want, have = plain().float(), cascade().float()
        self.rows.append(
            {
                "table": "shared_prefix", "shape": f"{batch} x ({shared} shared + {own} own)",
                "us": time_us(cascade, self.flush), "plain_us": time_us(plain, self.flush),
                "differs": float((want - have).norm() / want.norm()),
            }
        )  # fmt: skip

    def variants(self, inputs: Inputs) -> None:
        """The teaching variants on one shape."""
        scores = Scores(scale=inputs.shape.head_dim**-0.5)
        out = torch.empty_like(inputs.q)
        args = (inputs.q, inputs.k, inputs.v, inputs.tables, inputs.lens, scores)
        for variant in VARIANTS:
            if variant == "tile = block" and inputs.block_size > 128:
                continue
            workspace = variant_workspace(variant, inputs.q, inputs.k, inputs.tables, scores)
            workspace.plan(inputs.lens)
            us = time_us(lambda w=workspace: paged_decode(*args, workspace=w, out=out), self.flush)
            self.rows.append(
                {
                    "table": "variants", "shape": inputs.shape.name, "block_size": inputs.block_size,
                    "variant": variant, "us": us, "gb_s": inputs.kv_bytes / us / 1e3,
                }
            )  # fmt: skip


def _write_inputs(kv: torch.dtype, num_tokens: int, heads: int, dim: int, layers: int):
    """Keys, values and cache of each layer, and slots in shuffled blocks."""
    block_size = 16
    blocks = max(num_tokens // block_size * 2, 1024)
    sets = []
    for _ in range(layers):
        caches = [torch.zeros(blocks, block_size, heads, dim, dtype=kv, device="cuda") for _ in range(2)]
        key = torch.randn(num_tokens, heads, dim, dtype=torch.bfloat16, device="cuda")
        sets.append((key, torch.randn_like(key), KVTarget(*caches)))
    slots = torch.randperm(blocks, device="cuda")[: -(-num_tokens // block_size)]
    slots = (slots[:, None] * block_size + torch.arange(block_size, device="cuda")).flatten()[:num_tokens]
    return sets, slots


def decode_rows() -> list[tuple[Shape, str, int]]:
    """Shape, KV dtype and block size of each row of the decode table."""
    rows = []
    for kv in ("bf16", "fp8"):
        rows += [(shape, kv, block_size) for shape in DECODE for block_size in (16, 64, 128)]
        rows += [(with_heads(shape, *heads), kv, 16) for shape in MAIN for heads in ((28, 4), (16, 8))]
    return rows + [(shape, "int8", 16) for shape in MAIN]


def stages(bench: Bench) -> Iterator[str]:
    """All rows, a name after each part."""
    bench.rows.append(
        {"table": "ceilings", "read_gb_s": read_ceiling(bench.flush), "copy_gb_s": copy_ceiling(bench.flush)}
    )
    for shape, kv, block_size in decode_rows():
        bench.decode(shape, kv, block_size)
    yield "decode"
    for shape in PREFILL:
        bench.prefill(shape)
    yield "prefill"
    bench.shared_prefix()
    for kv, num_tokens in WRITES:
        bench.kv_write(kv, num_tokens)
    yield "shared prefix and KV writes"
    for block_size in (16, 32, 64, 128):
        bench.variants(make_inputs(DECODE[0], block_size, torch.bfloat16, bench.pool))
    yield "variants"


def record(bench: Bench) -> dict:
    """The result as far as it has come."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": "PYTHONPATH=kernels:<peers> python3 kernels/bench/run_all.py results/kernels.json",
        "card": f"{properties.name}, {properties.multi_processor_count} SMs, L2 {properties.L2_cache_size} bytes",
        "versions": {
            "python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__,
            "cuda": torch.version.cuda, "fa3": "vLLM 0.25.1 build", "flashinfer": "0.6.13", "vllm_triton": "0.25.1",
        },
        "method": "CUDA-graph replays, 256 MB written before each to flush the L2, medians of 11 to 30",
        "peers_missing": bench.missing,
        "summary": by_name(summarise(bench.rows)),
        "rows": bench.rows,
    }  # fmt: skip


def main() -> None:
    """Compiles, runs, writes the JSON after each part, prints the summary."""
    started = time.time()
    failed = warm(first_calls.tasks(decode_rows(), list(WRITES), SHARED_BATCH))
    print(f"all compiled at {time.time() - started:.0f} s; failed: {failed}", flush=True)
    bench = Bench()
    for stage in stages(bench):
        result = record(bench)
        Path(sys.argv[1]).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(f"{stage} at {time.time() - started:.0f} s", flush=True)
    for name, entry in result["summary"].items():
        print(name, json.dumps(entry))
    print(f"missing: {bench.missing}")


if __name__ == "__main__":
    main()
