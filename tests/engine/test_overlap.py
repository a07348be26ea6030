"""Steps put together over tokens that only the device knows: same tokens as a plain loop, books balanced throughout."""

from __future__ import annotations

import random

import pytest

from labkit.engine import Engine, EngineRequest, SamplingParams
from labkit.engine.simulation import EOS_TOKEN_ID, VirtualExecutor, bare_plan, reference_tokens, virtual_model
from labkit.errors import LabkitError
from labkit.specs.engine_config import EngineConfig


class InjectedError(LabkitError):
    """What the executor raises when the test says so."""


class LateExecutor(VirtualExecutor):
    """Gives tokens one call later; knows the last one of each slot, as a device does."""

    def __init__(self, plan, fail_at=()):
        self._last: dict[int, int] = {}
        self._fail_at, self._calls, self.most_unknown = set(fail_at), 0, 0
        super().__init__(plan)

    def submit(self, batch):
        self._calls += 1
        if self._calls in self._fail_at:
            raise InjectedError("by the test")
        unknown = 0
        for row, slot in enumerate(batch.slots):
            start = batch.query_starts[row]
            if batch.token_ids[start] < 0:
                batch.token_ids[start] = self._last[slot]
                unknown += 1
        assert all(token >= 0 for token in batch.token_ids)
        self.most_unknown = max(self.most_unknown, unknown)
        tokens = super().execute(batch)
        sampled = [slot for slot, samples in zip(batch.slots, batch.samples, strict=True) if samples]
        self._last |= dict(zip(sampled, tokens, strict=True))
        return tokens

    def collect(self, pending):
        return pending


def make_plan(rng: random.Random):
    config = EngineConfig(
        block_size=rng.choice([1, 2, 4]), max_model_len=64, max_num_seqs=rng.choice([1, 3, 6]),
        max_num_batched_tokens=rng.choice([6, 16, 70]), enable_prefix_caching=rng.random() < 0.5,
        preemption_mode=rng.choice(["recompute", "swap"]),
    )  # fmt: skip
    return bare_plan(virtual_model(), config, 80 // config.block_size, rng.choice([0, 40]))


def make_requests(rng: random.Random) -> list[EngineRequest]:
    shared = tuple(rng.randrange(1, 50) for _ in range(12))
    return [
        EngineRequest(
            index,
            shared[: rng.randrange(12)] + tuple(rng.randrange(1, 50) for _ in range(rng.randrange(1, 20))),
            SamplingParams(max_tokens=rng.randrange(1, 30), ignore_eos=rng.random() < 0.5),
        )
        for index in range(8)
    ]


def expected(request: EngineRequest) -> list[int]:
    tokens = reference_tokens(request, request.sampling.max_tokens)
    if not request.sampling.ignore_eos and EOS_TOKEN_ID in tokens:
        tokens = tokens[: tokens.index(EOS_TOKEN_ID) + 1]
    return tokens


@pytest.mark.parametrize("seed", range(60))
def test_tokens_are_those_of_a_plain_loop(seed):
    rng = random.Random(seed)
    plan, requests = make_plan(rng), make_requests(rng)
    executor = LateExecutor(plan, fail_at=rng.sample(range(5, 60), 2))
    engine = Engine(None, plan, executor=executor, clock=executor.clock)
    waiting, finished, streamed = list(requests), {}, {request.request_id: [] for request in requests}
    aborted = requests[rng.randrange(8)].request_id if rng.random() < 0.3 else None
    for number in range(3000):
        if waiting and rng.random() < 0.4:
            engine.add_request(waiting.pop())
        if not waiting and not engine.has_unfinished:
            break
        if number == 25 and aborted is not None:
            engine.abort(aborted)
        if number == 30:
            plan = make_plan(rng)
            engine.reconfigure(plan)
        try:
            result = engine.step()
        except InjectedError:
            continue
        engine.check()
        for output in result.outputs:
            streamed[output.request_id].append(output.token_id)
        finished |= {output.request_id: output for output in result.finished}
    assert sorted(finished) == list(range(8))
    for request in requests:
        output = finished[request.request_id]
        if output.finish_reason.startswith(("cancelled", "refused")):
            assert list(output.token_ids) == expected(request)[: len(output.token_ids)]
        else:
            assert list(output.token_ids) == expected(request) == streamed[request.request_id]


def test_decode_runs_ahead_of_the_host():
    rng = random.Random(0)
    plan = bare_plan(virtual_model(), EngineConfig(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64), 40)
    executor = LateExecutor(plan)
    engine = Engine(None, plan, executor=executor, clock=executor.clock)
    for request in make_requests(rng)[:4]:
        engine.add_request(request)
    while engine.has_unfinished:
        engine.step()
    assert executor.most_unknown >= 2


@pytest.mark.parametrize("penalty", [1.0, 1.1])
@pytest.mark.parametrize("fail_at", range(1, 8))
def test_a_step_that_raises_loses_no_streamed_token(fail_at, penalty):
    """With a penalty the tokens in flight are taken before the step that raises."""
    plan = bare_plan(virtual_model(), EngineConfig(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64), 40)
    executor = LateExecutor(plan, fail_at=[fail_at])
    engine = Engine(None, plan, executor=executor, clock=executor.clock)
    engine.add_request(
        EngineRequest(0, (1, 2, 3), SamplingParams(max_tokens=8, ignore_eos=True, repetition_penalty=penalty))
    )
    streamed, finished = [], []
    while engine.has_unfinished:
        try:
            result = engine.step()
        except InjectedError:
            continue
        streamed += [output.token_id for output in result.outputs]
        finished += result.finished
    assert streamed == list(finished[0].token_ids)
    assert len(streamed) == 8


def test_without_overlap_each_step_gives_its_own_tokens():
    plan = bare_plan(virtual_model(), EngineConfig(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64), 40)
    executor = LateExecutor(plan)
    engine = Engine(None, plan, executor=executor, clock=executor.clock, overlap=False)
    engine.add_request(EngineRequest(0, (1, 2), SamplingParams(max_tokens=3, ignore_eos=True)))
    assert [len(engine.step().outputs) for _ in range(3)] == [1, 1, 1]
    assert executor.most_unknown == 0
