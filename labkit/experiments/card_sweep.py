"""A sweep of the real engine on the card that is here, as ground truth for the virtual one: one short run a setting.

    python -m labkit.experiments.card_sweep results/h200-sweep.json microbenchmark=60 grid=120
    python -m labkit.experiments.card_sweep results/h200-unseen.json microbenchmark=60 unseen=60 second-model=60

Each part has a process of its own: a grid whose process had run the microbenchmark before was slower in part.
Rows hold what a run was judged by and every step in short columns, so that all comparisons can be made later without
a card. The file is written anew after each run: what ran is kept when the time is over. Random weights.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

from labkit.experiments.microbench import Bench, check_card, run_microbenchmark
from labkit.experiments.run import RunOptions, RunOutcome, WorkloadRun
from labkit.measure.run_record import RequestRow, StepRow
from labkit.measure.summary import inter_token_s, percentiles, time_to_first_token_s
from labkit.results import at_most, write_results
from labkit.specs import load_model, prompt_token_ids, synthetic_workload
from labkit.specs.engine_config import EngineConfig
from labkit.specs.workload import Workload
from labkit.text import plain

SMALL_MODEL, LARGE_MODEL = "Qwen/Qwen3-0.6B", "meta-llama/Llama-3.1-8B-Instruct"
BASE: Mapping[str, Any] = {
    "max_model_len": 2048, "max_num_seqs": 64, "max_num_batched_tokens": 2048, "gpu_memory_utilization": 0.1,
    "kv_cache_dtype": "auto", "block_size": 16,
}  # fmt: skip
# With 0.025 of an H200 the pool holds some 17,000 tokens, twice that in fp8: too few for many requests at once.
SPACE: Mapping[str, tuple[Any, ...]] = {
    "kv_cache_dtype": ("auto", "fp8"), "max_num_batched_tokens": (2048, 8192, 512), "max_num_seqs": (64, 96, 32),
    "gpu_memory_utilization": (0.1, 0.025),
}  # fmt: skip
TRAFFIC: Mapping[str, Any] = {
    "num_requests": 96, "input_lengths": "uniform:64-512", "output_lengths": "uniform:32-128",
}  # fmt: skip
# Outputs that are long for their prompts outgrow a small pool: requests are sent back.
GROWING: Mapping[str, Any] = {
    "num_requests": 100, "input_lengths": "uniform:16-96", "output_lengths": "uniform:64-256",
}  # fmt: skip
_MIDDLE: Mapping[str, Any] = {
    "num_requests": 90, "input_lengths": "uniform:100-700", "output_lengths": "uniform:20-150",
}  # fmt: skip
_LONGER: Mapping[str, Any] = {
    "num_requests": 60, "input_lengths": "uniform:400-1500", "output_lengths": "uniform:32-200",
}  # fmt: skip
WARM_UP: Mapping[str, Any] = {"num_requests": 8, "input_lengths": 128, "output_lengths": 4, "seed": 999}
REPEAT = "repeat"
SAME = "runs with the settings of the first one, others between them: largest difference of throughput, %"
# Runs that differ in nothing may differ by so much, in percent, for one to stand for the others.
_STEADY, _STEADY_AIM = 2.0, 1.0
_DIFFERENCES = ("start_us", "end_us", "num_tokens_stored")
STEP_COLUMNS = (
    "num_prefill_tokens", "num_decode_tokens", "num_running", "num_waiting", "num_blocks_used", "num_tokens_stored",
    "num_preemptions", "num_swapped_blocks",
)  # fmt: skip


@dataclass(frozen=True)
class SweepRun:
    """One run: the part of the file that it belongs to, knobs over `BASE`, and its traffic."""

    part: str
    knobs: Mapping[str, Any]
    seed: int = 0
    traffic: Mapping[str, Any] | None = None
    model: str = SMALL_MODEL

    @property
    def config(self) -> EngineConfig:
        """The knobs as a configuration."""
        return EngineConfig(**{**BASE, **self.knobs})

    def workload(self) -> Workload:
        """The requests."""
        return synthetic_workload(seed=self.seed, **{**TRAFFIC, **(self.traffic or {})})


def sweep_runs() -> list[SweepRun]:
    """The grid, whole, between two runs of the base."""
    points = (dict(zip(SPACE, values, strict=True)) for values in itertools.product(*SPACE.values()))
    return [SweepRun(REPEAT, {}), *(SweepRun("grid", point) for point in points), SweepRun(REPEAT, {})]


def unseen_runs() -> list[SweepRun]:
    """Runs that no choice of the step-time model has seen: other block sizes, lengths, seeds and arrivals, no graphs, a
    shared prefix; the base calibrates."""
    swaps = {"preemption_mode": "swap", "swap_space": 2.0}
    prefix = {"num_requests": 120, "shared_prefix_tokens": 512, "input_lengths": "uniform:540-900"}
    others: list[tuple[dict[str, Any], Mapping[str, Any]]] = [
        ({"max_num_seqs": 88, "block_size": 32}, _MIDDLE),
        ({"max_num_seqs": 40, "max_num_batched_tokens": 3072, "kv_cache_dtype": "fp8"}, _LONGER),
        ({"max_num_seqs": 48, "max_num_batched_tokens": 1536}, {"num_requests": 120, "arrivals": "poisson:120"}),
        ({"max_num_seqs": 100, "num_gpu_blocks_override": 450}, GROWING),
        ({"max_num_seqs": 100, "num_gpu_blocks_override": 260, "block_size": 32}, GROWING),
        ({"max_num_seqs": 8}, {"num_requests": 16, "output_lengths": "uniform:128-384"}),
        ({"max_num_seqs": 56, "max_num_batched_tokens": 768, "enable_prefix_caching": True}, prefix),
        ({"max_num_seqs": 100, "num_gpu_blocks_override": 420, **swaps}, GROWING),
        ({"max_num_seqs": 64, "enforce_eager": True}, {"num_requests": 48}),
    ]
    unseen = [SweepRun("unseen", point, 301 + index, traffic) for index, (point, traffic) in enumerate(others)]
    return [SweepRun("calibrates", {}), *unseen]


def second_model_runs() -> list[SweepRun]:
    """The same of a larger model, whose first run calibrates it."""
    roomy = {"gpu_memory_utilization": 0.3}
    others: list[tuple[dict[str, Any], Mapping[str, Any]]] = [
        ({**roomy, "max_num_seqs": 80, "max_num_batched_tokens": 1536}, _MIDDLE),
        ({**roomy, "max_num_seqs": 40, "kv_cache_dtype": "fp8"}, {**_LONGER, "num_requests": 30}),
        ({**roomy, "max_num_seqs": 72, "num_gpu_blocks_override": 360}, GROWING),
        ({**roomy, "max_num_seqs": 48}, {"num_requests": 80, "arrivals": "poisson:40"}),
        (
            {**roomy, "max_num_seqs": 24, "max_num_batched_tokens": 4096, "block_size": 32},
            {**_MIDDLE, "num_requests": 48},
        ),
        ({**roomy, "max_num_seqs": 8}, {"num_requests": 16}),
    ]
    return [
        SweepRun("second model calibrates", roomy, 400, {"num_requests": 64}, LARGE_MODEL),
        *(SweepRun("second model", point, 401 + index, traffic, LARGE_MODEL)
          for index, (point, traffic) in enumerate(others)),
    ]  # fmt: skip


# Each part of the file by its name on the command line.
PARTS: Mapping[str, Callable[[], list[SweepRun]]] = MappingProxyType(
    {
        "grid": lambda: sweep_runs(),
        "unseen": unseen_runs,
        "second model": second_model_runs,
    }
)


class CardEngine:
    """The engine over one model's random weights, reconfigured from run to run.

    Args:
        model: of the catalogue.
        device: "cuda"; "cpu" for a trial of the code.
    """

    def __init__(self, model: str, device: str = "cuda") -> None:
        from labkit.models import load_model_weights

        self.spec, self.gpu = load_model(model), Bench(device).gpu
        self._decoder = load_model_weights(self.spec, dtype="bfloat16", load_format="dummy", device=device)
        self._engine: Any = None

    def run(self, run: SweepRun) -> dict[str, Any]:
        """Configure, warm up, serve; one row."""
        from labkit.engine.engine import Engine
        from labkit.memory import plan

        planned = plan(self.spec, self.gpu, run.config)
        start = time.monotonic()
        if self._engine is None:
            self._engine = Engine(self._decoder, planned)
        else:
            self._engine.reconfigure(planned)
        self._serve(synthetic_workload(**WARM_UP), 0)
        configure_s = time.monotonic() - start
        if run.config.preemption_mode == "swap":
            # Its copies compile when the first request is sent back.
            self._serve(replace(run, seed=run.seed + 1000).workload(), run.seed)
        gc.collect()
        outcome = self._serve(run.workload(), run.seed)
        return {
            "part": run.part, "model": run.model, "knobs": dict(run.knobs), "settings": {**BASE, **run.knobs},
            "seed": run.seed, "traffic": {**TRAFFIC, **(run.traffic or {})}, "configure_s": round(configure_s, 3),
            "num_gpu_blocks": self._engine.plan.num_gpu_blocks, "planned_blocks": planned.num_gpu_blocks,
            "memory_parts": self._engine.memory_parts(), **run_metrics(outcome), "steps": packed_steps(outcome.steps),
        }  # fmt: skip

    def _serve(self, workload: Workload, seed: int) -> RunOutcome:
        engine, vocab_size = self._engine, self.spec.vocab_size
        rows: list[dict[str, Any]] = []
        options = RunOptions(seed=seed, report_every_s=1e6)
        prompts = [prompt_token_ids(workload, index, vocab_size=vocab_size) for index in range(len(workload.requests))]
        return WorkloadRun(engine, workload, lambda index: prompts[index], options, rows.append, lambda: False).serve()

    def close(self) -> None:
        """Give the card's memory back."""
        if self._engine is not None:
            self._engine.close()
        self._engine = self._decoder = None
        gc.collect()


