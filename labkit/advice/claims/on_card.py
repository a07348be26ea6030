"""What claims need a card for: memory that torch reserves beyond its tensors, 16-bit types, eager mode, settings of
batching, logging, and counters of the attention kernels.

`labkit bench claims` measures on this machine's card and writes `card_runs.json`, from which the claims take their
measured numbers, with card and date. Random weights, loaded once for all that follows on the same model; two minutes.
"""

from __future__ import annotations

import gc
import json
import logging
import random
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from labkit.errors import UnsupportedError
from labkit.measure.l2_points import UNPACKED
from labkit.results import write_results

FILE = "card_runs.json"
SMALL, SEVEN = "Qwen/Qwen2-0.5B", "Qwen/Qwen2-7B"
LIMIT_S, COMMAND, HOME = 120.0, "labkit bench claims", Path(__file__).with_name(FILE)
# As vLLM formats its lines.
LINE_FORMAT = "%(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(message)s"
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


def card_row(key: str) -> Row | None:
    """One row of `card_runs`; None where it was not measured."""
    return card_runs()["rows"].get(key)


def lost_percent(row: Row, without: str, having: str) -> float:
    """Of the rate `without` a thing, what `having` it costs, %."""
    return 100 * (1 - row[having] / row[without])


def counted(model: str, variant: str, name: str) -> dict[int, float]:
    """Block size → one number of the row "counters"; empty where nothing was counted."""
    launches = (card_row("counters") or {"launches": {}})["launches"]
    found = {size: launches.get(f"{model}, {variant}, block {size}") for size in (8, 16, 32)}
    return {size: launch[name] for size, launch in found.items() if launch and launch[name] is not None}


def measured_on(*keys: str) -> str:
    """Card, dates of the rows `keys`, and what ran beside: "NVIDIA H200, 2026-11-30, other work on the host"."""
    rows = [row for row in map(card_row, keys) if row]
    dates = sorted({row["made"][:10] for row in rows})
    notes = sorted({row["note"] for row in rows if row.get("note")})
    return ", ".join([card_runs()["card"], " and ".join(dates), *notes])


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


class Loaded:
    """The weights that are on the card: those of one model, kept until another is asked for.

    Args:
        say: gets a line after each measurement.
    """

    def __init__(self, say: Say) -> None:
        self.say = say
        self._bench: Any = None
        self._model = ""

    def bench(self, model: str) -> Any:
        """The `bench_gpu.Bench` of a catalogue name."""
        from labkit.engine.bench_gpu import Bench

        if model != self._model:
            self.drop()
            self._bench, self._model = Bench(model, self.say), model
        return self._bench

    def drop(self) -> None:
        """Give the card's memory back."""
        self._bench, self._model = None, ""
        _give_back()


def _give_back() -> None:
    import torch

    # `Bench` freezes what it has loaded.
    gc.unfreeze()
    gc.collect()
    torch.cuda.empty_cache()


def reserved_by_engine(model: str, loaded: Loaded) -> Row:
    """labkit's engine on one model: weights and pool allocated once, activations in between."""
    bench = loaded.bench(model)
    torch = bench.torch
    weights = _state(torch)
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
           "after loading": excess_percent([weights])["median"], "ready": excess_percent([ready])["median"],
           "allocated_bytes": states[-1][0], "reserved_bytes": states[-1][1], "moments": len(states)}  # fmt: skip
    engine.close()
    return row


def reserved_by_generate(loaded: Loaded, num_batches: int = 6, device: str = "cuda", **shape: int) -> Row:
    """transformers' generate with its growing cache, batches of mixed size: the allocator without a pool of blocks.

    Args:
        shape: replaces sizes of Qwen2-0.5B's configuration.
    """
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    loaded.drop()
    sizes = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
             "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True}  # fmt: skip
    config = Qwen2Config(**{**sizes, **shape})
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
    loaded.say(f"generate: {len(states)} moments")
    allocated, reserved = states[-1] if states else (0, 0)
    return {"what": f"transformers' generate, {SMALL}'s shape, {num_batches} batches of mixed size",
            **excess_percent(states), "allocated_bytes": allocated, "reserved_bytes": reserved,
            "moments": len(states)}  # fmt: skip


