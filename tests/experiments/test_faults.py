"""Faults in the middle of a real engine's run: a message that says what to change, finished requests kept, the session
usable; and a card that answers no more, though its process lives."""

from __future__ import annotations

import threading

import pytest
from example_runs import example_plan, example_workload
from fault_runs import check_a_faulty_run
from faulty_backend import RAISED

from labkit.errors import CancelledError, DoesNotFitError, WorkerError
from labkit.experiments import LabSession
from labkit.experiments.backend import describe_error, is_lost_context, rebuild_error
from labkit.experiments.runner import LocalRunner, RunJob
from labkit.experiments.serialise import to_plain
from labkit.experiments.worker import Worker
from labkit.specs import load_gpu
from labkit.specs.engine_config import EngineConfig
from labkit.specs.model_spec import LayerSpec, ModelSpec

TINY = ModelSpec(
    name="tiny", architecture="", model_type="llama", layers=(LayerSpec("full", 2, 1, 32),) * 2, hidden_size=32,
    intermediate_size=48, vocab_size=128, max_position_embeddings=128, dtype="float32",
)  # fmt: skip
CONFIG = EngineConfig(cpu_memory_gib=0.1, max_model_len=128, max_num_seqs=4, load_format="dummy")


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    runner = LocalRunner(Worker("faulty_backend:FaultyBackend"))
    store = tmp_path_factory.mktemp("faults") / "runs"
    with LabSession(TINY, "cpu", config=CONFIG, store=store, runner=runner) as session:
        yield session


FAULTS = {
    "illegal access": (WorkerError, "a kernel read or wrote outside its tensors", "block_size or kv_cache_dtype", True),
    "kill": (WorkerError, r"signal 9 \(SIGKILL\)", "it is restarted", True),
    "no memory on the card": (DoesNotFitError, "Process 4711 has 120.00 GiB", "less gpu_memory_utilization", False),
    "no memory on the host": (DoesNotFitError, "ran out of memory during the run", "less cpu_memory_gib", False),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_ends_in_advice_and_the_next_run_works(session, fault):
    check_a_faulty_run(session, fault, *FAULTS[fault])


def stalling_job(name: str) -> RunJob:
    plan = example_plan()
    plan = type(plan)(**{**vars(plan), "gpu": load_gpu("H200")})
    traffic = example_workload(3, 4)
    return RunJob(plan, type(traffic)(**{**vars(traffic), "name": name}))


def test_a_card_that_answers_no_more_is_said_and_the_worker_replaced():
    runner = LocalRunner(Worker("fake_backend:FakeBackend"), stall_timeout_s=0.8)
    rows, events = [], []
    try:
        with pytest.raises(WorkerError, match=r"not answered for 0\.8 s during the run: a kernel hangs") as caught:
            runner.run(
                stalling_job("fault:hang@step"), events.append, lambda requests, steps: rows.extend(steps),
                threading.Event(),
            )  # fmt: skip
        assert "max_num_batched_tokens" in caught.value.works
        assert runner.pid is None
        assert len(rows) == 2
        answer = runner.run(stalling_job("plain"), events.append, lambda requests, steps: None, threading.Event())
        assert answer.status == "finished"
        assert any("restarted" in event.get("message", "") for event in events)
    finally:
        runner.close()


def test_a_long_run_whose_steps_go_on_is_left_alone():
    runner = LocalRunner(Worker("fake_backend:FakeBackend"), stall_timeout_s=0.8)
    job = stalling_job("plain")
    long = example_workload(1, 400)
    try:
        answer = runner.run(RunJob(job.plan, long), lambda event: None, lambda requests, steps: None, threading.Event())
        assert answer.status == "finished"
        assert answer.duration_s > 1.0
    finally:
        runner.close()


def test_a_slow_step_on_a_cpu_has_no_limit():
    runner = LocalRunner(Worker("fake_backend:FakeBackend"), stall_timeout_s=0.1)
    cancel = threading.Event()
    threading.Timer(1.5, cancel.set).start()
    job = stalling_job("fault:hang@step")
    plan = type(job.plan)(**{**vars(job.plan), "gpu": example_plan().gpu})
    try:
        with pytest.raises(CancelledError):
            runner.run(RunJob(plan, job.workload), lambda event: None, lambda requests, steps: None, cancel)
    finally:
        runner.close()


@pytest.mark.parametrize(
    ("doing", "message", "knob", "works"),
    [
        ("while loading the model", "CUDA out of memory", "quantization", "ending other programs"),
        ("while allocating memory", "CUDA out of memory", "gpu_memory_utilization", "less gpu_memory_utilization"),
        ("during the run", "CUDA error: out of memory", "gpu_memory_utilization", "fewer max_num_batched_tokens"),
        ("while loading the model", "can't allocate memory", "cpu_memory_gib", "a smaller model"),
    ],
)
def test_advice_on_lack_of_memory_fits_where_it_happened(doing, message, knob, works):
    error = rebuild_error(describe_error(RuntimeError(message)), doing)
    assert isinstance(error, DoesNotFitError)
    assert error.knob == knob
    assert works in error.works
    assert "the session can go on" in error.works


def test_a_refused_launch_does_not_end_the_worker():
    for text in ("CUDA error: invalid configuration argument", "Triton Error [CUDA]: out of resource: shared memory"):
        assert not is_lost_context(RuntimeError(text))
        assert "ends_worker" not in describe_error(RuntimeError(text))


@pytest.mark.parametrize(
    ("fault", "cause", "change"),
    [
        ("triton illegal access", "a kernel read or wrote outside", "CUDA_LAUNCH_BLOCKING=1"),
        ("device assert", "index out of range", "CUDA_LAUNCH_BLOCKING=1"),
        ("lost to another process", "another process has the card to itself", "nvidia-smi -c 0"),
        ("broken card", "the card's memory is damaged", "another card"),
        ("driver", "the card or its driver failed", "labkit doctor"),
    ],
)
def test_a_lost_card_ends_the_worker_with_cause_and_change(fault, cause, change):
    event = describe_error(RAISED.get(fault, RuntimeError("CUDA error: unspecified launch failure")))
    assert event["ends_worker"] is True
    assert cause in event["message"]
    assert change in event["works"]
    assert to_plain(event) == event
