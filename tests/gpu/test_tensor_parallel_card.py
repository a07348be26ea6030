"""Ranks on cards: NCCL in graphs, two ranks on one card through gloo, two cards, equal pools, and a killed rank."""

from __future__ import annotations

import os
import signal
import threading
import time

import psutil
import pytest

from labkit.engine import Engine, EngineRequest, SamplingParams
from labkit.errors import RankError
from labkit.experiments import LabSession
from labkit.experiments.rank_group import RankGroup
from labkit.memory import plan as make_memory_plan
from labkit.models import load_model_weights
from labkit.models.ranks import ONE_RANK
from labkit.specs import load_gpu
from labkit.specs.engine_config import EngineConfig
from labkit.specs.model_spec import LayerSpec
from labkit.specs.workload import RequestSpec, Workload
from tests.gpu.test_engine_cuda import KNOBS, NEAR_TIE, drain, gaps, make_spec, requests


@pytest.fixture(scope="module")
def two_cards():
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two NVIDIA cards, there are {torch.cuda.device_count()}")


@pytest.fixture(scope="module")
def group(two_cards):
    group = RankGroup(2, "cuda")
    yield group
    group.close()


def spec_of(kv_heads: int):
    return make_spec(layers=(LayerSpec(kind="full", num_heads=8, num_kv_heads=kv_heads, head_dim=64),) * 4)


def make_engine(group: RankGroup, decoder, **knobs) -> Engine:
    config = EngineConfig(**{**KNOBS, **knobs}, dtype=str(decoder.dtype).removeprefix("torch."), tensor_parallel_size=2)
    plan = make_memory_plan(decoder.spec, load_gpu("H200"), config)
    return Engine(decoder, plan, executor=group.executor(plan))


def test_nccl_of_one_rank_is_captured_and_changes_nothing(tmp_path):
    """Its calls are those of many ranks, with nobody to wait for: a machine with one card can run them."""
    import torch

    from labkit.models.ranks import ProcessRanks

    spec, asked = spec_of(4), requests()
    torch.cuda.set_device(0)
    ranks = ProcessRanks(0, 1, str(tmp_path / "meeting"), torch.device("cuda", 0))
    outputs = []
    for members in (ONE_RANK, ranks):
        decoder = load_model_weights(spec, dtype="float32", load_format="dummy", device="cuda", ranks=members)
        plan = make_memory_plan(spec, load_gpu("H200"), EngineConfig(**KNOBS, dtype="float32"))
        engine = Engine(decoder, plan)
        outputs.append(drain(engine, asked)[0])
        assert engine.memory_parts()["cuda_graphs"] > 0
        engine.close()
    ranks.abort()
    assert outputs[0] == outputs[1]


def test_two_ranks_on_one_card_give_its_tokens_and_one_that_is_killed_is_named(monkeypatch):
    """All of the way but NCCL: half the heads in the kernels, steps ahead of the tokens, memory of each rank."""
    from labkit.experiments import other_rank
    from tests.gpu import one_card_ranks

    monkeypatch.setattr(other_rank, "RANK_BACKEND", f"{one_card_ranks.__name__}:Backend")
    for patch in one_card_ranks.PATCHES:
        monkeypatch.setattr(*patch)
    spec, asked = spec_of(4), requests()
    alone = load_model_weights(spec, dtype="float32", load_format="dummy", device="cuda")
    group = RankGroup(2, "cuda")
    try:
        shared = group.load(spec, None, "float32", "dummy")
        engine = make_engine(group, shared, enforce_eager=True)
        outputs, _ = drain(engine, asked)
        below = gaps(alone, asked, outputs)
        assert float(below.max()) <= NEAR_TIE["float32"]
        assert float((below == 0).float().mean()) > 0.97
        parts = engine.executor.rank_memory_parts()
        assert parts[0]["kv_cache"] == parts[1]["kv_cache"] == 400 * engine.plan.block_bytes
        assert parts[0]["weights"] == parts[1]["weights"] < 0.6 * alone.num_bytes
        threading.Timer(0.2, os.kill, (group.pids[0], signal.SIGKILL)).start()
        with pytest.raises(RankError, match=r"rank 1 of 2: the worker died during the run: signal 9"):
            run_to_the_end(engine)
        engine.close()
    finally:
        group.close()


