"""Ratios against FlashAttention-3, FlashInfer and vLLM's Triton kernel. usage: run_all.py OUT.json [TABLE …]

With tables named (ceilings, decode, prefill, shared_prefix, kv_write, variants) only those are measured, and the others
stay as OUT.json has them; `made_of` says from when each is.

Peers must be importable (kernels/bench/peers.py); what is missing is named in the result. KV bytes count each K and V
byte once. All times: CUDA-graph replay, L2 flushed before each, median; our plan and the peers' are made outside.
Everything is called once in several processes first, so that no compiler runs between times.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path

import first_calls
import peers
import torch
import triton
from labkit_kernels.decode_plan import DecodeWorkspace
from labkit_kernels.heuristics import as_dict
from labkit_kernels.kv_write import KVTarget, write_kv
from labkit_kernels.paged_decode import paged_decode
from labkit_kernels.scores import Scores
from labkit_kernels.teaching import VARIANTS, variant_workspace
from shapes import DECODE, PREFILL, Inputs, Pool, Shape, make_inputs, with_heads
from summary import GIGABYTE, by_name, summarise
from sweep import KV, POOL_ELEMENTS, decode_call, prefill_call, shared_call
from timing import copy_ceiling, make_clean_flush, make_flush, read_calls, read_ceiling, time_us, times_us
from warm import warm

MAIN = DECODE[:5]
WRITES = tuple((kv, tokens) for kv in ("bf16", "fp8", "int8") for tokens in (1, 64, 256, 1024, 4096, 8192, 32768))
LAYERS = 28
SHARED = ((32, 8192), (64, 8192), (128, 8192), (32, 32768), (64, 32768), (128, 32768))
OWN_TOKENS = 512
SMALL_BYTES = 2**26
COMMAND = "PYTHONPATH=kernels:<peers> python3 kernels/bench/run_all.py results/kernels.json"
TABLES = ("ceilings", "decode", "prefill", "shared_prefix", "kv_write", "variants")


class Bench:
    """Flush, pool and rows of one run."""

    def __init__(self) -> None:
        self.flush, self.clean_flush, self.pool = make_flush(), make_clean_flush(), Pool(POOL_ELEMENTS)
        self.rows: list[dict] = []
        self.missing: dict[str, str] = {}

    def peer(
        self, name: str, maker, ours: torch.Tensor | None, repeats: int, beside: Callable[[], object] | None = None
    ) -> dict:
        """Time of a peer, and how far its result is from ours; empty where it cannot run.

        beside: our call, timed in turn with the peer: a card under long products lowers its clock.
        """
        try:
            call = maker()
            result = call()
            torch.cuda.synchronize()
            if beside is None:
                entry = {f"{name}_us": time_us(call, self.flush, repeats)}
            else:
                us, peer_us = times_us([beside, call], self.flush, repeats)
                entry = {"us": us, f"{name}_us": peer_us}
        except Exception as error:
            self.missing.setdefault(name, f"{type(error).__name__}: {str(error)[:200]}")
            return {}
        result = result[0] if isinstance(result, tuple) else result
        if result is not None and ours is not None:
            entry[f"{name}_differs"] = float((result.float() - ours.float()).norm() / ours.float().norm())
        return entry

    def decode(self, shape: Shape, kv: str, block_sizes: list[int], repeats: int = 30) -> None:
        """Rows of the decode table; block sizes are timed in turn, so that their ratios are of one moment."""
        made = [make_inputs(shape, block_size, KV[kv], self.pool) for block_size in block_sizes]
        ours = [decode_call(inputs, None) for inputs in made]
        together = 4 * repeats if made[0].kv_bytes < SMALL_BYTES else repeats
        times = times_us([call for _, call in ours], self.flush, together)
        for inputs, (workspace, call), us in zip(made, ours, times, strict=True):
            self._decode_row(inputs, kv, workspace, call, us, repeats)

    def _decode_row(
        self, inputs: Inputs, kv: str, workspace: DecodeWorkspace, call: Callable, us: float, repeats: int
    ) -> None:
        shape, block_size, ours = inputs.shape, inputs.block_size, call().clone()
        row = {
            "table": "decode", "shape": shape.name, "heads": f"{shape.q_heads}/{shape.kv_heads}", "kv": kv,
            "block_size": block_size, "kv_bytes": inputs.kv_bytes, "us": us,
            "plan_us": time_us(lambda: workspace.plan(inputs.lens), self.flush, 11),
            "items_and_chunk": workspace.meta.tolist()[:2], "settings": as_dict(workspace.config),
        }  # fmt: skip
        if kv == "bf16" and inputs.kv_bytes >= GIGABYTE:
            beside, *reads = times_us([call, *read_calls(inputs.kv_bytes)], self.flush, 15)
            row |= {"beside_read_us": beside, "read_of_same_bytes_us": min(reads)}
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
        row = {"table": "prefill", "shape": shape.name, "us": time_us(call, self.flush, 15)}
        row |= self.peer("fa3", lambda: peers.fa3(inputs), ours, 30, beside=call)
        row |= self.peer("vllm_triton", lambda: peers.vllm_triton(inputs), None, 3)
        row["tflops"] = inputs.flops / row["us"] / 1e6
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

    def shared_prefix(self, batch: int, shared: int, own: int = OWN_TOKENS) -> None:
        """Cascade against the plain kernel on the same shared tables; also with an L2 of clean lines.

        What the flush wrote goes to memory while a launch reads: up to the L2's size, half of a cascade's bytes.
        """
        calls = shared_call(self.pool, None, batch, shared, own)
        have, want = (call().float() for call in calls)
        us, plain_us = times_us([*calls], self.flush)
        clean_us, clean_plain_us = times_us([*calls], self.clean_flush)
        self.rows.append(
            {
                "table": "shared_prefix", "shape": f"{batch} x ({shared} shared + {own} own)", "us": us,
                "plain_us": plain_us, "clean_us": clean_us, "clean_plain_us": clean_plain_us,
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


def stages(bench: Bench, tables: list[str]) -> Iterator[str]:
    """The rows of `tables`, a name after each part."""
    if "ceilings" in tables:
        bench.rows.append(
            {"table": "ceilings", "read_gb_s": read_ceiling(bench.flush), "copy_gb_s": copy_ceiling(bench.flush)}
        )
    if "decode" in tables:
        for (shape, kv), rows in groupby(decode_rows(), lambda row: row[:2]):
            bench.decode(shape, kv, [block_size for _, _, block_size in rows])
        yield "decode"
    if "prefill" in tables:
        for shape in PREFILL:
            bench.prefill(shape)
        yield "prefill"
    if "shared_prefix" in tables:
        for batch, shared in SHARED:
            bench.shared_prefix(batch, shared)
        yield "shared prefix"
    if "kv_write" in tables:
        for kv, num_tokens in WRITES:
            bench.kv_write(kv, num_tokens)
        yield "KV writes"
    if "variants" in tables:
        for block_size in (16, 32, 64, 128):
            bench.variants(make_inputs(DECODE[0], block_size, torch.bfloat16, bench.pool))
        yield "variants"


def record(bench: Bench, earlier: dict) -> dict:
    """The result as far as it has come, with the rows of tables that were not measured as `earlier` has them."""
    properties = torch.cuda.get_device_properties(0)
    made = datetime.now(UTC).isoformat(timespec="seconds")
    new = {row["table"] for row in bench.rows}
    rows = bench.rows + [row for row in earlier.get("rows", []) if row["table"] not in new]
    rows.sort(key=lambda row: TABLES.index(row["table"]))
    made_of = earlier.get("made_of") or {row["table"]: earlier["made"] for row in earlier.get("rows", [])}
    return {
        "made": made,
        "command": "; ".join([earlier["command"], f"{COMMAND} {' '.join(sorted(new))}"]) if earlier else COMMAND,
        "card": f"{properties.name}, {properties.multi_processor_count} SMs, L2 {properties.L2_cache_size} bytes",
        "versions": {
            "python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__,
            "cuda": torch.version.cuda, "fa3": "vLLM 0.25.1 build", "flashinfer": "0.6.13", "vllm_triton": "0.25.1",
        },
        "method": "CUDA-graph replays, 256 MB written before each to flush the L2, medians of 11 to 120; in turn: block"
        " sizes of a shape, a read of as many bytes, FA3 in prefill, both calls of a shared prefix",
        "made_of": made_of | dict.fromkeys(new, made),
        "peers_missing": earlier.get("peers_missing", {}) | bench.missing,
        "summary": by_name(summarise(rows)),
        "rows": rows,
    }  # fmt: skip


def main() -> None:
    """Compiles, runs, writes the JSON after each part, prints the summary."""
    started = time.time()
    out, tables = Path(sys.argv[1]), sys.argv[2:] or list(TABLES)
    unknown = set(tables) - set(TABLES)
    if unknown:
        raise SystemExit(f"no such table: {', '.join(sorted(unknown))}; tables are {', '.join(TABLES)}")
    earlier = json.loads(out.read_text(encoding="utf-8")) if sys.argv[2:] else {}
    if "decode" in tables:
        failed = warm(first_calls.tasks(decode_rows(), list(WRITES), list(SHARED)))
        print(f"all compiled at {time.time() - started:.0f} s; failed: {failed}", flush=True)
    bench = Bench()
    for stage in stages(bench, tables):
        result = record(bench, earlier)
        out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(f"{stage} at {time.time() - started:.0f} s", flush=True)
    for name, entry in result["summary"].items():
        print(name, json.dumps(entry))
    print(f"missing: {bench.missing}")


if __name__ == "__main__":
    main()