def dtype_rates(loaded: Loaded, rounds: int = 2) -> Row:
    """Output tokens/s of float16 and bfloat16 in turn, best round of each, on one model."""
    from labkit.models import load_model_weights

    bench, rates = loaded.bench(SMALL), {"float16": 0.0, "bfloat16": 0.0}
    decoders = {
        "bfloat16": bench.decoder,
        "float16": load_model_weights(bench.spec, dtype="float16", load_format="dummy", device="cuda"),
    }
    for _ in range(rounds):
        for dtype, decoder in decoders.items():
            bench.decoder = decoder
            row = bench.throughput(dtype, [(256, 96)] * 64, dtype=dtype, gpu_memory_utilization=0.4)
            rates[dtype] = max(rates[dtype], row["output_tokens_per_s"])
    bench.decoder = decoders["bfloat16"]
    return {"what": f"output tokens/s, 64 requests of 256 and 96 tokens, {SMALL}", **rates}


@dataclass(frozen=True)
class Comparison:
    """Settings that a claim compares, on one traffic that comes at once, with labkit's engine.

    Attributes:
        model: a catalogue name.
        requests, prompt_tokens, output_tokens: the traffic.
        settings: name of a row → its knobs.
        rounds: how often each runs; the best counts.
    """

    model: str
    requests: int
    prompt_tokens: int
    output_tokens: int
    settings: Mapping[str, Mapping[str, Any]]
    rounds: int = 2

    def measure(self, loaded: Loaded) -> Row:
        """Output tokens/s by name; in `details` also the graphs' bytes, blocks, and how long steps took."""
        bench = loaded.bench(self.model)
        row: Row = {
            "what": f"output tokens/s, {self.requests} requests of {self.prompt_tokens} and {self.output_tokens} "
            f"tokens, {self.model}",
            "details": {},
        }
        jobs = [(self.prompt_tokens, self.output_tokens)] * self.requests
        for name, knobs in self.settings.items():
            found = bench.throughput(name, jobs, rounds=self.rounds, **{"gpu_memory_utilization": 0.5, **knobs})
            row[name] = found["output_tokens_per_s"]
            row["details"][name] = {**{key: found[key] for key in DETAILS}, **step_numbers(bench.steps[name])}
        return row


DETAILS = (
    "num_steps", "num_gpu_blocks", "prompt_steps_s", "median_decode_step_ms", "gpu_busy_share", "graphs_bytes",
)  # fmt: skip


def step_numbers(steps: Sequence[Sequence[float]]) -> Row:
    """Of a run's steps, columns as `bench_gpu.STEP_COLUMNS`: p99 of the time between tokens, requests at once, tokens
    read from the cache and seconds in all."""
    from labkit.engine.bench_gpu import STEP_COLUMNS

    at = {name: STEP_COLUMNS.index(name) for name in STEP_COLUMNS}
    columns = {name: [step[index] for step in steps] for name, index in at.items()}
    waits = sorted(zip(columns["duration_s"], columns["num_decode_tokens"], strict=True))
    wanted, seen, p99 = 0.99 * sum(columns["num_decode_tokens"]), 0.0, 0.0
    for duration_s, tokens in waits:
        p99, seen = duration_s, seen + tokens
        if seen >= wanted:
            break
    return {
        "between_tokens_p99_ms": 1000 * p99, "most_running": int(max(columns["num_running"], default=0)),
        "tokens_read": int(sum(columns["num_tokens_stored"])), "steps_s": sum(columns["duration_s"]),
    }  # fmt: skip


