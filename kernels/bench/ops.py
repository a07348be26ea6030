"""Times the kernels around attention against torch and the card's copy rate. usage: ops.py --out OUT.json

Graph replays with the L2 flushed, medians. Swaps are timed by events on both ways. Adds nothing but this file's JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
import triton
from labkit_kernels import block_copy, reference
from labkit_kernels.activations import silu_and_mul
from labkit_kernels.awq_words import AwqWords, turn_words, words_matmul
from labkit_kernels.few_rows import few_rows_matmul
from labkit_kernels.kv_write import KVTarget, write_kv
from labkit_kernels.norms import add_rms_norm
from labkit_kernels.pooling import pool
from labkit_kernels.quantise import quantise_rows
from labkit_kernels.rope import apply_rope
from labkit_kernels.rope_write import Rotary
from labkit_kernels.sampling import greedy, sample
from labkit_kernels.testing_ops import awq_weight, sampling_tensors
from ops_summary import summarise
from summary import by_name
from timing import copy_ceiling, make_flush, read_ceiling, time_us

BF16 = torch.bfloat16
VOCAB = 151936
Timer = Callable[[Callable[[], object]], float]


def randn(*shape: int) -> torch.Tensor:
    """Random bf16 on the card."""
    return torch.randn(shape, dtype=BF16, device="cuda")


def row(what: str, shape: str, us: float, num_bytes: int, **others: float) -> dict:
    """One line of the table."""
    return {"what": what, "shape": shape, "us": us, "bytes": num_bytes, "gb_s": num_bytes / us / 1e3} | others


def same_copy_us(num_bytes: int, timer: Timer) -> float:
    """Time of torch's own copy that reads and writes `num_bytes` in all."""
    source = torch.ones(max(1, num_bytes // 8), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    return timer(lambda: target.copy_(source))


def elementwise_rows(timer: Timer) -> list[dict]:
    """Norm, activation and rotation at prefill and decode sizes."""
    rows = []
    for tokens, hidden in ((8192, 4096), (8192, 5120), (64, 4096), (7, 576)):
        x, residual, weight = randn(tokens, hidden), randn(tokens, hidden), randn(hidden)
        out, size = torch.empty_like(x), 8 * tokens * hidden
        us = timer(lambda x=x, r=residual, w=weight, o=out: add_rms_norm(x, r, w, 1e-6, out=o))
        plain = timer(lambda x=x, r=residual, w=weight: F.rms_norm(r.add_(x), (x.shape[1],), w, 1e-6))
        copy = same_copy_us(size, timer)
        rows.append(row("add_rms_norm", f"{tokens} x {hidden}", us, size, torch_us=plain, copy_us=copy))
    for tokens, inner in ((8192, 14336), (64, 14336), (7, 1536)):
        x, size = randn(tokens, 2 * inner), 6 * tokens * inner
        out = torch.empty(tokens, inner, dtype=BF16, device="cuda")
        us = timer(lambda x=x, o=out: silu_and_mul(x, out=o))
        plain = timer(lambda x=x, n=inner: F.silu(x[:, :n]) * x[:, n:])
        copy = same_copy_us(size, timer)
        rows.append(row("silu_and_mul", f"{tokens} x {inner}", us, size, torch_us=plain, copy_us=copy))
    table = torch.randn(8192, 128, device="cuda")
    for tokens in (8192, 64):
        q, k, positions = randn(tokens, 32, 128), randn(tokens, 8, 128), torch.arange(tokens, device="cuda")
        size = 4 * tokens * 40 * 128
        us = timer(lambda q=q, k=k, p=positions: apply_rope(q, k, p, Rotary(table)))
        plain = timer(lambda q=q, k=k, p=positions: [reference.rope(x, p, table) for x in (q, k)])
        copy = same_copy_us(size, timer)
        rows.append(row("rope", f"{tokens} x 32/8 x 128", us, size, torch_us=plain, copy_us=copy))
    return rows


def plain_sample(logits: torch.Tensor, k: int, p: float) -> torch.Tensor:
    """Torch's way with a full sort, as vLLM's fallback has it."""
    values, order = logits.float().sort(dim=-1, descending=True)
    if k:
        values[:, k:] = float("-inf")
    probabilities = values.softmax(-1)
    probabilities = probabilities.masked_fill(probabilities.cumsum(-1) - probabilities >= p, 0)
    drawn = (probabilities / torch.empty_like(probabilities).exponential_()).argmax(-1, keepdim=True)
    return order.gather(-1, drawn)


def sampling_rows(timer: Timer) -> list[dict]:
    """Draws from peaked logits, as models give them, and from flat ones."""
    rows = []
    for name, count, scale in (("peaked", 64, 4.0), ("flat", 64, 1.0), ("peaked", 1, 4.0), ("peaked", 256, 4.0)):
        logits = torch.randn(count, VOCAB, device="cuda") * scale
        out, size = torch.empty(count, dtype=torch.int64, device="cuda"), 4 * count * VOCAB
        for k, p in ((0, 1.0), (50, 1.0), (0, 0.9), (20, 0.8)):
            parameters = sampling_tensors(count, "cuda", top_k=k, top_p=p)
            us = timer(lambda x=logits, q=parameters, o=out: sample(x, q, out=o))
            plain = timer(lambda x=logits, k=k, p=p: plain_sample(x, k, p))
            rows.append(row("sample", f"{name} {count} x {VOCAB}, k {k}, p {p}", us, size, torch_us=plain))
        us = timer(lambda x=logits, o=out: greedy(x, out=o))
        plain = timer(lambda x=logits: x.argmax(-1))
        rows.append(row("greedy", f"{name} {count} x {VOCAB}", us, size, torch_us=plain))
    return rows


def awq_rows(timer: Timer) -> list[dict]:
    """The 4-bit product against cuBLAS on 16-bit weights of the same shape."""
    rows = []
    for inputs, outputs in ((4096, 14336), (4096, 4096)):
        stored = awq_weight(inputs, outputs, 128, "cuda")
        weight = AwqWords(turn_words(stored.qweight), stored.qzeros, stored.scales)
        dense = torch.randn(inputs, outputs, dtype=torch.float16, device="cuda")
        size = inputs * outputs // 2 + inputs // 128 * outputs * 5 // 2
        for tokens in (1, 8, 16, 32, 64, 256, 2048):
            x = torch.randn(tokens, inputs, dtype=torch.float16, device="cuda")
            out = torch.empty(tokens, outputs, dtype=torch.float16, device="cuda")
            us = timer(lambda x=x, w=weight, o=out: words_matmul(x, w, out=o))
            plain = timer(lambda x=x, w=dense, o=out: torch.mm(x, w, out=o))
            tflops = 2 * tokens * inputs * outputs / us / 1e6
            rows.append(row("awq", f"{tokens} x {inputs} x {outputs}", us, size, torch_us=plain, tflops=tflops))
    return rows


def few_rows_rows(timer: Timer) -> list[dict]:
    """Products of few rows at the shapes of an 8B model, against cuBLAS in 16 bit and torch's product in fp8."""
    rows = []
    for outputs, inputs in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)):
        dense, scales = randn(outputs, inputs), torch.rand(outputs, 1, device="cuda")
        weight = torch.randn(outputs, inputs, device="cuda").to(torch.float8_e4m3fn)
        for tokens in (1, 16, 32):
            x, out = randn(tokens, inputs), torch.empty(tokens, outputs, dtype=BF16, device="cuda")
            cublas = timer(lambda x=x, w=dense, o=out: torch.mm(x, w.t(), out=o))
            shape = f"{tokens} x {inputs} x {outputs}"
            if tokens == 1:
                us = timer(lambda x=x, w=dense, o=out: few_rows_matmul(x, w, out=o))
                rows.append(row("one row, 16 bit", shape, us, dense.nbytes, torch_us=cublas))
            us = timer(lambda x=x, w=weight, s=scales, o=out: few_rows_matmul(x, w, s, out=o))
            fp8 = timer(lambda x=x, w=weight, s=scales: fp8_product(x, w, s))
            rows.append(row("few rows, e4m3", shape, us, weight.nbytes, torch_us=cublas, torch_fp8_us=fp8))
    return rows


