"""What claims need a card for: memory that torch reserves beyond its tensors, 16-bit types, eager mode.

`labkit bench claims` measures on this machine's card and writes `card_runs.json`, from which the claims take their
measured numbers, with card and date. Random weights; about a minute.
"""

from __future__ import annotations

import gc
import json
import random
import time
import traceback
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from labkit.errors import UnsupportedError
from labkit.results import write_results

FILE = "card_runs.json"
SMALL, SEVEN = "Qwen/Qwen2-0.5B", "Qwen/Qwen2-7B"
LIMIT_S, COMMAND, HOME = 60.0, "labkit bench claims", Path(__file__).with_name(FILE)
# The guides' claim about reserved memory is about a server at work: mixed lengths that come and go.
NUM_REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 96, (64, 1500), (16, 160)
Say = Callable[[str], None]
Row = dict[str, Any]


@lru_cache(maxsize=1)
def card_runs() -> dict[str, Any]:
    """What was measured on a card, as `write_results` wrote it, `rows` by their key; no rows where nothing was."""
    file = resources.files("labkit.advice.claims").joinpath(FILE)
    found: dict[str, Any] = {"card": "", "made": "", "rows": []}
    if file.is_file():
        found = json.loads(file.read_text(encoding="utf-8"))
    return {**found, "rows": {row["key"]: row for row in found["rows"] if "error" not in row}}


def measured_on() -> str:
    """Card and date of `card_runs`: "NVIDIA H200, 2026-11-30"."""
    return f"{card_runs()['card']}, {card_runs()['made'][:10]}"


def excess_percent(states: Sequence[tuple[int, int]]) -> Row:
    """How far reserved bytes exceed allocated ones, in percent of these, over (allocated, reserved) in time order.

    Returns:
        "at the peak": largest reserved over largest allocated, what a card must have; "median", "largest" of all
        moments; all None where nothing was seen.
    """
    ratios = sorted(100 * (reserved / allocated - 1) for allocated, reserved in states if allocated)
    if not ratios:
        return {"at the peak": None, "median": None, "largest": None}
    allocated, reserved = (max(column) for column in zip(*states, strict=True))
    return {
        "at the peak": 100 * (reserved / allocated - 1), "median": ratios[len(ratios) // 2], "largest": ratios[-1],
    }  # fmt: skip


def jobs(num_requests: int = NUM_REQUESTS, seed: int = 7) -> list[tuple[int, int]]:
    """Prompt and output tokens of each request, uniform."""
    rng = random.Random(seed)
    return [(rng.randint(*PROMPT_TOKENS), rng.randint(*OUTPUT_TOKENS)) for _ in range(num_requests)]


def _state(torch: Any) -> tuple[int, int]:
    stats = torch.cuda.memory_stats()
    return stats["allocated_bytes.all.current"], stats["reserved_bytes.all.current"]


def _peaks(torch: Any) -> tuple[int, int]:
    stats = torch.cuda.memory_stats()
    return stats["allocated_bytes.all.peak"], stats["reserved_bytes.all.peak"]


def reserved_by_engine(model: str, say: Say) -> Row:
    """labkit's engine on one model: weights and pool allocated once, activations in between."""
    from labkit.engine.bench_gpu import Bench

    bench = Bench(model, say)
    torch = bench.torch
    loaded = _state(torch)
    engine = bench.engine()
    ready = _state(torch)
    torch.cuda.reset_peak_memory_stats()
    bench.add(engine, jobs())
    states = []
    while engine.has_unfinished:
        engine.step()
        states.append(_state(torch))
    states.append(_peaks(torch))
    row = {"what": f"labkit's engine, {model}", **excess_percent(states),
           "after loading": excess_percent([loaded])["median"], "ready": excess_percent([ready])["median"],
           "allocated_bytes": states[-1][0], "reserved_bytes": states[-1][1], "moments": len(states)}  # fmt: skip
    engine.close()
    return row


def reserved_by_generate(say: Say, num_batches: int = 6, device: str = "cuda", **shape: int) -> Row:
    """transformers' generate with its growing cache, batches of mixed size: the allocator without a pool of blocks.

    Args:
        shape: replaces sizes of Qwen2-0.5B's configuration.
    """
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    sizes = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
             "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True}  # fmt: skip
    config = Qwen2Config(**{**sizes, **shape})  # type: ignore[arg-type]
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    on_card = device != "cpu"
    if on_card:
        torch.cuda.reset_peak_memory_stats()
    rng, states = random.Random(7), []
    for _ in range(num_batches):
        batch, length = rng.randint(4, 32), rng.randint(*PROMPT_TOKENS)
        prompt = torch.randint(config.vocab_size, (batch, length if on_card else 4), device=device)
        model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=24 if on_card else 2,
                       min_new_tokens=2, do_sample=False, pad_token_id=0)  # fmt: skip
        if on_card:
            states.append(_state(torch))
    if on_card:
        states.append(_peaks(torch))
    say(f"generate: {len(states)} moments")
    allocated, reserved = states[-1] if states else (0, 0)
    return {"what": f"transformers' generate, {SMALL}'s shape, {num_batches} batches of mixed size",
            **excess_percent(states), "allocated_bytes": allocated, "reserved_bytes": reserved,
            "moments": len(states)}  # fmt: skip


