"""`labkit bench tensor-parallel`: one model on two cards against one, the same tokens, and a rank that is killed.

Random weights; decode is 256 requests at once, or one alone, from prompts of 128 tokens. Needs two cards of one host.
"""

from __future__ import annotations

import functools
import os
import random
import signal
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from labkit.engine.bench_gpu import LARGE_MODEL, NANO_MODEL, Bench, Job
from labkit.errors import RankError, UnsupportedError
from labkit.experiments.rank_group import RankGroup
from labkit.format import memory
from labkit.results import at_least, at_most, write_results

SIZE = 2
LOADS: Mapping[str, list[Job]] = MappingProxyType({"many": [(128, 128)] * 256, "alone": [(128, 128)]})
# Both engines lie on the first card at once.
KNOBS = MappingProxyType({"gpu_memory_utilization": 0.4})
MODELS = MappingProxyType({"small": NANO_MODEL, "large": LARGE_MODEL})
# Largest gap in bfloat16 between the best logit and that of a token that was taken.
NEAR_TIE = 0.25


class RankedBench(Bench):
    """`Bench` over the ranks of a group."""

    def __init__(self, model: Any, on_progress: Callable[[str], None], group: RankGroup) -> None:
        super().__init__(model, on_progress, load=group.load)
        self.group = group

    def engine(self, *, overlap: bool = True, **knobs: Any) -> Any:
        """A new engine over all ranks."""
        from labkit.engine.engine import Engine

        plan = self.plan(tensor_parallel_size=self.group.size, **knobs)
        return Engine(self.decoder, plan, overlap=overlap, executor=self.group.executor(plan))


def greedy_gaps(alone: Bench, engines: dict[int, Any]) -> dict[str, Any]:
    """Greedy tokens of the ranks under the model of one card: how far each is below that model's best choice."""
    import torch

    from labkit.models.attention import DenseAttention

    rng = random.Random(7)
    jobs = [(rng.randrange(1, 200), 24) for _ in range(12)]
    outputs = {}
    for cards, engine in engines.items():
        alone.add(engine, jobs, temperature=0.0)
        found: dict[int, list[int]] = {}
        while engine.has_unfinished:
            found |= {output.request_id: list(output.token_ids) for output in engine.step().finished}
        outputs[cards] = [found[index] for index in range(len(jobs))]
    below, equal = [], 0
    for request, output, other in zip(alone.requests(jobs), outputs[SIZE], outputs[1], strict=True):
        tokens = torch.tensor([*request.prompt_token_ids, *output], device=alone.decoder.device)
        places = torch.arange(len(tokens), device=tokens.device)
        hidden = alone.decoder.forward(tokens, places, DenseAttention(alone.spec, [len(tokens)]))
        logits = alone.decoder.logits(hidden[len(request.prompt_token_ids) - 1 : -1])
        taken = logits.gather(1, torch.tensor(output, device=tokens.device).unsqueeze(1)).squeeze(1)
        below.append(float((logits.max(dim=-1).values - taken).max()))
        equal += output == other
    return {
        "name": "greedy tokens", "largest_gap": max(below), "num_outputs": len(jobs), "num_equal_to_one_card": equal,
        "rank_memory_parts": engines[SIZE].executor.rank_memory_parts(),
    }  # fmt: skip


def speed(bench: Bench, engine: Any, name: str, jobs: list[Job]) -> dict[str, Any]:
    """Output tokens per second from the first step to the last token, and the median step that only decodes."""
    bench.add(engine, jobs, first_id=10**6)
    start, decode_s = time.perf_counter(), []
    while engine.has_unfinished:
        result = engine.step()
        if result.num_decode_tokens and not result.num_prefill_tokens:
            decode_s.append(result.duration_s)
    wall_s = time.perf_counter() - start
    return {
        "name": name, "output_tokens_per_s": sum(count for _, count in jobs) / wall_s, "wall_s": wall_s,
        "median_decode_step_ms": 1000 * statistics.median(decode_s), "num_gpu_blocks": engine.plan.num_gpu_blocks,
    }  # fmt: skip


