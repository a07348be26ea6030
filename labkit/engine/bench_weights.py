"""`python -m labkit.engine.bench_weights`: one model in 16 bit, fp8 and 4 bit on one card, random weights.

A request alone reads every weight for each token, so that its speed shows what the smaller format saves; 64 at once
show what its product costs. Bars are from the bytes: 8-bit weights are half of what a token alone reads.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from labkit.engine.bench_gpu import LARGE_MODEL, Bench, name_of_card
from labkit.results import at_least, at_most, write_results

FORMATS = (None, "fp8", "awq")
KNOBS: dict[str, Any] = {"max_model_len": 1024, "max_num_seqs": 64, "gpu_memory_utilization": 0.5}
ALONE, TOGETHER = [(128, 200)], [(128, 128)] * 64


def measure_format(
    quantization: str | None, on_progress: Callable[[str], None], on_row: Callable[[dict[str, Any]], None]
) -> None:
    """Bytes, seconds to load, and both speeds of one format; `on_row` gets the row after each number."""
    import torch

    start = time.perf_counter()
    bench = Bench(LARGE_MODEL, on_progress, quantization)
    torch.cuda.synchronize()
    row: dict[str, Any] = {
        "quantization": quantization,
        "load_s": time.perf_counter() - start,
        "weights_bytes": bench.decoder.num_bytes + bench.decoder.table_bytes,
        "planned_weights_bytes": bench.plan(**KNOBS).breakdown.weights_bytes,
    }
    for name, jobs in (("alone", ALONE), ("together", TOGETHER)):
        row[f"{name}_tokens_per_s"] = bench.throughput(name, jobs, rounds=2, **KNOBS)["output_tokens_per_s"]
        on_row(row)
    del bench
    gc.unfreeze()
    gc.collect()
    torch.cuda.empty_cache()


def summarize(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Speeds over 16 bit, and how far the plan's bytes are off at most."""
    by_format = {row["quantization"]: row for row in rows}

    def gain(quantization: str, load: str) -> float | None:
        plain, other = (by_format.get(name, {}).get(load) for name in (None, quantization))
        return None if plain is None or other is None else other / plain

    off = [abs(row["weights_bytes"] / row["planned_weights_bytes"] - 1) for row in rows]
    return {
        "planned_weights_off": at_most(max(off) if len(off) == len(FORMATS) else None, 0.02, 0.01),
        "fp8_alone_vs_16_bit": at_least(gain("fp8", "alone_tokens_per_s"), 1.3, 1.5),
        "fp8_together_vs_16_bit": at_least(gain("fp8", "together_tokens_per_s"), 1.1, 1.3),
        "awq_alone_vs_16_bit": at_least(gain("awq", "alone_tokens_per_s"), 1.3, 1.7),
        "awq_together_vs_16_bit": at_least(gain("awq", "together_tokens_per_s"), 0.8, 1.0),
    }


def bench_weights(path: str | Path, *, on_progress: Callable[[str], None] = print) -> dict[str, Any]:
    """Measure and write the results file, again after each number.

    Raises:
        UnsupportedError: there is no card.
    """
    card = name_of_card()
    command = "python -m labkit.engine.bench_weights results/weights-gpu.json"
    rows: dict[str | None, dict[str, Any]] = {}
    content: dict[str, Any] = {}

    def write(row: dict[str, Any]) -> None:
        rows[row["quantization"]] = row
        on_progress(str(row))
        listed = list(rows.values())
        content.update(
            write_results(path, command=command, rows=listed, summary=summarize(listed), card=card, model=LARGE_MODEL)
        )

    for quantization in FORMATS:
        measure_format(quantization, on_progress, write)
    return content


if __name__ == "__main__":
    bench_weights(sys.argv[1])
