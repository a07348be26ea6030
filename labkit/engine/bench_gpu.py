"""`labkit bench engine-gpu`: throughput, latency, start and change of a knob on one card, random weights.

Workloads and bars are those of vLLM 0.25.1 on one H200: "nano" is 256 requests at once, prompts and outputs uniform
from 100 to 1024 tokens, temperature 0.6, no end token. Only tokens that were asked for count.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import random
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from labkit.engine.bench_steps import decode_after_changes, eager_decode, prompt_steps
from labkit.errors import UnsupportedError
from labkit.files import write_atomic
from labkit.format import memory
from labkit.results import at_least, at_most, write_results

NANO_MODEL, LARGE_MODEL = "Qwen/Qwen3-0.6B", "meta-llama/Llama-3.1-8B"
# Output tokens/s of vLLM 0.25.1 on one H200; of the bytes that must move; start after a changed flag in seconds.
VLLM_NANO, VLLM_LARGE, VLLM_ALONE, NANO_FLOOR, VLLM_START_S = 24000, 9700, 200, 41000, 67.0
BASELINE = (
    "vLLM 0.25.1 on one H200, recorded 2026-11-30: nano 24,203 tokens/s, 256 × 512→256 9,723, alone 200, start 67 s"
)
RECONFIGURATIONS, WARM_RECONFIGURATIONS = 200, 20
# 128 requests that grow to twice what the pool holds.
SWAP_JOBS, SWAP_BLOCKS, SWAP_GIB = [(128, 256 + 37 * index % 257) for index in range(128)], 2000, 8.0
# Chunks of 64 tokens beside 32 requests: the shorter, the sooner the next token of those that decode.
MIXED_STEP_TOKENS, MIXED_REQUESTS, LONG_PROMPT = 96, 32, 32768
# As vLLM chooses for offline work on a card of this size.
LARGE_STEP_TOKENS = 16384
STEP_COLUMNS = (
    "start_s", "duration_s", "num_prefill_tokens", "num_decode_tokens", "num_running", "num_tokens_stored",
    "num_preemptions", "num_swapped_blocks",
)  # fmt: skip
Job = tuple[int, int]
StepRows = list[tuple[float, ...]]


def nano_jobs(seed: int = 0) -> list[Job]:
    """Prompt and output tokens of the 256 requests."""
    rng = random.Random(seed)
    return [(rng.randint(100, 1024), rng.randint(100, 1024)) for _ in range(256)]


class Bench:
    """One model with random weights and what is measured with it.

    Args:
        model: a name, or a spec.
        on_progress: gets a line after each measurement.
        quantization: as in `EngineConfig`.
        load: gives the decoder of a spec, the arguments as of `load_model_weights`, which it is by default on a card.
    """

    def __init__(
        self, model: Any, on_progress: Callable[[str], None], quantization: str | None = None, *, load: Any = None
    ) -> None:
        import torch

        from labkit.models import load_model_weights
        from labkit.specs import load_gpu, load_model

        self.torch, self.say = torch, on_progress
        self.steps: dict[str, StepRows] = {}
        self.spec = load_model(model) if isinstance(model, str) else model
        self.gpu, self.quantization = load_gpu("H200"), quantization
        load = load or functools.partial(load_model_weights, device="cuda")
        self.decoder = load(self.spec, dtype="bfloat16", load_format="dummy", quantization=quantization)
        gc.freeze()

    def plan(self, **knobs: Any) -> Any:
        """The plan of `knobs` over the baseline's."""
        from labkit.memory import plan
        from labkit.specs.engine_config import EngineConfig

        base: dict[str, Any] = {"max_model_len": 4096, "max_num_seqs": 256, "max_num_batched_tokens": 8192}
        base["quantization"] = self.quantization
        return plan(self.spec, self.gpu, EngineConfig(**{**base, "enable_prefix_caching": False, **knobs}))

    def engine(self, *, overlap: bool = True, **knobs: Any) -> Any:
        """A new engine over the weights."""
        from labkit.engine.engine import Engine

        return Engine(self.decoder, self.plan(**knobs), overlap=overlap)

    def requests(self, jobs: list[Job], *, first_id: int = 0, temperature: float = 0.6) -> list[Any]:
        """`jobs` with random prompts."""
        from labkit.engine.sampling_params import EngineRequest, SamplingParams

        rng = random.Random(1)
        return [
            EngineRequest(
                first_id + index,
                tuple(rng.randrange(self.spec.vocab_size) for _ in range(num_prompt)),
                SamplingParams(max_tokens=num_output, ignore_eos=True, temperature=temperature),
            )
            for index, (num_prompt, num_output) in enumerate(jobs)
        ]

    def add(self, engine: Any, jobs: list[Job], **options: Any) -> None:
        """Queue `requests`."""
        for request in self.requests(jobs, **options):
            engine.add_request(request)

    def throughput(self, name: str, jobs: list[Job], *, rounds: int = 1, overlap: bool = True, **knobs: Any) -> dict:
        """Output tokens per second from the first step to the last token, best round; the first one warms up."""
        engine = self.engine(overlap=overlap, **knobs)
        self.add(engine, [(128, 4)] * 8, first_id=10**6)
        _drain(engine)
        best: dict[str, Any] = {}
        for _ in range(rounds):
            row = {"name": name, **self._round(engine, jobs), "overlap": overlap, "knobs": knobs}
            best = max(best or row, row, key=lambda entry: entry["output_tokens_per_s"])
        best["graphs_bytes"] = int(engine.memory_parts()["cuda_graphs"])
        engine.close()
        self.steps[name] = best.pop("steps")
        self.say(f"{name}: {best['output_tokens_per_s']:.0f} tokens/s, GPU busy {best['gpu_busy_share']:.3f}")
        return best

    def many_at_once(self, step_tokens: int) -> dict:
        """256 requests of 512 and 256 tokens, in steps of `step_tokens`."""
        name = f"256 × 512→256, steps of {step_tokens}"
        return self.throughput(name, [(512, 256)] * 256, rounds=2, max_num_batched_tokens=step_tokens)

    def _round(self, engine: Any, jobs: list[Job]) -> dict[str, Any]:
        self.add(engine, jobs)
        times: list[tuple[Any, Any]] = []
        engine.executor.times = times
        self.torch.cuda.synchronize()
        start = time.perf_counter()
        steps = _drain(engine)
        self.torch.cuda.synchronize()
        wall_s = time.perf_counter() - start
        engine.executor.times = None
        decode_s = [step[1] for step in steps if not step[2] and step[3]]
        return {
            "output_tokens_per_s": sum(count for _, count in jobs) / wall_s, "wall_s": wall_s,
            "num_steps": len(steps), "prompt_steps_s": sum(step[1] for step in steps if step[2]),
            "gpu_busy_share": sum(begin.elapsed_time(end) for begin, end in times) / 1000 / wall_s,
            "median_decode_step_ms": 1000 * _median(decode_s), "num_preemptions": sum(int(step[6]) for step in steps),
            "num_gpu_blocks": engine.plan.num_gpu_blocks, "steps": steps,
        }  # fmt: skip

    def first_token_after_change(self, *, enforce_eager: bool) -> dict:
        """Seconds from a changed block size to the first token; the median of changes there and back."""
        engine = self.engine(enforce_eager=enforce_eager)
        seconds = []
        for number, block_size in enumerate((32, 16, 32, 16, 32)):
            start = time.perf_counter()
            engine.reconfigure(self.plan(enforce_eager=enforce_eager, block_size=block_size))
            self.add(engine, [(128, 1)], first_id=10**7 + number)
            _drain(engine)
            seconds.append(time.perf_counter() - start)
        parts = engine.memory_parts()
        engine.close()
        name = f"configure to first token, {'eager' if enforce_eager else 'graphs'}"
        self.say(f"{name}: {[round(second, 3) for second in seconds]}")
        return {"name": name, "seconds": seconds, "median_s": _median(seconds[2:]), "memory_parts": parts}

    def lost_bytes(self, count: int = RECONFIGURATIONS) -> dict:
        """Bytes that torch has allocated and reserved after `count` random changes, against those after the first few.

        Both times under the same knobs, garbage collected and torch's cache given back: any difference is a loss.
        """
        rng = random.Random(5)
        engine = self.engine(enforce_eager=True, gpu_memory_utilization=0.1)
        home = self.plan(enforce_eager=True, gpu_memory_utilization=0.1)
        seen = []
        for number in range(count + 1):
            knobs = {
                "block_size": rng.choice([16, 32]), "kv_cache_dtype": rng.choice(["auto", "fp8"]),
                "max_num_seqs": rng.choice([64, 256]), "enforce_eager": number % 20 != 0,
                "gpu_memory_utilization": rng.choice([0.06, 0.1, 0.2]),
            }  # fmt: skip
            engine.reconfigure(self.plan(**knobs))
            if number in (WARM_RECONFIGURATIONS, count):
                self.add(engine, [(200, 2)] * 4, first_id=10**8 + 10 * number)
                _drain(engine)
                engine.reconfigure(home)
                seen.append(self._held_bytes())
        engine.close()
        before, after = seen
        lost = max(abs(after[name] - before[name]) for name in before)
        return {"name": f"{count} reconfigurations", "lost_bytes": lost, "before": before, "after": after}

    def _held_bytes(self) -> dict[str, int]:
        """What torch has of the card once nothing that could go is left."""
        gc.collect()
        self.torch.cuda.synchronize()
        self.torch.cuda.empty_cache()
        return {
            "allocated_bytes": self.torch.cuda.memory_allocated(), "reserved_bytes": self.torch.cuda.memory_reserved()
        }  # fmt: skip

    def swapping(self) -> dict:
        """Requests that outgrow the pool, sent back by computing them anew and by swapping.

        `hidden_share` is that of the copies' time on the bus for which no step waited; what the steps wait for are
        copies that have not ended and those within the card.
        """
        row: dict[str, Any] = {"name": "swap: share of copy time hidden behind compute"}
        times: list[tuple[str, Any, Any]] = []
        for mode in ("recompute", "swap"):
            engine = self.engine(num_gpu_blocks_override=SWAP_BLOCKS, preemption_mode=mode, swap_space=SWAP_GIB)
            engine.executor.time_swaps(times)
            found = self._round(engine, SWAP_JOBS)
            engine.close()
            swapped = sum(step[7] for step in found.pop("steps"))
            row |= {f"{mode}_{name}": value for name, value in found.items()} | {"num_swapped_blocks": swapped}
        took_ms = {what: sum(a.elapsed_time(b) for kind, a, b in times if kind == what) for what in ("bus", "wait")}
        row |= {"bus_ms": took_ms["bus"], "wait_ms": took_ms["wait"], "num_copies": len(times) // 2}
        row["hidden_share"] = 1 - took_ms["wait"] / took_ms["bus"]
        self.say(f"swap: {row}")
        return row

    def mixed_load(self, step_tokens: int = MIXED_STEP_TOKENS, *, enforce_eager: bool = False) -> dict:
        """p99 of the time between tokens of 32 requests, undisturbed and while a 32k prompt is prefilled in chunks, in
        steps of `step_tokens`."""
        knobs: dict[str, Any] = {
            "max_model_len": LONG_PROMPT + 1024, "max_num_batched_tokens": step_tokens,
            "max_num_seqs": MIXED_REQUESTS + 1, "enforce_eager": enforce_eager,
        }  # fmt: skip
        engine = self.engine(**knobs)
        self.add(engine, [(512, 700)] * MIXED_REQUESTS)
        long_prompt = self.requests([(LONG_PROMPT, 1)], first_id=10**6)
        quiet: list[float] = []
        busy: list[float] = []
        computed, last_s = engine.step(), time.perf_counter()
        while engine.has_unfinished and not (busy and len(quiet) > 220):
            # Tokens come with the step after theirs.
            result, now_s = engine.step(), time.perf_counter()
            if computed.num_decode_tokens == MIXED_REQUESTS:
                (busy if computed.num_prefill_tokens else quiet).append(now_s - last_s)
            computed, last_s = result, now_s
            if len(quiet) == 200 and long_prompt:
                engine.add_request(long_prompt.pop())
        engine.close()
        quiet_ms, busy_ms = 1000 * _p99(quiet[:200]), 1000 * _p99(busy)
        name = f"mixed load{', eager' if enforce_eager else ''}"
        self.say(f"{name}: p99 {quiet_ms:.2f} ms undisturbed, {busy_ms:.2f} ms beside the prompt")
        return {
            "name": name, "quiet_p99_ms": quiet_ms, "busy_p99_ms": busy_ms, "ratio": busy_ms / quiet_ms,
            "quiet_median_ms": 1000 * _median(quiet), "busy_median_ms": 1000 * _median(busy),
            "num_quiet": len(quiet), "num_busy": len(busy), "prompt_s": sum(busy), "knobs": knobs,
        }  # fmt: skip


def _drain(engine: Any) -> StepRows:
    """Run to the end; what is kept of a step is `STEP_COLUMNS`, for tokens that nobody takes would only be garbage."""
    steps = []
    while engine.has_unfinished:
        step = engine.step()
        steps.append(tuple(getattr(step, name) for name in STEP_COLUMNS))
    return steps


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2] if values else 0.0


