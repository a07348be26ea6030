"""Every peer on the table's shapes beside our kernels with the recorded settings. usage: first_look.py OUT.json"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import peers
import torch
from labkit_kernels.heuristics import decode_config
from shapes import DECODE, PREFILL, Pool, make_inputs
from sweep import KV, POOL_ELEMENTS, decode_call, prefill_call
from timing import make_flush, time_us


def compare(name: str, call, ours: torch.Tensor, flush, repeats: int) -> dict:
    """Time of a peer and how far its answer is from ours; its error where it cannot run."""
    try:
        result = call()
        torch.cuda.synchronize()
        if isinstance(result, tuple):
            result = result[0]
        far = float((result.float() - ours.float()).norm() / ours.float().norm()) if result is not None else None
        return {name: time_us(call, flush, repeats), f"{name} differs": far}
    except Exception as error:
        return {f"{name} error": f"{type(error).__name__}: {str(error)[:300]}"}


def peer_rows(inputs, ours: torch.Tensor, flush, repeats: int, decode: bool) -> dict:
    """All peers on one shape."""
    makers = {
        "fa3": lambda: peers.fa3(inputs),
        "fa3 own plan": lambda: peers.fa3(inputs, metadata=False),
        "vllm triton": lambda: peers.vllm_triton(inputs),
    }
    if decode:
        makers["flashinfer tc"] = lambda: peers.flashinfer(inputs)
        makers["flashinfer cuda"] = lambda: peers.flashinfer(inputs, tensor_cores=False)
    row: dict = {}
    for name, maker in makers.items():
        try:
            call = maker()
        except Exception as error:
            row[f"{name} error"] = f"{type(error).__name__}: {str(error)[:300]}"
            continue
        row |= compare(name, call, ours, flush, repeats)
    return row


def main() -> None:
    """Runs all, prints microseconds."""
    out, started = Path(sys.argv[1]), time.time()
    flush, pool, rows = make_flush(), Pool(POOL_ELEMENTS), []
    for kv in ("bf16", "fp8"):
        for shape in DECODE:
            inputs = make_inputs(shape, 16, KV[kv], pool)
            config = decode_config(90, "native" if kv == "bf16" else "fp8", 128, 4)
            _, call = decode_call(inputs, config)
            ours = call().clone()
            row = {"kv": kv, "shape": shape.name, "ours": time_us(call, flush)}
            rows.append(row | peer_rows(inputs, ours, flush, 15, True))
            print({k: round(v, 4) if isinstance(v, float) else v for k, v in rows[-1].items()}, flush=True)
            out.write_text(json.dumps(rows, indent=1))
    for shape in PREFILL:
        inputs = make_inputs(shape, 16, torch.bfloat16, pool)
        call = prefill_call(inputs, None)
        ours = call().clone()
        rows.append({"shape": shape.name, "ours": time_us(call, flush, 7)} | peer_rows(inputs, ours, flush, 5, False))
        print({k: round(v, 4) if isinstance(v, float) else v for k, v in rows[-1].items()}, flush=True)
        out.write_text(json.dumps(rows, indent=1))
    print(f"done in {time.time() - started:.0f} s")


if __name__ == "__main__":
    main()