def killed_rank(shared: RankedBench, engine: Any) -> dict[str, Any]:
    """Seconds from the end of a rank in the middle of a run to the message that names it."""
    shared.add(engine, [(128, 3000)] * 4)
    victim = shared.group.pids[0]
    killed_at: list[float] = []

    def kill() -> None:
        killed_at.append(time.perf_counter())
        os.kill(int(victim or 0), signal.SIGKILL)

    threading.Timer(0.5, kill).start()
    text = ""
    try:
        while engine.has_unfinished:
            engine.step()
    except RankError as error:
        text = str(error)
    seconds = time.perf_counter() - killed_at[0] if killed_at and text else None
    return {"name": "a rank is killed", "seconds": seconds, "message": text}


def run_bench(
    say: Callable[[str], None],
    on_rows: Callable[[dict[str, dict]], None],
    *,
    models: Mapping[str, Any] = MODELS,
    device: str = "cuda",
    knobs: Mapping[str, Any] = KNOBS,
    loads: Mapping[str, list[Job]] = LOADS,
) -> None:
    """Measure; rows are given out as they come.

    Args:
        models: by the first word of their rows' keys; a rank of the last one is killed.
        device: "cuda", or "cpu" for a trial.
        knobs: of both engines.
        loads: requests at once, by the last word of their rows' keys.
    """
    from labkit.models import load_model_weights

    rows: dict[str, dict] = {}

    def measure(key: str, call: Callable[[], dict]) -> None:
        rows[key] = call()
        say(f"{key}: {rows[key]}")
        on_rows(rows)

    def compare(key: str, model: Any) -> None:
        start = time.perf_counter()
        shared = RankedBench(model, say, group)
        alone = Bench(model, say, load=functools.partial(load_model_weights, device=device))
        benches: dict[int, Bench] = {SIZE: shared, 1: alone}
        engines = {cards: bench.engine(**knobs) for cards, bench in benches.items()}
        name = shared.spec.name
        say(f"{name}: both engines after {time.perf_counter() - start:.1f} s")
        measure(f"{key}_tokens", lambda: greedy_gaps(alone, engines))
        for load, jobs in loads.items():
            for cards, bench in benches.items():
                title = f"{name} on {cards}, {len(jobs)} requests"
                measure(f"{key}_{cards}_{load}", functools.partial(speed, bench, engines[cards], title, jobs))
        if key == list(models)[-1]:
            measure("killed", lambda: killed_rank(shared, engines[SIZE]))
        for engine in engines.values():
            engine.close()

    group = RankGroup(SIZE, device)
    try:
        for key, model in models.items():
            compare(key, model)
    finally:
        group.close()


def summarize(rows: dict[str, dict]) -> dict[str, dict]:
    """The promised numbers from the measurements by key."""

    def gain(key: str) -> float | None:
        two, one = (rows.get(f"large_{size}_{key}", {}).get("output_tokens_per_s") for size in (2, 1))
        return two / one if two and one else None

    gaps = [rows[key]["largest_gap"] for key in ("small_tokens", "large_tokens") if key in rows]
    return {
        "largest_gap_of_a_greedy_token": at_most(max(gaps, default=None), NEAR_TIE),
        "8b_256_requests_two_cards_over_one": at_least(gain("many"), 1.2, 1.6),
        "8b_one_request_two_cards_over_one": at_least(gain("alone"), 1.2, 1.6),
        "seconds_until_a_killed_rank_is_named": at_most(rows.get("killed", {}).get("seconds"), 10.0, 2.0),
    }


def bench_tensor_parallel(path: str | Path, *, on_progress: Callable[[str], None] = print) -> dict[str, Any]:
    """Measure and write the results file, anew after each measurement.

    Raises:
        UnsupportedError: there are not two cards.
    """
    import torch

    if torch.cuda.device_count() < SIZE:
        raise UnsupportedError(
            f"this benchmark needs {SIZE} NVIDIA cards, and there are {torch.cuda.device_count()}",
            works="a machine with two cards",
        )
    card = f"{SIZE} × {torch.cuda.get_device_name()}, {memory(torch.cuda.mem_get_info()[1])} each"
    content: dict[str, Any] = {}

    def write(rows: dict[str, dict]) -> None:
        facts = {"command": "labkit bench tensor-parallel", "card": card}
        content.update(write_results(path, rows=list(rows.values()), summary=summarize(rows), **facts))

    run_bench(on_progress, write)
    return content


if __name__ == "__main__":
    import sys

    bench_tensor_parallel(sys.argv[1])
