"""Tensor parallelism with processes and gloo: the tokens of one process, each rank's memory as planned, and faults.

The ranks of a size are started once and serve all tests of that size, each its own model; faults come last, since they
end them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import signal
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from labkit.engine import Engine, EngineRequest, SamplingParams
from labkit.engine.engine import default_executor
from labkit.engine.simulation import VirtualExecutor, bare_plan, virtual_model
from labkit.engine.tensor_parallel import RankedExecutor, StepReader, StepWriter, agreed_blocks
from labkit.errors import DoesNotFitError, LabkitError, OutOfRangeError, RankError, UnsupportedError
from labkit.experiments import card
from labkit.experiments.rank_group import RankGroup
from labkit.experiments.tensor_parallel_bench import run_bench, summarize
from labkit.memory.labkit_rules import check_shares
from labkit.memory.planner import plan as make_memory_plan
from labkit.memory.tensors import vocabulary_rows
from labkit.specs import load_gpu, load_model, synthetic_workload
from labkit.specs.engine_config import EngineConfig
from labkit.specs.gpu_spec import GpuSpec
from tests.engine.random_qwen import save_random_qwen

GREEDY = Path(__file__).parent.parent / "models" / "data" / "smollm2_greedy.json"
CPU = GpuSpec(name="cpu", total_bytes=2**31, origin="cpu")


@pytest.fixture(scope="module")
def group(one_thread):
    """The ranks of a size; new ones where a test has ended them."""
    groups: dict[int, RankGroup] = {}

    def of(size: int) -> RankGroup:
        if size not in groups or None in groups[size].pids:
            groups[size] = RankGroup(size)
        return groups[size]

    yield of
    for entry in groups.values():
        entry.close()


class ThreadGroup:
    """`RankGroup` with threads of this process in place of processes: gloo and messages as there, none to start."""

    def __init__(self, size: int) -> None:
        self._pool = ThreadPoolExecutor(size)
        self._folder = tempfile.TemporaryDirectory()
        meeting = f"{self._folder.name}/meeting"
        self._ranks = list(self._pool.map(lambda rank: connected(rank, size, meeting), range(size)))

    def load(self, spec, folder: Path):
        from labkit.models import load_model_weights

        self._decoders = [load_model_weights(spec, folder, "float32", ranks=ranks) for ranks in self._ranks]
        return self._decoders[0]

    def executor(self, plan) -> RankedExecutor:
        return RankedExecutor(self, lambda plan: default_executor(self._decoders[0], plan), plan)

    def configure(self, how: str, plan, here) -> None:
        if how == "new":
            self._executors = [default_executor(decoder, plan) for decoder in self._decoders[1:]]
            self._readers = [StepReader() for _ in self._executors]
        here()

    def send(self, message: dict) -> None:
        text = json.dumps(message)
        batches = [reader.batch(json.loads(text)) for reader in self._readers]
        self._steps = [
            self._pool.submit(other.execute, batch) for other, batch in zip(self._executors, batches, strict=True)
        ]

    @contextlib.contextmanager
    def computing(self):
        yield
        for step in self._steps:
            step.result(30)


def connected(rank: int, size: int, meeting: str):
    """One gloo rank, a thread of this process."""
    import torch

    from labkit.models.ranks import ProcessRanks

    return ProcessRanks(rank, size, meeting, torch.device("cpu"), timeout_s=20)


def serve(engine: Engine, prompts, **sampling) -> tuple[list[list[int]], int]:
    """Outputs of the prompts in order, and how often a request was sent back."""
    for index, prompt in enumerate(prompts):
        params = SamplingParams(**{"max_tokens": 6 + 4 * index, "ignore_eos": True, **sampling})
        engine.add_request(EngineRequest(index, tuple(prompt), params))
    outputs = finish(engine)
    preemptions = sum(output.num_preemptions for output in outputs.values())
    return [list(outputs[index].token_ids) for index in range(len(prompts))], preemptions


def finish(engine: Engine) -> dict:
    """Outputs by request."""
    outputs = {}
    while engine.has_unfinished:
        outputs |= {output.request_id: output for output in engine.step().finished}
        engine.check()
    return outputs


def watch_logits(decoder) -> list:
    """All logits that `decoder` gives from now on."""
    seen, logits = [], decoder.logits
    decoder.logits = lambda hidden: seen.append(logits(hidden)) or seen[-1].clone()
    return seen


def test_smollm2_on_three_ranks_gives_transformers_tokens(group, smollm2_gguf):
    """Nine heads and three KV heads; prompts in chunks, more requests than the pool holds."""
    from labkit.specs.gguf_spec import model_from_gguf

    spec, ranks = model_from_gguf(smollm2_gguf), group(3)
    config = EngineConfig(
        dtype="float32", max_model_len=256, max_num_seqs=4, max_num_batched_tokens=48, block_size=16,
        num_gpu_blocks_override=10, tensor_parallel_size=3,
    )  # fmt: skip
    predicted = make_memory_plan(spec, CPU, config, engine="labkit")
    decoder = ranks.load(spec, str(smollm2_gguf), "float32")
    engine = Engine(decoder, predicted, executor=ranks.executor(predicted))
    runs = json.loads(GREEDY.read_text())["runs"][:4]
    outputs, _ = serve(engine, [run["prompt"] for run in runs], max_tokens=8)
    assert outputs == [run["tokens"][:8] for run in runs]
    assert decoder.num_bytes + decoder.table_bytes == predicted.breakdown.weights_bytes
    engine.close()


PROMPTS = (tuple(range(3, 40)), (5,), tuple(range(80, 61, -1)), (7, 7, 7, 7, 7, 7))


@pytest.mark.parametrize(
    ("size", "kind", "heads", "kv_heads", "seed"),
    [(2, "qwen2", 4, 2, 1), (2, "qwen3", 6, 2, 2), (2, "qwen3", 4, 1, 3), (4, "qwen2", 8, 2, 4), (4, "qwen3", 4, 2, 5)],
    ids=lambda value: str(value),
)
def test_random_qwens_give_the_tokens_and_logits_of_one_process(
    one_thread, make_plan, tmp_path, size, kind, heads, kv_heads, seed
):
    """KV heads divided, or repeated beyond their number; sharded reading of safetensors; vocabularies that pad."""
    from labkit.models import load_model_weights

    save_random_qwen(tmp_path, seed, kind, heads, kv_heads)
    spec, ranks = load_model(tmp_path), ThreadGroup(size)
    alone = load_model_weights(spec, tmp_path, "float32")
    shared = ranks.load(spec, tmp_path)
    assert shared.weights.embedding.shape[0] == vocabulary_rows(spec.vocab_size, size)
    assert shared.heads(0)[:2] == (heads // size, max(1, kv_heads // size))
    # A pool for half of them at once: some are sent back and computed anew.
    plan = make_plan(spec, blocks=12, tensor_parallel_size=size)
    seen = watch_logits(alone), watch_logits(shared)
    expected, _ = serve(Engine(alone, plan), PROMPTS)
    engine = Engine(shared, plan, executor=ranks.executor(plan))
    outputs, preemptions = serve(engine, PROMPTS)
    engine.close()
    assert outputs == expected
    assert preemptions
    assert len(seen[0]) == len(seen[1])
    for ours, theirs in zip(*seen, strict=True):
        assert float((ours - theirs).abs().max()) < 1e-4 * max(1.0, float(ours.abs().max()))


@pytest.fixture
def shared_by(group, tmp_path, make_plan):
    """The same random weights alone and over so many ranks, and a plan for both."""

    def of(size: int):
        from labkit.models import load_model_weights

        save_random_qwen(tmp_path, 9, "qwen3", 12, 12)
        spec, ranks = load_model(tmp_path), group(size)

        def plan(**knobs):
            return make_plan(spec, **{"tensor_parallel_size": size, **knobs})

        return load_model_weights(spec, tmp_path, "float32"), ranks.load(spec, str(tmp_path), "float32"), ranks, plan

    return of


def test_what_is_drawn_penalised_or_swapped_is_that_of_one_process(shared_by):
    alone, shared, ranks, plan = shared_by(3)
    small = plan(blocks=12, swap=30, preemption_mode="swap")
    for sampling in ({"temperature": 0.9, "top_p": 0.9, "seed": 3}, {"repetition_penalty": 1.5}):
        expected, _ = serve(Engine(alone, small), PROMPTS, **sampling)
        engine = Engine(shared, small, executor=ranks.executor(small))
        outputs, preemptions = serve(engine, PROMPTS, **sampling)
        engine.close()
        assert outputs == expected
        assert preemptions


def test_reconfigured_in_the_middle_and_refused_together(shared_by):
    """Another block size while requests run; what every rank refuses leaves the ranks as they are."""
    alone, shared, ranks, plan = shared_by(3)
    expected, _ = serve(Engine(alone, plan()), PROMPTS)
    engine, pids = Engine(shared, plan(), executor=ranks.executor(plan())), ranks.pids
    for index, prompt in enumerate(PROMPTS):
        engine.add_request(EngineRequest(index, prompt, SamplingParams(max_tokens=6 + 4 * index, ignore_eos=True)))
    outputs = {output.request_id: output for _ in range(4) for output in engine.step().finished}
    engine.reconfigure(plan(block_size=8))
    outputs |= finish(engine)
    assert [list(outputs[index].token_ids) for index in range(len(PROMPTS))] == expected
    with pytest.raises(UnsupportedError, match="nvfp4"):
        engine.reconfigure(plan(kv_cache_dtype="nvfp4"))
    engine.close()
    fresh = Engine(shared, plan(), executor=ranks.executor(plan()))
    assert serve(fresh, PROMPTS)[0] == expected
    fresh.close()
    assert ranks.pids == pids


def test_steps_survive_the_way_through_a_message():
    """Over a simulated life with few blocks, swapping and sharing, what is read is what was scheduled."""
    config = EngineConfig(
        max_model_len=64, max_num_seqs=6, max_num_batched_tokens=16, block_size=4, preemption_mode="swap"
    )
    plan, rng = bare_plan(virtual_model(), config, 18, 12), random.Random(3)
    executor, writer, reader = VirtualExecutor(plan), StepWriter(), StepReader()
    execute, tables, seen = executor.execute, {}, []

    def compared(batch):
        found = reader.batch(json.loads(json.dumps(writer.message(batch))))
        plain = dataclasses.replace(batch, sequences=(), num_prefill_tokens=0, num_decode_tokens=0, num_preemptions=0)
        assert dataclasses.replace(found, sequences=()) == plain
        assert [entry.index for entry in found.sequences] == [entry.index for entry in batch.sequences]
        for slot, ours, theirs in zip(batch.slots, batch.block_tables, found.block_tables, strict=True):
            # Executors take a list that they know for one that has only grown.
            if slot in tables:
                assert (tables[slot][0] is ours) == (tables[slot][1] is theirs)
            tables[slot] = (ours, theirs)
        seen.append(len(batch.swap_out) + len(batch.swap_in))
        return execute(batch)

    executor.execute = compared
    engine = Engine(None, plan, executor=executor, clock=executor.clock)
    prompts = [[rng.randrange(1, 50) for _ in range(rng.randrange(1, 30))] for _ in range(30)]
    _, preemptions = serve(engine, prompts, max_tokens=20)
    assert preemptions > 3
    assert sum(seen) > 3


def on_threads(call):
    """`call` for each of two gloo ranks that are threads of this process."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda rank: call(connected(rank, 2, f"{folder}/meeting")), range(2)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_ranks_sum_gather_and_agree(one_thread, dtype):
    torch = one_thread
    parts = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(1)).to(getattr(torch, dtype))

    def call(ranks):
        own = parts[ranks.rank]
        return (
            ranks.all_reduce(own.clone()),
            [ranks.all_gather(own, count) for count in (10, 7, 5, 2)],
            ranks.from_first(own.clone()),
            ranks.smallest(7 - ranks.rank),
        )

    found = on_threads(call)
    for total, gathered, first, smallest in found:
        # The sum of two rounded numbers, rounded; the same bits on each rank.
        assert torch.equal(total, (parts[0].double() + parts[1].double()).to(parts.dtype))
        for part in gathered:
            assert torch.equal(part, torch.cat((parts[0], parts[1]), dim=1)[:, : part.shape[1]])
            assert part.is_contiguous()
        assert torch.equal(first, parts[0])
        assert smallest == 6


