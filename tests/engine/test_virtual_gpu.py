"""The virtual engine takes the steps of the real one: same rows, tables, preemptions, with jumps and without."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from labkit.engine import Engine, EngineRequest, SamplingParams
from labkit.engine.cpu_executor import CpuExecutor
from labkit.engine.launch_rules import labkit_rules, vllm_launch_rules
from labkit.engine.simulation import bare_plan
from labkit.engine.step_constants import load_constants
from labkit.engine.step_cost import step_cost
from labkit.engine.step_time import StepTimeModel
from labkit.engine.virtual_gpu import VirtualEngine, quick_hash
from labkit.specs import load_gpu
from labkit.specs.engine_config import EngineConfig


def make_requests(rng: random.Random, count: int, vocab_size: int) -> list[EngineRequest]:
    """Prompts of 1 to 60 tokens, some with a common beginning."""
    common = [rng.randrange(1, vocab_size) for _ in range(24)]
    requests = []
    for index in range(count):
        own = [rng.randrange(1, vocab_size) for _ in range(rng.randint(1, 36))]
        prompt = (common[: rng.choice([0, 8, 24])]) + own
        requests.append(
            EngineRequest(index, tuple(prompt), SamplingParams(max_tokens=rng.randint(1, 50), ignore_eos=True))
        )
    return requests


def virtual(plan, overlaps: bool = False) -> VirtualEngine:
    launch = labkit_rules(plan.config) if overlaps else vllm_launch_rules(plan.config)
    model = StepTimeModel(step_cost(plan.model, plan.config), load_gpu("H100 SXM"), load_constants(), launch)
    return VirtualEngine(plan, model)


class LateCpuExecutor(CpuExecutor):
    """Gives tokens one call later, as a card does, and knows the last one of each slot."""

    def submit(self, batch):
        known = self.__dict__.setdefault("known", {})
        for row, slot in enumerate(batch.slots):
            start = batch.query_starts[row]
            if batch.token_ids[start] < 0:
                batch.token_ids[start] = known[slot]
        tokens = self.execute(batch)
        sampled = [slot for slot, samples in zip(batch.slots, batch.samples, strict=True) if samples]
        known.update(zip(sampled, tokens, strict=True))
        return tokens

    def collect(self, pending):
        return pending


def tables(engine: Engine) -> dict[int, tuple[list[int], int]]:
    running = engine.scheduler.running
    return {entry.request.request_id: (list(entry.block_table), entry.num_computed_tokens) for entry in running}


def counts(result) -> tuple[int, ...]:
    return (
        result.num_tokens, result.num_prefill_tokens, result.num_decode_tokens, result.num_running, result.num_waiting,
        result.num_blocks_used, result.num_blocks_cached, result.num_tokens_stored, result.num_preemptions,
        result.num_swapped_blocks,
    )  # fmt: skip


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_the_same_requests_take_the_same_steps_on_the_cpu_engine(seed, overlaps, tiny_decoder, tiny_spec, make_plan):
    rng = random.Random(seed)
    swap = rng.choice([0, 40])
    plan = make_plan(
        blocks=rng.choice([34, 60]), swap=swap, block_size=rng.choice([4, 8]), max_model_len=120,
        max_num_seqs=rng.choice([3, 8]), max_num_batched_tokens=rng.choice([24, 64]),
        enable_prefix_caching=rng.random() < 0.7, preemption_mode="swap" if swap else "recompute",
    )  # fmt: skip
    decoder = tiny_decoder()
    executor = LateCpuExecutor(decoder, plan) if overlaps else CpuExecutor(decoder, plan)
    real = Engine(decoder, plan, executor=executor, hash_function=quick_hash, overlap=overlaps)
    simulated = virtual(plan, overlaps)
    waiting = make_requests(rng, 24, tiny_spec().vocab_size)
    finished: tuple[dict, dict] = ({}, {})
    while waiting or real.has_unfinished:
        for _ in range(min(len(waiting), rng.choice([0, 0, 3]))):
            request = waiting.pop(0)
            for engine in (real, simulated):
                engine.add_request(request)
        results = [engine.step() for engine in (real, simulated)]
        assert counts(results[0]) == counts(results[1])
        assert tables(real) == tables(simulated)
        for found, result in zip(finished, results, strict=True):
            found |= {entry.request_id: (len(entry.token_ids), entry.num_preemptions) for entry in result.finished}
    assert finished[0] == finished[1]
    assert len(finished[0]) == 24
    assert not simulated.has_unfinished


@pytest.mark.parametrize("rules", ["labkit", "labkit, overlapping", "vllm"])
@pytest.mark.parametrize("seed", range(8))
def test_jumps_are_the_single_steps_that_they_stand_for(seed, rules, tiny_spec):
    rng = random.Random(seed)
    config = EngineConfig(
        block_size=rng.choice([1, 4, 16]), max_model_len=200, max_num_seqs=rng.choice([2, 6]),
        max_num_batched_tokens=rng.choice([8, 64]), enable_prefix_caching=rng.random() < 0.6,
    )  # fmt: skip
    overlaps = rules.endswith("overlapping")
    plan = bare_plan(tiny_spec(), config, rng.choice([160, 320]) // config.block_size)
    plan = replace(plan, engine=rules.split(",")[0])
    requests = make_requests(rng, 20, tiny_spec().vocab_size)
    arrivals = sorted(rng.uniform(0, 0.05) for _ in requests)
    runs = [serve(virtual(plan, overlaps), requests, arrivals, with_jumps) for with_jumps in (False, True)]
    (rows, times, end, _), (jumped_rows, jumped_times, jumped_end, num_jumps) = runs
    assert [row[1:] for row in jumped_rows] == [row[1:] for row in rows]
    assert [row[0] for row in jumped_rows] == pytest.approx([row[0] for row in rows])
    assert jumped_times.keys() == times.keys()
    assert all(jumped_times[key] == pytest.approx(times[key]) for key in times)
    assert jumped_end == pytest.approx(end)
    assert num_jumps > 0


def serve(engine: VirtualEngine, requests, arrivals, with_jumps):
    """Rows of all steps, token times by request, the end, and how many jumps were taken."""
    rows, times, position, num_jumps = [], {}, 0, 0
    while position < len(requests) or engine.has_unfinished:
        while position < len(requests) and arrivals[position] <= engine.gpu.now_s:
            engine.add_request(requests[position])
            position += 1
        until = arrivals[position] if position < len(requests) else np.inf
        if not engine.has_unfinished:
            engine.gpu.now_s = until
            continue
        jump = engine.jump(until) if with_jumps else None
        if jump is None:
            result = engine.step()
            rows.append((result.start_s, *counts(result)))
            times |= {entry.request_id: entry.token_times_s for entry in result.finished}
        else:
            num_jumps += 1
            n = jump.num_decode_tokens
            times |= {entry.request_id: entry.token_times_s for entry in jump.finished}
            for step in range(len(jump.start_s)):
                rows.append((
                    jump.start_s[step], n, 0, n, jump.num_running[step], jump.num_waiting, jump.num_blocks_used[step],
                    jump.num_blocks_cached[step], jump.num_tokens_stored[step], 0, 0,
                ))  # fmt: skip
        engine.check() if engine.plan.engine == "labkit" else engine.scheduler.pool.check(
            entry.block_table for entry in engine.scheduler.running
        )
    return rows, times, engine.gpu.now_s, num_jumps


def test_nothing_to_do_is_no_jump(tiny_spec):
    plan = bare_plan(tiny_spec(), EngineConfig(max_model_len=64, max_num_seqs=2, max_num_batched_tokens=64), 8)
    engine = virtual(plan)
    assert engine.jump(np.inf) is None
    engine.add_request(EngineRequest(0, (1, 2, 3), SamplingParams(max_tokens=1)))
    engine.step()
    assert engine.jump(np.inf) is None
    assert engine.gpu.now_s > 0


def test_a_jump_ends_with_the_step_in_which_the_next_request_arrives(tiny_spec):
    plan = bare_plan(tiny_spec(), EngineConfig(max_model_len=64, max_num_seqs=2, max_num_batched_tokens=64), 8)
    engine = virtual(plan)
    engine.add_request(EngineRequest(0, (1, 2, 3), SamplingParams(max_tokens=40, ignore_eos=True)))
    engine.step()
    first_s = engine.gpu.now_s
    second_s = float(engine.gpu.model.decode_seconds(np.array([4.0]), 1)[0])
    jump = engine.jump(first_s + 2.5 * second_s)
    assert len(jump.start_s) == 3
    assert engine.gpu.now_s == pytest.approx(jump.start_s[-1] + jump.duration_s[-1])


def test_vllm_sends_back_the_youngest_and_keeps_no_room_for_growth(tiny_spec):
    # Two requests of 8 tokens fill 4 blocks of 4; each grows to 12, which needs 6: the younger one goes.
    config = EngineConfig(block_size=4, max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64)
    plan = replace(bare_plan(tiny_spec(), config, 5), engine="vllm", kv_cache_tokens=20)
    engine = virtual(plan)
    for index in range(2):
        prompt = tuple(range(10 * index + 1, 10 * index + 9))
        engine.add_request(EngineRequest(index, prompt, SamplingParams(max_tokens=8, ignore_eos=True)))
    finished = {}
    while engine.has_unfinished:
        finished |= {entry.request_id: entry for entry in engine.step().finished}
    assert [finished[index].num_preemptions for index in range(2)] == [0, 1]
    assert [len(finished[index].token_ids) for index in range(2)] == [8, 8]


@pytest.mark.parametrize("rules", ["vllm", "labkit"])
def test_a_long_prompt_takes_the_whole_budget_before_a_newcomer(rules, tiny_spec):
    config = EngineConfig(block_size=4, max_model_len=128, max_num_seqs=4, max_num_batched_tokens=16)
    plan = replace(bare_plan(tiny_spec(), config, 40), engine=rules)
    engine = virtual(plan)
    for index, length in enumerate((40, 11)):
        prompt = tuple(range(50 * index + 1, 50 * index + 1 + length))
        engine.add_request(EngineRequest(index, prompt, SamplingParams(max_tokens=1, ignore_eos=True)))
    counts_of_steps = []
    while engine.has_unfinished:
        counts_of_steps.append(engine.step().num_tokens)
    assert counts_of_steps == [16, 16, 16, 3]


@pytest.mark.parametrize("rules", ["vllm", "labkit"])
def test_decode_goes_first_and_a_prompt_takes_what_is_left(rules, tiny_spec):
    config = EngineConfig(block_size=4, max_model_len=128, max_num_seqs=4, max_num_batched_tokens=8)
    engine = virtual(replace(bare_plan(tiny_spec(), config, 60), engine=rules))
    engine.add_request(EngineRequest(0, tuple(range(1, 5)), SamplingParams(max_tokens=60, ignore_eos=True)))
    engine.add_request(EngineRequest(1, tuple(range(11, 41)), SamplingParams(max_tokens=2, ignore_eos=True)))
    rows = [engine.step() for _ in range(4)]
    assert [(row.num_prefill_tokens, row.num_decode_tokens) for row in rows] == [(8, 0), (7, 1), (7, 1), (7, 1)]