def first_token_times(loaded: Loaded, rounds: int = 3) -> Row:
    """Time to first token at each of `LENGTHS`, ms: median of 64 requests that come at once, and of one alone; the best
    round counts."""
    bench = loaded.bench(SMALL)
    row: Row = {"what": f"time to first token, ms, prompts of 1000 tokens, {SMALL}", "details": {}}
    for name, knobs in LENGTHS.items():
        engine = bench.engine(gpu_memory_utilization=0.5, **knobs)
        times = {count: min(_median_first_ms(bench, engine, count) for _ in range(rounds + 1)) for count in (1, 64)}
        row["details"][name] = {"alone": times[1], "num_gpu_blocks": engine.plan.num_gpu_blocks}
        row[name] = times[64]
        engine.close()
    loaded.say(str(row))
    return row


def _median_first_ms(bench: Any, engine: Any, num_requests: int) -> float:
    bench.add(engine, [(1000, 8)] * num_requests)
    bench.torch.cuda.synchronize()
    start, first = time.perf_counter(), dict[int, float]()
    while engine.has_unfinished:
        outputs = engine.step().outputs
        now = time.perf_counter()
        for output in outputs:
            first.setdefault(output.request_id, now - start)
    return 1000 * sorted(first.values())[num_requests // 2]


def logging_rates(loaded: Loaded, lines: Sequence[str] = ("none", "a step", "a request")) -> Row:
    """Output tokens/s of 64 requests with a formatted line written to a file never, after each step, and for each
    request after each step; with the host's work beside the card's, and with nothing beside it."""
    bench = loaded.bench(SMALL)
    row: Row = {"what": f"output tokens/s, 64 requests of 300 and 100 tokens, {SMALL}"}
    for overlap in (True, False):
        engine = bench.engine(overlap=overlap, gpu_memory_utilization=0.5)
        for _ in range(2):
            for which in lines:
                bench.add(engine, [(300, 100)] * 64)
                bench.torch.cuda.synchronize()
                rate = 6400 / served_s(engine, which)
                name = which if overlap else f"{which}, nothing overlaps"
                row[name] = max(row.get(name, 0.0), rate)
        engine.close()
    loaded.say(str(row))
    return row


def served_s(engine: Any, which: str) -> float:
    """Seconds until the engine has served what is queued, with lines as `logging_rates` names them."""
    with tempfile.TemporaryFile("w", encoding="utf-8") as file:
        handler = logging.StreamHandler(file)
        handler.setFormatter(logging.Formatter(LINE_FORMAT))
        logger = logging.Logger("labkit-claim", logging.DEBUG)
        logger.addHandler(handler)
        start = time.perf_counter()
        while engine.has_unfinished:
            step = engine.step()
            for number in range({"none": 0, "a step": 1}.get(which, step.num_running)):
                logger.debug("Scheduled request %s with %d tokens", number, step.num_decode_tokens)
        return time.perf_counter() - start


def attention_counters(loaded: Loaded) -> Row:
    """L2 hit rate, DRAM bytes and occupancy of one attention launch of Qwen2-0.5B and Qwen2-7B by block size, one
    program for each query head and packed; enough tokens that a launch reads more than the L2 holds."""
    from labkit.measure.attention_shape import BatchShape
    from labkit.measure.counters import CORE_METRICS, OCCUPANCY
    from labkit.measure.kernel_launches import CardCounter
    from labkit.measure.l2_step import layer_shape
    from labkit.specs import load_gpu, load_model
    from labkit.specs.engine_config import EngineConfig

    counter, card = CardCounter(3, (*CORE_METRICS, OCCUPANCY)), load_gpu("auto")
    launches: Row = {}
    for name, variant in ((SMALL, UNPACKED), (SMALL, "full"), (SEVEN, "full")):
        model = load_model(name)
        for size in (16, 8, 32):
            shape = layer_shape(model, EngineConfig(block_size=size), model.layers[0], BatchShape.decode(128, 8192))
            found = counter.count(shape, card, variant)
            if found.counters is None or not found.counters.method.startswith("measured"):
                raise UnsupportedError("; ".join(found.notes) or "the card does not let count", works="ncu's rights")
            counted = found.counters
            launches[f"{name}, {variant}, block {size}"] = {
                "l2_hit_rate": counted.l2_hit_rate, "dram_bytes": counted.dram_bytes, "kv_bytes": shape.kv_bytes,
                "kernel_time_s": counted.kernel_time_s, "dram_bytes_per_s": counted.dram_bytes_per_s,
                "warps_active_share": counted.warps_active_share, "method": counted.method,
            }  # fmt: skip
            loaded.say(f"{name}, {variant}, block {size}: {counted}")
    return {"what": "one attention launch, 128 requests of 8,192 tokens", "launches": launches}


# The pool of 11 requests of 8,192 tokens, as on the A10 of the simulation.
POOL = {"max_model_len": 8192, "num_gpu_blocks_override": 11 * 512}
GRAPHS: dict[str, dict[str, Any]] = {"graphs": {}, "eager": {"enforce_eager": True}}
SEATS = {f"{seqs}": {"max_num_seqs": seqs} for seqs in (64, 256)}
CACHES = {"contiguous": {**POOL, "max_num_seqs": 11}, "paged": POOL}
STEPS = {f"{tokens}": {"max_num_batched_tokens": tokens, "max_num_seqs": 32} for tokens in (2048, 8192, 49152)}
LENGTHS = {f"{length}": {"max_model_len": length} for length in (4096, 8192, 32768)}
# Those on one model stand side by side, so that its weights are loaded once.
MEASUREMENTS: Mapping[str, Callable[[Loaded], Row]] = {
    "reserved, small": lambda loaded: reserved_by_engine(SMALL, loaded),
    "dtypes": dtype_rates,
    "eager": Comparison(SMALL, 8, 200, 200, GRAPHS).measure,
    "logging": logging_rates,
    "max-model-len": first_token_times,
    "reserved, generate": reserved_by_generate,
    "counters": attention_counters,
    "reserved, seven": lambda loaded: reserved_by_engine(SEVEN, loaded),
    "eager, seven": Comparison(SEVEN, 8, 200, 200, GRAPHS).measure,
    "eager, many": Comparison(SEVEN, 256, 200, 100, GRAPHS, rounds=1).measure,
    "paged": Comparison(SEVEN, 128, 500, 200, CACHES, rounds=1).measure,
    "max-num-seqs": Comparison(SEVEN, 300, 500, 200, SEATS, rounds=1).measure,
    "max-num-seqs, light": Comparison(SEVEN, 32, 500, 200, SEATS).measure,
    "step tokens": Comparison(SEVEN, 128, 1280, 200, STEPS, rounds=1).measure,
}


def measure_all(
    path: str | Path = HOME, say: Say = print, keys: Sequence[str] = (), limit_s: float = LIMIT_S, note: str = ""
) -> dict[str, Any]:
    """Measure one after the other and write after each; other rows that the file has of the same card stay.

    Args:
        path: of the file; by default the one that the claims read.
        keys: of `MEASUREMENTS`, in that order; all where empty.
        limit_s: what is not begun by then stays out.
        note: what else ran beside, shown with the numbers.

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
    loaded = Loaded(say)
    for key in keys or MEASUREMENTS:
        if time.monotonic() - start > limit_s:
            say(f"{key}: left out, {limit_s:g} s are over")
            continue
        try:
            row = MEASUREMENTS[key](loaded)
        except Exception as error:
            say(traceback.format_exc(limit=-3))
            row = {"error": f"{type(error).__name__}: {error}"[:300]}
        _give_back()
        rows[key] = {"key": key, **row, "made": datetime.now(UTC).isoformat(timespec="seconds"), "note": note}
        say(f"[{time.monotonic() - start:.1f} s] {rows[key]}")
        content = write_results(path, command=COMMAND, card=card, rows=list(rows.values()), summary={})
    return content