def run_metrics(outcome: RunOutcome) -> dict[str, Any]:
    """What runs are compared by; times in seconds."""
    requests: Sequence[RequestRow] = outcome.requests
    gaps, first = percentiles(inter_token_s(requests)), percentiles(time_to_first_token_s(requests))
    ends = [row for row in requests if row.finish_s is not None and row.first_token_s is not None]
    tokens = sum(row.output_tokens for row in requests)
    tpot = [
        ((row.finish_s or 0.0) - (row.first_token_s or 0.0)) / (row.output_tokens - 1)
        for row in ends
        if row.output_tokens > 1
    ]
    return {
        "status": outcome.status, "num_requests": len(requests), "num_finished": len(ends),
        "duration_s": round(outcome.duration_s, 6), "output_tokens": tokens,
        "output_tokens_per_s": round(tokens / outcome.duration_s, 2) if outcome.duration_s else None,
        "tpot_mean_s": round(sum(tpot) / len(tpot), 7) if tpot else None,
        "itl_p50_s": round(gaps.p50, 7) if gaps else None, "itl_p99_s": round(gaps.p99, 7) if gaps else None,
        "ttft_p50_s": round(first.p50, 7) if first else None, "ttft_p99_s": round(first.p99, 7) if first else None,
        "num_preemptions": sum(row.num_preemptions for row in requests),
        "cached_tokens": sum(row.num_cached_tokens for row in requests),
    }  # fmt: skip