def _p99(values: list[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))] if values else float("nan")


_COLD = """
import time, sys
start = float(sys.argv[1])
from labkit.engine.bench_gpu import Bench, NANO_MODEL, _drain
bench = Bench(NANO_MODEL, print)
engine = bench.engine()
bench.add(engine, [(128, 1)])
_drain(engine)
print("SECONDS", time.time() - start)
"""


def cold_start() -> dict[str, Any]:
    """Seconds from the start of a new Python to the first token, compiled kernels already on disk."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", _COLD, str(time.time())], env=environment, capture_output=True, text=True, timeout=300
    )
    seconds = [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("SECONDS")]
    return {"name": "cold start", "seconds": seconds[0] if seconds else None, "error": done.stderr[-500:]}


def run_bench(on_progress: Callable[[str], None], on_rows: Callable[[dict[str, dict]], object]) -> dict[str, StepRows]:
    """All measurements; `on_rows` gets them after each. One that fails is a row with its error, and a miss.

    Returns:
        Row name → its steps, `STEP_COLUMNS` each.
    """
    rows: dict[str, dict] = {}

    def measure(key: str, call: Callable[[], dict]) -> None:
        start = time.perf_counter()
        try:
            rows[key] = call()
        except Exception as error:
            rows[key] = {"name": key, "error": f"{type(error).__name__}: {error}"[:500]}
            on_progress(traceback.format_exc(limit=-5))
        rows[key]["took_s"] = time.perf_counter() - start
        on_progress(f"[{rows[key]['took_s']:.1f} s] {rows[key]}")
        on_rows(rows)

    bench = Bench(NANO_MODEL, on_progress)
    measure("nano", lambda: bench.throughput("nano", nano_jobs(), rounds=2))
    measure("nano_fp8", lambda: bench.throughput("nano, fp8 KV", nano_jobs(), rounds=2, kv_cache_dtype="fp8"))
    measure("swap", bench.swapping)
    measure("mixed", bench.mixed_load)
    measure("mixed_160", lambda: bench.mixed_load(160))
    measure("graphs", lambda: bench.first_token_after_change(enforce_eager=False))
    measure("eager", lambda: bench.first_token_after_change(enforce_eager=True))
    measure("cold", cold_start)
    measure("lost", bench.lost_bytes)
    measure("eager_decode", lambda: eager_decode(bench))
    measure("steps_graphs", lambda: prompt_steps(bench, enforce_eager=False))
    measure("steps_eager", lambda: prompt_steps(bench, enforce_eager=True))
    measure("after_changes", lambda: decode_after_changes(bench))
    measure("nano_no_overlap", lambda: bench.throughput("nano, no overlap", nano_jobs(), overlap=False))
    measure("mixed_eager", lambda: bench.mixed_load(enforce_eager=True))
    large = Bench(LARGE_MODEL, on_progress)
    measure("large", lambda: large.many_at_once(LARGE_STEP_TOKENS))
    measure("alone", lambda: large.throughput("1 × 512→256", [(512, 256)], rounds=2))
    measure("large_8192", lambda: large.many_at_once(8192))
    return {**bench.steps, **large.steps}


def summarize(rows: dict[str, dict]) -> dict[str, dict]:
    """The promised numbers from the measurements by key."""

    def value(key: str, name: str) -> float | None:
        return rows.get(key, {}).get(name)

    def ratio(above: float | None, below: float | None) -> float | None:
        return above / below if above is not None and below else None

    nano, changed = value("nano", "output_tokens_per_s"), value("graphs", "median_s")
    return {
        "nano_tokens_per_s": at_least(nano, VLLM_NANO, 28000),
        "nano_share_of_floor": at_least(ratio(nano, NANO_FLOOR), 0.58, 0.70),
        "llama_8b_256_tokens_per_s": at_least(value("large", "output_tokens_per_s"), VLLM_LARGE, 10700),
        "llama_8b_alone_tokens_per_s": at_least(value("alone", "output_tokens_per_s"), VLLM_ALONE, 245),
        "configure_to_first_token_graphs_s": at_most(changed, 2.0, 1.0),
        "configure_to_first_token_eager_s": at_most(value("eager", "median_s"), 0.5, 0.2),
        "cold_start_s": at_most(value("cold", "seconds"), 15.0, 8.0),
        "change_vs_vllm_start": at_least(ratio(VLLM_START_S, changed), 30.0, 60.0),
        "gpu_busy_share": at_least(value("nano", "gpu_busy_share"), 0.95, 0.98),
        "fp8_kv_vs_16_bit": at_least(ratio(value("nano_fp8", "output_tokens_per_s"), nano), 1.15, 1.35),
        "lost_bytes_200_reconfigurations": at_most(value("lost", "lost_bytes"), 0),
        "swap_share_hidden": at_least(value("swap", "hidden_share"), 0.8, 0.95),
        "mixed_load_p99_ratio": at_most(value("mixed", "ratio"), 3.0, 2.0),
        "eager_decode_step_ms": at_most(value("eager_decode", "median_ms"), 8.0, 6.0),
        "step_of_512_tokens_32_prompts_ms": at_most(_step_ms(rows, "512/32"), 4.0, 3.0),
        "step_of_8192_tokens_32_prompts_ms": at_most(_step_ms(rows, "8192/32"), 20.0, 18.0),
        "decode_after_changes": at_most(value("after_changes", "ratio"), 1.02),
    }


def _step_ms(rows: dict[str, dict], kind: str) -> float | None:
    """From call to token of a step of prompts, "tokens/prompts", with graphs."""
    return rows.get("steps_graphs", {}).get("ms", {}).get(kind, [None])[0]


def name_of_card() -> str:
    """The card with its memory, as results files name it.

    Raises:
        UnsupportedError: there is no card.
    """
    import torch

    if not torch.cuda.is_available():
        raise UnsupportedError(
            "this benchmark needs an NVIDIA card and a torch built for it", works="labkit bench engine"
        )
    return f"{torch.cuda.get_device_name()}, {memory(torch.cuda.mem_get_info()[1])}"


def bench_engine_gpu(
    path: str | Path, steps_path: str | Path | None = None, *, on_progress: Callable[[str], None] = print
) -> dict[str, Any]:
    """Measure and write the results file.

    Args:
        steps_path: where to write every step of the throughput rows, as JSON; None writes none.

    Raises:
        UnsupportedError: there is no card.
    """
    facts = {"command": "labkit bench engine-gpu", "card": name_of_card(), "baseline": BASELINE}
    content: dict[str, Any] = {}

    def write(rows: dict[str, dict]) -> None:
        content.update(write_results(path, rows=list(rows.values()), summary=summarize(rows), **facts))

    steps = run_bench(on_progress, write)
    if steps_path is not None:
        write_atomic(steps_path, json.dumps({"columns": STEP_COLUMNS, "steps": steps}))
    return content


if __name__ == "__main__":
    bench_engine_gpu(*(sys.argv[1:] or ["results/engine-gpu.json"]))