def dtype_rates(say: Say, rounds: int = 2) -> Row:
    """Output tokens/s of float16 and bfloat16 in turn, best round of each, on one model."""
    from labkit.engine.bench_gpu import Bench
    from labkit.models import load_model_weights

    bench, rates = Bench(SMALL, say), {"float16": 0.0, "bfloat16": 0.0}
    decoders = {
        "bfloat16": bench.decoder,
        "float16": load_model_weights(bench.spec, dtype="float16", load_format="dummy", device="cuda"),
    }
    for _ in range(rounds):
        for dtype, decoder in decoders.items():
            bench.decoder = decoder
            row = bench.throughput(dtype, [(256, 96)] * 64, dtype=dtype, gpu_memory_utilization=0.4)
            rates[dtype] = max(rates[dtype], row["output_tokens_per_s"])
    return {"what": f"output tokens/s, 64 requests of 256 and 96 tokens, {SMALL}", **rates}


def eager_rates(say: Say) -> Row:
    """Output tokens/s of 8 requests with and without CUDA graphs, and the graphs' bytes."""
    from labkit.engine.bench_gpu import Bench

    row: Row = {"what": f"output tokens/s, 8 requests of 200 and 200 tokens, {SMALL}"}
    bench = Bench(SMALL, say)
    for name, eager in (("graphs", False), ("eager", True)):
        found = bench.throughput(name, [(200, 200)] * 8, rounds=2, enforce_eager=eager, gpu_memory_utilization=0.4)
        row[name] = found["output_tokens_per_s"]
    return row


MEASUREMENTS: tuple[tuple[str, Callable[[Say], Row]], ...] = (
    ("reserved, small", lambda say: reserved_by_engine(SMALL, say)),
    ("reserved, generate", reserved_by_generate),
    ("dtypes", dtype_rates),
    ("eager", eager_rates),
    ("reserved, seven", lambda say: reserved_by_engine(SEVEN, say)),
)


def measure_all(
    path: str | Path = HOME, say: Say = print, keys: Sequence[str] = (), limit_s: float = LIMIT_S
) -> dict[str, Any]:
    """Measure one after the other and write after each; other rows that the file has of the same card stay.

    Args:
        path: of the file; by default the one that the claims read.
        keys: of `MEASUREMENTS`, in that order; all where empty.
        limit_s: what is not begun by then stays out.

    Raises:
        UnsupportedError: there is no card.
    """
    import torch

    if not torch.cuda.is_available():
        raise UnsupportedError("this needs an NVIDIA card and a torch built for it", works="the shipped measurements")
    card, start, path = torch.cuda.get_device_name(), time.monotonic(), Path(path)
    content: dict[str, Any] = {"card": card, "rows": []}
    if path.is_file():
        content = json.loads(path.read_text(encoding="utf-8"))
    rows: dict[str, Row] = {row["key"]: row for row in content["rows"]} if content["card"] == card else {}
    measurements = dict(MEASUREMENTS)
    for key in keys or measurements:
        if time.monotonic() - start > limit_s:
            say(f"{key}: left out, {limit_s:g} s are over")
            continue
        try:
            row = measurements[key](say)
        except Exception as error:
            say(traceback.format_exc(limit=-3))
            row = {"error": f"{type(error).__name__}: {error}"[:300]}
        gc.collect()
        torch.cuda.empty_cache()
        rows[key] = {"key": key, **row}
        say(f"[{time.monotonic() - start:.1f} s] {rows[key]}")
        content = write_results(path, command=COMMAND, card=card, rows=list(rows.values()), summary={})
    return content
