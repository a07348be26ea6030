"""How long the panel takes from a turned knob to its redrawn picture, from a small model to a large one."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from labkit.experiments.lab_session import LabSession
from labkit.results import at_most, write_results
from labkit.widgets.panel import Panel

CASES = (
    ("HuggingFaceTB/SmolLM2-135M-Instruct", "cpu"),
    ("meta-llama/Llama-3.1-8B-Instruct", "H100 SXM"),
    ("google/gemma-3-27b-it", "H200"),
    ("deepseek-ai/DeepSeek-V3", "H200"),
)
CHANGES: Mapping[str, Sequence[Any]] = {
    "block_size": (8, 32, 64, 16),
    "max_model_len": (2048, 1024, 4096, 8192),
    "max_num_seqs": (16, 64, 128, 32),
    "max_num_batched_tokens": (512, 1024, 4096, 2048),
    "kv_cache_dtype": ("fp8", "auto"),
}
LIMIT_MS = 100.0


def bench_panel(
    path: str | Path = "results/panel.json", *, cases: Sequence[tuple[str, str]] = CASES, rounds: int = 5
) -> dict[str, Any]:
    """Turn knobs and time each change, planning included, until the traces and the answer line hold the new values.

    Args:
        path: of the results file.
        cases: (model, card) pairs from the catalogue.
        rounds: how often the list of changes is gone through, after one that is not counted; each in a panel of its
            own, which has planned none of the settings before.

    Returns:
        For each case median, p95 and worst in milliseconds, to the redrawn traces and to the whole change.

    Raises:
        LabkitError: a model or card that does not exist, or a file that cannot be written.
    """
    rows = [_bench_case(model, card, rounds) for model, card in cases]
    return write_results(
        path,
        command="labkit bench panel",
        rows=rows,
        summary={
            f"{row['model']} on {row['card']}: knob to traces, p95 [ms]": at_most(row["traces_ms"]["p95"], LIMIT_MS)
            for row in rows
        },
        what="from .value= of a knob to the redrawn memory bar, and to the end of the change (answer, advice, help)",
        load_average=[round(load, 1) for load in os.getloadavg()],
    )


def _bench_case(model: str, card: str, rounds: int) -> dict[str, Any]:
    session = LabSession(model=model, gpu=card, store="sqlite://")
    try:
        times = [entry for turn in range(rounds + 1) for entry in _turn_knobs(session) if turn]
    finally:
        session.close()
    traces, whole, cpu = zip(*times, strict=True)
    return {
        "model": model,
        "card": card,
        "changes": len(times),
        "traces_ms": _spread(traces),
        "change_ms": _spread(whole),
        "change_cpu_ms": _spread(cpu),
    }


def _turn_knobs(session: LabSession) -> list[tuple[float, float, float]]:
    panel = Panel(session)
    drawn: list[float] = []
    panel.pictures.memory.observe(lambda _: drawn.append(time.perf_counter()), "figure")
    times = []
    try:
        for knob, value in ((knob, value) for knob, values in CHANGES.items() for value in values):
            panel.settle()
            drawn.clear()
            gc.collect()
            start, cpu = time.perf_counter(), time.process_time()
            panel.knobs[knob].value = value
            end, cpu_end = time.perf_counter(), time.process_time()
            if drawn:
                times.append((1e3 * (drawn[-1] - start), 1e3 * (end - start), 1e3 * (cpu_end - cpu)))
    finally:
        panel.settle()
        panel.close_parts()
    return times


def _spread(values_ms: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values_ms)
    p95 = ordered[min(len(ordered) - 1, round(0.95 * (len(ordered) - 1)))]
    return {"median": round(statistics.median(ordered), 2), "p95": round(p95, 2), "max": round(ordered[-1], 2)}