def test_a_pool_has_the_blocks_of_the_smallest_card(one_thread):
    counts = {0: (70, 700), 1: (50, 560)}
    assert on_threads(lambda ranks: agreed_blocks(ranks, lambda: counts[ranks.rank])) == [(50, 700), (50, 560)]

    def call(ranks):
        def count():
            if ranks.rank:
                raise DoesNotFitError("no KV block is left", knob="gpu_memory_utilization")
            return 70, 700

        with pytest.raises(DoesNotFitError) as caught:
            agreed_blocks(ranks, count)
        return str(caught.value)

    assert "another card" in on_threads(call)[0]


@pytest.mark.parametrize(
    ("model", "size", "works"),
    [("SmolLM2-135M-Instruct", 2, "1"), ("SmolLM2-135M-Instruct", 6, "3"), ("Qwen/Qwen3-0.6B", 32, "16")],
)
def test_sizes_that_no_layer_divides_name_one_that_does(model, size, works):
    with pytest.raises(OutOfRangeError) as caught:
        make_memory_plan(load_model(model), load_gpu("cpu"), EngineConfig(tensor_parallel_size=size, max_model_len=512))
    assert (caught.value.knob, caught.value.works) == ("tensor_parallel_size", works)
    check_shares(load_model(model), int(works))


