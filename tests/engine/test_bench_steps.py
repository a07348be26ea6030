"""How single steps are measured, on an engine whose clock and card are made up."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from labkit.engine import bench_steps
from labkit.engine.bench_gpu import summarize
from labkit.specs.engine_config import EngineConfig


class Event:
    """A moment of the card, in milliseconds."""

    def __init__(self, at: float) -> None:
        self.at = at

    def elapsed_time(self, later: Event) -> float:
        return later.at - self.at


class Executor:
    """Says that a step took 0.01 ms of the card a prompt token, a decode step 5 ms, 6 after a change."""

    def __init__(self) -> None:
        self.times, self.change_ms = None, 0.0

    def submit(self, work: tuple[int, int]) -> None:
        num_prompt, num_decode = work
        took = 0.01 * num_prompt + (5.0 + self.change_ms) * (num_decode > 0)
        if self.times is not None:
            self.times.append((Event(100.0), Event(100.0 + took)))


class Engine:
    """All prompts in the first step, then a token of each request a step."""

    def __init__(self, config: EngineConfig) -> None:
        self.plan, self.executor, self.queue, self.left, self.steps = (
            SimpleNamespace(config=config),
            Executor(),
            [],
            0,
            [],
        )

    @property
    def has_unfinished(self) -> bool:
        return bool(self.queue) or self.left > 0

    def step(self) -> SimpleNamespace:
        num_prompt = sum(prompt for prompt, _ in self.queue)
        if self.queue:
            self.left = self.queue[0][1] - 1
        else:
            self.left -= 1
        work = (num_prompt, 0 if self.queue else 1)
        self.steps.append(work)
        self.queue = []
        self.executor.submit(work)
        return SimpleNamespace(num_prefill_tokens=num_prompt, duration_s=0.5 if num_prompt else 0.004)

    def reconfigure(self, config: EngineConfig) -> None:
        self.plan.config, self.executor.change_ms = config, 1.0

    def close(self) -> None:
        self.queue, self.left = [], 0


class Bench:
    """As `labkit.engine.bench_gpu.Bench`, without weights."""

    torch = SimpleNamespace(cuda=SimpleNamespace(synchronize=lambda: None))

    def __init__(self) -> None:
        self.engines, self.first_ids, self.said = [], [], []
        self.say = self.said.append

    def plan(self, **knobs) -> EngineConfig:
        return EngineConfig(max_model_len=4096, **knobs)

    def engine(self, *, overlap: bool = True, **knobs) -> Engine:
        self.engines.append(Engine(self.plan(**knobs)))
        return self.engines[-1]

    def add(self, engine: Engine, jobs, *, first_id: int) -> None:
        engine.queue = list(jobs)
        self.first_ids += range(first_id, first_id + len(jobs))


def test_a_step_of_prompts_is_measured_on_host_and_card():
    bench = Bench()
    row = bench_steps.prompt_steps(bench, enforce_eager=True)
    # One prompt may have 4,095 tokens.
    assert "4096/1" not in row["ms"]
    assert list(row["ms"])[:3] == ["64/1", "64/4", "64/8"]
    assert [row["ms"][kind][2] for kind in ("512/1", "1024/32", "8192/9")] == [5.12, 10.24, 81.9]
    assert all(len(times) == 3 and min(times) >= 0 for times in row["ms"].values())
    assert len(set(bench.first_ids)) == len(bench.first_ids)
    assert bench.engines[0].plan.config.enforce_eager


def test_an_eager_decode_step_leaves_the_prompts_out():
    assert bench_steps.eager_decode(Bench())["median_ms"] == pytest.approx(4.0)


def test_decode_is_compared_with_itself_after_changes():
    row = bench_steps.decode_after_changes(Bench())
    assert row["median_ms"] == pytest.approx([5.0, 6.0, 6.0, 6.0, 6.0])
    assert row["ratio"] == pytest.approx(1.2)


def test_the_summary_holds_single_steps_to_their_bars():
    rows = {
        "eager_decode": {"median_ms": 6.5}, "after_changes": {"ratio": 1.2},
        "steps_graphs": {"ms": {"512/32": [3.5, 0.6, 2.9], "8192/32": [40.0, 30.0, 39.0]}},
    }  # fmt: skip
    found = summarize(rows)
    assert found["eager_decode_step_ms"] == {"value": 6.5, "at_most": 8.0, "aim": 6.0, "ok": True}
    assert found["step_of_512_tokens_32_prompts_ms"]["value"] == 3.5
    assert [found[name]["ok"] for name in ("step_of_8192_tokens_32_prompts_ms", "decode_after_changes")] == [False] * 2
    assert summarize({})["step_of_512_tokens_32_prompts_ms"]["ok"] is False