def packed_steps(steps: Sequence[StepRow]) -> dict[str, str]:
    """Column → numbers with a space between, without the columns that are all zero.

    Starts and ends in microseconds and the tokens stored are differences from one step to the next.
    """
    columns = {name: [getattr(row, name) for row in steps] for name in STEP_COLUMNS}
    columns["start_us"] = [round(1e6 * row.start_s) for row in steps]
    columns["end_us"] = [round(1e6 * (row.start_s + row.duration_s)) for row in steps]
    for name in _DIFFERENCES:
        columns[name] = [after - before for before, after in pairwise([0, *columns[name]])]
    return {name: " ".join(map(str, values)) for name, values in columns.items() if any(values)}


def unpacked_steps(packed: Mapping[str, str]) -> tuple[StepRow, ...]:
    """The rows that `packed_steps` packed, times to the microsecond."""
    columns = {name: [int(word) for word in text.split()] for name, text in packed.items()}
    count = len(columns.get("end_us", ()))
    columns = {name: columns.get(name, [0] * count) for name in (*STEP_COLUMNS, "start_us", "end_us")}
    for name in _DIFFERENCES:
        columns[name] = list(itertools.accumulate(columns[name]))
    rows = []
    for index in range(count):
        row = {name: values[index] for name, values in columns.items()}
        start_us, end_us = row.pop("start_us"), row.pop("end_us")
        num_tokens = row["num_prefill_tokens"] + row["num_decode_tokens"]
        rows.append(StepRow(1e-6 * start_us, 1e-6 * (end_us - start_us), num_tokens, num_blocks_cached=0, **row))
    return tuple(rows)