@pytest.mark.parametrize("cards", [0, 1, 2, 3])
def test_a_run_on_more_cards_than_there_are_is_refused_and_planned(cards, monkeypatch):
    h200 = load_gpu("H200")
    monkeypatch.setattr(card, "runs_on", lambda gpu: cards > 0)
    monkeypatch.setattr(card, "read_gpus", lambda: (h200,) * cards)
    two = EngineConfig(tensor_parallel_size=2, max_model_len=4096)
    if cards < 2:
        with pytest.raises(OutOfRangeError, match=f"needs 2 cards, and this machine has {cards or 'none'}") as caught:
            card.check_cards(h200, two)
        assert caught.value.knob == "tensor_parallel_size"
    else:
        card.check_cards(h200, two)
    card.check_cards(h200, EngineConfig())
    card.check_cards(load_gpu("cpu"), two)
    spec = load_model("Qwen/Qwen3-0.6B")
    parts = [make_memory_plan(spec, h200, two.replace(tensor_parallel_size=size)).breakdown for size in (1, 2)]
    assert parts[1].weights_bytes < 0.6 * parts[0].weights_bytes


def test_a_shared_decoder_is_not_run_alone(shared_by):
    _, shared, _, plan = shared_by(3)
    with pytest.raises(LabkitError, match="3 ranks share this decoder"):
        Engine(shared, plan())