@pytest.mark.parametrize(("dtype", "kv_heads"), [("bfloat16", 4), ("float32", 1)])
def test_greedy_tokens_are_one_cards_own_choice(group, dtype, kv_heads):
    """KV heads divided, and one that both have; decode steps replay graphs with the all-reduces in them."""
    spec, asked = spec_of(kv_heads), requests()
    alone = load_model_weights(spec, dtype=dtype, load_format="dummy", device="cuda")
    shared = group.load(spec, None, dtype, "dummy")
    outputs = {}
    for enforce_eager in (False, True):
        engine = make_engine(group, shared, enforce_eager=enforce_eager)
        outputs[enforce_eager], _ = drain(engine, asked)
        parts = engine.executor.rank_memory_parts()
        assert (parts[0]["cuda_graphs"] == 0) is enforce_eager
        assert parts[0]["kv_cache"] == parts[1]["kv_cache"] == 400 * engine.plan.block_bytes
        assert parts[0]["weights"] == parts[1]["weights"] < 0.6 * alone.num_bytes
        engine.close()
    for found in outputs.values():
        below = gaps(alone, asked, found)
        assert float(below.max()) <= NEAR_TIE[dtype]
        assert float((below == 0).float().mean()) > 0.9


def test_the_pool_is_that_of_the_card_with_less_room_and_changes_with_the_knobs(group):
    import torch

    shared = group.load(spec_of(4), None, "bfloat16", "dummy")
    free = torch.cuda.mem_get_info(0)[0]
    engine = make_engine(group, shared, num_gpu_blocks_override=None)
    blocks = engine.plan.num_gpu_blocks
    assert 0 < blocks * engine.plan.block_bytes < free
    plan = engine.plan.config.replace(block_size=32)
    engine.reconfigure(make_memory_plan(shared.spec, load_gpu("H200"), plan))
    assert engine.plan.num_gpu_blocks == pytest.approx(blocks / 2, rel=0.02)
    assert drain(engine, requests(max_tokens=4))[0]
    engine.close()


def test_a_killed_rank_is_named_and_new_ranks_serve(group):
    shared = group.load(spec_of(4), None, "bfloat16", "dummy")
    engine = make_engine(group, shared)
    engine.add_request(EngineRequest(0, (1, 2, 3), SamplingParams(max_tokens=500, ignore_eos=True)))
    engine.step()
    threading.Timer(0.2, os.kill, (group.pids[0], signal.SIGKILL)).start()
    start = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 of 2: the worker died during the run: signal 9"):
        run_to_the_end(engine)
    assert time.monotonic() - start < 30
    engine.close()
    again = RankGroup(2, "cuda")
    try:
        engine = make_engine(again, again.load(spec_of(4), None, "bfloat16", "dummy"))
        assert drain(engine, requests(max_tokens=4))[0]
        engine.close()
    finally:
        again.close()


def test_a_session_outlives_a_killed_rank_and_keeps_what_was_finished(two_cards, tmp_path):
    """The worker ends with its ranks, whatever their kernels wait for, and is started anew."""
    config = EngineConfig(
        num_gpu_blocks_override=400, max_model_len=1024, max_num_seqs=4, max_num_batched_tokens=64,
        gpu_memory_utilization=0.1, load_format="dummy", tensor_parallel_size=2,
    )  # fmt: skip
    lengths = (2, 3, 900, 900)
    workload = Workload("mixed", tuple(RequestSpec(0.0, 5 + index, length) for index, length in enumerate(lengths)))
    with LabSession(spec_of(4), load_gpu("auto"), workload, config=config, store=tmp_path / "runs") as session:

        def kill_rank(event: dict) -> None:
            if event["type"] == "step" and event["num_output_tokens"] > 40:
                for rank in psutil.Process(session.worker_pid).children():
                    rank.kill()

        with pytest.raises(RankError, match=r"rank 1 of 2: the worker died during the run: signal 9"):
            session.run(on_event=kill_rank)
        assert [row.output_tokens for row in session.records()[-1].requests if row.finish_reason == "length"] == [2, 3]
        assert [row.output_tokens for row in session.run().requests] == list(lengths)


def run_to_the_end(engine: Engine) -> None:
    for index in range(1, 10_000):
        if not engine.has_unfinished:
            engine.add_request(EngineRequest(index, (1, 2, 3), SamplingParams(max_tokens=500, ignore_eos=True)))
        engine.step()