def run_part(
    part: str, path: Path, budget_s: float, *, on_progress: Callable[[str], None] = print, device: str = "cuda"
) -> dict[str, Any]:
    """Measure "microbenchmark" or one of `PARTS` until it is done or the time is over, and write it.

    Rows of other parts that the file holds already stay.
    """
    start = time.monotonic()
    content = _read(path)
    if part == "microbenchmark":
        content["microbenchmark"] = asdict(run_microbenchmark(budget_s, on_progress=on_progress, made=_now()))
        _write(path, content)
        return content
    runs = PARTS[part]()
    engines: dict[str, CardEngine] = {}
    rows = [row for row in content["rows"] if row["part"] not in {run.part for run in runs}]
    for number, run in enumerate(runs):
        # What tells whether the engine has changed its speed meanwhile is run in any case.
        is_last_word = run.part == REPEAT and number == len(runs) - 1
        if time.monotonic() - start > budget_s and not is_last_word:
            on_progress(f"{budget_s:g} s were over before {run.knobs}")
            continue
        if run.model not in engines:
            for engine in engines.values():
                engine.close()
            engines = {run.model: CardEngine(run.model, device)}
        try:
            row = engines[run.model].run(run)
        except Exception as error:
            row = {"part": run.part, "knobs": dict(run.knobs), "error": plain(f"{type(error).__name__}: {error}", 300)}
        rows.append(row)
        content["rows"] = rows
        _write(path, content)
        on_progress(_line(row, time.monotonic() - start))
    return content


def _line(row: Mapping[str, Any], elapsed_s: float) -> str:
    if "error" in row:
        return f"{elapsed_s:6.1f} s {row['part']} {row['knobs']}: {row['error']}"
    return (
        f"{elapsed_s:6.1f} s {row['part']} {list(row['knobs'].values())} {row['output_tokens_per_s']:.0f} tok/s "
        f"tpot {1e3 * (row['tpot_mean_s'] or 0):.2f} p99 {1e3 * (row['itl_p99_s'] or 0):.2f} ms "
        f"pre {row['num_preemptions']} blocks {row['num_gpu_blocks']}/{row['planned_blocks']} "
        f"run {row['duration_s']:.2f} configure {row['configure_s']:.2f} s"
    )


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {"rows": [], "microbenchmark": None}
    stored = json.loads(path.read_text(encoding="utf-8"))
    return {"rows": stored["rows"], "microbenchmark": stored.get("microbenchmark"), "card": stored["card"]}


def _write(path: Path, content: dict[str, Any]) -> None:
    import torch

    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "none (CPU)"
    write_results(
        path, command=_command(path, content), card=card, rows=content["rows"], summary=_steadiness(content["rows"]),
        microbenchmark=content["microbenchmark"],
    )  # fmt: skip


def _command(path: Path, content: Mapping[str, Any]) -> str:
    """What measures again all that the file holds."""
    held = {row["part"] for row in content["rows"]}
    names = [name.replace(" ", "-") for name, runs in PARTS.items() if held & {run.part for run in runs()}]
    names = ["microbenchmark", *names] if content["microbenchmark"] else names
    return " ".join(["python -m labkit.experiments.card_sweep", str(path), *names])


def _steadiness(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """How far the throughputs of runs with the settings of the first one lie apart, in percent; empty before there are
    two of them: an engine with two speeds cannot be foretold by one run."""
    first = next((row for row in rows if row["part"] == REPEAT and "error" not in row), None)
    if first is None:
        return {}
    same = [
        row["output_tokens_per_s"] for row in rows
        if "error" not in row and all(row[name] == first[name] for name in ("model", "settings", "seed", "traffic"))
    ]  # fmt: skip
    if len(same) < 2:
        return {}
    return {SAME: at_most(round(100 * (max(same) / min(same) - 1), 2), _STEADY, _STEADY_AIM)}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def main() -> None:
    """The command line of this module."""
    parser = argparse.ArgumentParser(description="Sweep labkit's engine on the card that is here.")
    parser.add_argument("path", type=Path)
    parser.add_argument("parts", nargs="+", help="microbenchmark, grid, unseen or second-model, each with =SECONDS")
    options = parser.parse_args()
    if len(options.parts) > 1:
        # In processes of their own, as users calibrate and serve; replays were slower in one that had done both.
        command = [sys.executable, "-m", "labkit.experiments.card_sweep", str(options.path)]
        codes = [subprocess.run([*command, part], check=False).returncode for part in options.parts]
        sys.exit(max(codes, key=abs))
    check_card()
    name, _, budget_s = options.parts[0].partition("=")
    run_part(name.replace("-", " "), options.path, float(budget_s or 120))


if __name__ == "__main__":
    main()