def test_one_rank_is_no_group():
    with pytest.raises(OutOfRangeError, match="share nothing"):
        RankGroup(1)


def begun(of_size) -> tuple[Engine, RankGroup]:
    """An engine in the middle of its requests."""
    _, shared, ranks, plan = of_size
    engine = Engine(shared, plan(), executor=ranks.executor(plan()))
    engine.add_request(EngineRequest(0, (1, 2, 3), SamplingParams(max_tokens=200, ignore_eos=True)))
    engine.step()
    return engine, ranks


def steps_until_lost(engine: Engine, ranks: RankGroup, match: str) -> None:
    pids = ranks.pids
    with pytest.raises(RankError, match=match) as caught:
        finish(engine)
    assert "all ranks are started anew" in caught.value.works
    with pytest.raises(RankError, match=match):
        engine.step()
    with pytest.raises(RankError, match=match):
        ranks.load(engine.plan.model)
    engine.close()
    ranks.close()
    assert not [pid for pid in pids if pid is not None and psutil.pid_exists(pid)]


def test_a_rank_that_fails_alone_says_by_what(shared_by):
    """A message that only this rank gets and cannot compute; the others would wait for it for ever."""
    engine, ranks = begun(shared_by(3))
    ranks._others[1].send({"type": "step", "slots": [0]})
    steps_until_lost(engine, ranks, "rank 2 of 3: the worker failed during the run: KeyError: 'tables'")


def test_a_killed_rank_is_named_though_giving_up_waits_for_the_engine(shared_by, monkeypatch):
    """NCCL's abort ends the kernels, and then waits for the captured graphs, which the engine holds until it is closed.

    (`commDestroySync` in NCCL's init.cc polls until no graph names the communicator.)
    """
    engine, ranks = begun(shared_by(2))
    graphs_are_gone, close, waited = threading.Event(), engine.executor.close, []

    def abort() -> None:
        waited.append(graphs_are_gone.wait(20))
        time.sleep(0.3)
        waited.append("freed")

    monkeypatch.setattr(ranks._ranks, "abort", abort)
    monkeypatch.setattr(engine.executor, "close", lambda: (graphs_are_gone.set(), close()))
    os.kill(ranks.pids[0], signal.SIGKILL)
    steps_until_lost(engine, ranks, r"rank 1 of 2: the worker died during the run: signal 9")
    # Once, and closing waits for it: a thread that comes back from it as Python ends would take the process down.
    assert waited == [True, "freed"]