def fp8_product(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Inputs rounded to e4m3 and torch's product, as for many rows."""
    rounded, row_scales = quantise_rows(x)
    return torch._scaled_mm(
        rounded, weight.t(), scale_a=row_scales, scale_b=scales.t(), out_dtype=BF16, use_fast_accum=True
    )


def write_rows(timer: Timer) -> list[dict]:
    """Cache writes of the layers of a step in one graph, the time of each; alone a replay costs 4 to 5 us more."""
    rows, tokens, heads, dim, layers = [], 4096, 8, 128, 28
    blocks = torch.randperm(2 * tokens // 16, device="cuda")[: tokens // 16]
    slots = (blocks[:, None] * 16 + torch.arange(16, device="cuda")).flatten()
    for dtype in (BF16, torch.float8_e4m3fn, torch.int8):
        shape = (2 * tokens // 16, 16, heads, dim)
        caches = [[torch.zeros(shape, device="cuda").to(dtype) for _ in range(2)] for _ in range(layers)]
        keys = [[randn(tokens, heads, dim) for _ in range(2)] for _ in range(layers)]
        pairs = [(*key, KVTarget(*cache)) for key, cache in zip(keys, caches, strict=True)]
        size = 2 * tokens * heads * dim * (2 + caches[0][0].element_size())
        us = timer(lambda p=pairs: [write_kv(key, value, slots, target) for key, value, target in p]) / layers
        name = str(dtype).removeprefix("torch.")
        copies = [[torch.ones(size // 8, device="cuda") for _ in range(2)] for _ in range(layers)]
        copy = timer(lambda c=copies: [torch.add(a, 0, out=b) for a, b in c]) / layers
        rows.append(row("write_kv", f"{tokens} tokens, {name}, 28 in a graph", us, size, copy_us=copy))
    return rows


def other_rows(timer: Timer) -> list[dict]:
    """Pooling and block copies within the pool."""
    states, starts = randn(65536, 1024), torch.tensor([0, 65536], dtype=torch.int32, device="cuda")
    us = timer(lambda: pool(states, starts, "mean"))
    rows = [row("pool mean", "1 x 65536 x 1024", us, states.nbytes, torch_us=timer(lambda: states.float().mean(0)))]
    caches = [randn(1024, 16, 8, 128) for _ in range(16)]
    order = torch.randperm(1024)
    pairs = torch.stack([order[:512], order[512:]], 1).cuda()
    pool_caches, size = block_copy.block_caches(caches), 2 * 512 * 16 * caches[0][0].nbytes
    us = timer(lambda: block_copy.copy_blocks(pool_caches, pairs))
    source, target = pairs[:, 0].contiguous(), pairs[:, 1].contiguous()
    plain = timer(lambda: [cache.index_copy_(0, target, cache[source]) for cache in caches])
    copy = same_copy_us(size, timer)
    rows.append(row("copy_blocks", "512 blocks x 16 caches x 32 KiB", us, size, torch_us=plain, copy_us=copy))
    return rows


def _event_us(call: Callable[[], torch.cuda.Event], stream: torch.cuda.Stream) -> float:
    times = []
    for _ in range(7):
        torch.cuda.synchronize()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record(stream)
        call()
        end.record(stream)
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times[2:])


def swap_rows() -> list[dict]:
    """Swaps of scattered blocks against one plain copy of as many bytes, and beside a matrix product."""
    shape, layers = (256, 16, 8, 128), 32
    device = [randn(*shape) for _ in range(layers)]
    host = [torch.zeros(shape, dtype=BF16).pin_memory() for _ in range(layers)]
    swapper = block_copy.BlockSwapper(device, host)
    order = torch.randperm(256).tolist()
    pairs = list(zip(range(256), order, strict=True))
    back = [(b, a) for a, b in pairs]
    size = sum(cache.nbytes for cache in device)
    flat, flat_host = (
        torch.empty(size, dtype=torch.uint8, device="cuda"),
        torch.empty(size, dtype=torch.uint8).pin_memory(),
    )
    stream, main = swapper.stream, torch.cuda.current_stream()
    out_us, in_us = _event_us(lambda: swapper.swap_out(pairs), stream), _event_us(lambda: swapper.swap_in(back), stream)
    out_copy = _event_us(lambda: flat_host.copy_(flat, non_blocking=True), main)
    in_copy = _event_us(lambda: flat.copy_(flat_host, non_blocking=True), main)
    a = randn(8192, 8192)
    outs = [torch.empty_like(a) for _ in range(2)]

    def products(swap: Callable[[], object] | None = None) -> None:
        if swap is not None:
            swap()
        for i in range(8):
            torch.mm(a, a, out=outs[i % 2])

    alone = _event_us(products, main)
    beside_out = _event_us(lambda: products(lambda: swapper.swap_out(pairs)), main)
    beside_in = _event_us(lambda: products(lambda: swapper.swap_in(back)), main)
    shape_name = f"256 blocks x {layers} caches x 32 KiB"
    return [
        row("swap_out", shape_name, out_us, size, torch_us=out_copy, product_us=alone, product_beside_us=beside_out),
        row("swap_in", shape_name, in_us, size, torch_us=in_copy, product_us=alone, product_beside_us=beside_in),
    ]


def main() -> None:
    """Runs all tables, writes JSON after each, prints the summary."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    started, flush = time.time(), make_flush()
    torch.manual_seed(0)

    def timer(call: Callable[[], object]) -> float:
        return time_us(call, flush, 15)

    rows = [{"what": "ceilings", "read_gb_s": read_ceiling(flush), "copy_gb_s": copy_ceiling(flush)}]
    versions = {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda}
    tables = (sampling_rows, few_rows_rows, awq_rows, write_rows, elementwise_rows, other_rows)
    for table in (*tables, lambda _: swap_rows()):
        rows += table(timer)
        record = {
            "what": "kernels around attention: time against torch, bytes a second against the card's copy rate",
            "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "command": "python kernels/bench/ops.py --out results/kernels-ops.json",
            "card": torch.cuda.get_device_name(),
            "versions": versions,
            "summary": by_name(summarise(rows)),
            "rows": rows,
        }  # fmt: skip
        out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(f"{len(rows)} rows at {time.time() - started:.0f} s", flush=True)
    for line in rows:
        print({key: round(value, 2) if isinstance(value, float) else value for key, value in line.items()})
    for name, entry in record["summary"].items():
        print(name, entry)


if __name__ == "__main__":
    main()
