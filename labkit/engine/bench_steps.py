"""Single steps of the engine on a card, for `labkit bench engine-gpu`: by tokens and prompts, with graphs and without;
a decode step launched kernel by kernel; a decode step before and after a changed knob."""

from __future__ import annotations

import time
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from labkit.engine.bench_gpu import Bench

STEP_TOKENS, STEP_PROMPTS, STEP_ROUNDS = (64, 128, 512, 1024, 2048, 4096, 8192), (1, 4, 8, 9, 16, 32), 4
DECODE_REQUESTS, EAGER_STEPS, CHANGES, STEPS_OF_CHANGE = 32, 60, 4, 40


def prompt_steps(bench: Bench, *, enforce_eager: bool) -> dict[str, Any]:
    """Milliseconds of one step of prompts alone, by "tokens/prompts": from call to token, of the host until the step is
    queued, and between the step's begin and end on the card. Each is the second best of four rounds."""
    engine = bench.engine(enforce_eager=enforce_eager, overlap=False)
    longest = int(engine.plan.config.max_model_len or 1) - 1
    row: dict[str, Any] = {"name": f"steps of prompts, {'eager' if enforce_eager else 'graphs'}", "ms": {}}
    first_id = 10**9
    for tokens in STEP_TOKENS:
        for prompts in (count for count in STEP_PROMPTS if tokens // count <= longest):
            rounds = []
            for _ in range(STEP_ROUNDS):
                first_id += max(STEP_PROMPTS)
                rounds.append(_one_step(bench, engine, [(tokens // prompts, 1)] * prompts, first_id))
            row["ms"][f"{tokens}/{prompts}"] = [round(1000 * value, 3) for value in sorted(rounds)[1]]
    engine.close()
    bench.say(f"{row['name']}: call to token, host, card in ms: {row['ms']}")
    return row


def _one_step(bench: Bench, engine: Any, jobs: list[tuple[int, int]], first_id: int) -> tuple[float, float, float]:
    """Seconds from call to token, of the host, of the card."""
    bench.add(engine, jobs, first_id=first_id)
    executor, submit = engine.executor, engine.executor.submit
    host_s: list[float] = []
    events: list[tuple[Any, Any]] = []

    def timed(batch: Any) -> Any:
        start = time.perf_counter()
        pending = submit(batch)
        host_s.append(time.perf_counter() - start)
        return pending

    executor.submit, executor.times = timed, events
    bench.torch.cuda.synchronize()
    start = time.perf_counter()
    engine.step()
    took_s = time.perf_counter() - start
    del executor.submit
    executor.times = None
    while engine.has_unfinished:
        engine.step()
    begin, end = events[0]
    return took_s, host_s[0], begin.elapsed_time(end) / 1000


def eager_decode(bench: Bench) -> dict[str, Any]:
    """Median seconds of a decode step of 32 requests that is launched kernel by kernel, the host never waiting long."""
    engine = bench.engine(enforce_eager=True)
    bench.add(engine, [(64, EAGER_STEPS + 20)] * DECODE_REQUESTS, first_id=2 * 10**9)
    steps = [engine.step() for _ in range(EAGER_STEPS)][-EAGER_STEPS // 2 :]
    engine.close()
    row = {"name": "decode, eager", "median_ms": 1000 * median(step.duration_s for step in steps)}
    bench.say(f"{row['name']}: {row['median_ms']:.2f} ms a step")
    return row


def decode_after_changes(bench: Bench) -> dict[str, Any]:
    """Median milliseconds on the card of a decode step of 64 requests, as the engine began and after each of four
    changes of block size and back."""
    engine = bench.engine(block_size=16)
    found = [_decode_ms(bench, engine, 0)]
    for number in range(CHANGES):
        for block_size in (32, 16):
            engine.reconfigure(bench.plan(block_size=block_size))
        found.append(_decode_ms(bench, engine, number + 1))
    engine.close()
    row = {"name": "decode of 64, after changes", "median_ms": found, "ratio": max(found[1:]) / found[0]}
    bench.say(f"{row['name']}: {found} ms")
    return row


def _decode_ms(bench: Bench, engine: Any, number: int) -> float:
    bench.add(engine, [(256, STEPS_OF_CHANGE)] * 64, first_id=3 * 10**9 + 64 * number)
    events: list[tuple[Any, Any]] = []
    while engine.has_unfinished:
        # The first steps compute prompts.
        engine.executor.times = events if engine.step().num_prefill_tokens == 0 else None
    bench.torch.cuda.synchronize()
    engine.executor.times = None
    return median(begin.elapsed_time(end) for begin, end in events)