def test_the_bench_of_two_cards_runs_through_on_a_cpu(one_thread, tiny_spec):
    """Every row of it, with a small model and gloo: what is measured on cards only must not be tried there first."""
    knobs = {
        "num_gpu_blocks_override": 300, "max_model_len": 4096, "max_num_batched_tokens": 512, "max_num_seqs": 12,
    }  # fmt: skip
    loads = {"many": [(20, 4)] * 3, "alone": [(20, 4)]}
    seen, spec = {}, tiny_spec(max_position_embeddings=4096)
    run_bench(print, seen.update, models={"large": spec}, device="cpu", knobs=knobs, loads=loads)
    assert list(seen) == ["large_tokens", "large_2_many", "large_1_many", "large_2_alone", "large_1_alone", "killed"]
    assert "rank 1 of 2" in seen["killed"]["message"]
    promised = summarize(seen)
    assert promised["largest_gap_of_a_greedy_token"]["ok"]
    assert all(entry["value"] is not None for entry in promised.values())


def test_ranks_that_stop_are_ended(shared_by):
    """A stopped process answers nothing and closes nothing."""
    engine, ranks = begun(shared_by(2))
    ranks._others[0].worker.hang_timeout_s = 1.5
    os.kill(ranks.pids[0], signal.SIGSTOP)
    steps_until_lost(engine, ranks, r"rank 1 of 2: the worker said nothing for 1.5 s during the run and was ended")


@pytest.fixture
def session(tmp_path):
    from labkit.experiments import LabSession

    # Wide enough that rows outweigh what operators take for themselves; logits are the most of a step.
    wide = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 12_000, "head_dim": 64}
    save_random_qwen(tmp_path, 6, "qwen3", 8, 4, **wide)
    config = EngineConfig(
        cpu_memory_gib=0.1, max_model_len=256, max_num_seqs=32, max_num_batched_tokens=128, tensor_parallel_size=2
    )
    workload = synthetic_workload(4, 20, 100, seed=1)
    with LabSession(tmp_path, "cpu", workload, config=config, store=tmp_path / "runs.sqlite3") as session:
        yield session


def test_a_session_outlives_a_killed_rank_and_cancels(session):
    """The worker and its rank are ended and started anew; Cancel keeps them; nothing is left of a worker that is killed
    while its rank is stopped."""
    everyone, events = set(), []

    def family() -> list[psutil.Process]:
        worker = psutil.Process(session.worker_pid)
        found = [worker, *worker.children(recursive=True)]
        everyone.update(process.pid for process in found)
        return found

    def kill_rank(event: dict) -> None:
        events.append(event)
        if event["type"] == "step" and len(everyone) == 0:
            family()[1].kill()

    with pytest.raises(RankError, match=r"rank 1 of 2: the worker died during the run: signal 9"):
        session.run(on_event=kill_rank)
    assert session.records()[-1].status == "failed"
    cancelled = session.run(on_event=lambda event: event["type"] == "step" and (family(), session.cancel()))
    assert cancelled.status == "cancelled"
    pids = {process.pid for process in family()}
    record = session.run(workload=synthetic_workload(2, 8, 3, seed=2))
    assert record.status == "finished"
    assert {process.pid for process in family()} == pids
    predicted, measured = record.plan.breakdown.parts(), record.measured.parts()
    for part in ("kv_cache", "block_tables", "workspace"):
        assert measured[part] == predicted[part], part
    # Head norms are kept once for each head.
    assert measured["weights"] == pytest.approx(predicted["weights"], rel=0.01)
    assert measured["activation"] == pytest.approx(predicted["activation"], rel=0.10)
    worker, rank = family()
    rank.suspend()
    worker.kill()
    session.close()
    assert len(everyone) == 4
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and any(map(psutil.pid_exists, everyone)):
        time.sleep(0.05)
    assert not [pid for pid in everyone if psutil.pid_exists(pid)]
