"""Which runs are the card's, and what a worker does when the card's context is lost."""

from __future__ import annotations

import pytest
from example_runs import example_plan, example_workload

from labkit.errors import WorkerError
from labkit.experiments import card
from labkit.experiments.backend import describe_error, is_lost_context, rebuild_error
from labkit.experiments.serialise import to_plain
from labkit.experiments.worker import Worker
from labkit.specs import cpu_gpu, load_gpu
from labkit.specs.gpu_spec import GpuSpec

HERE = GpuSpec(name="H200", total_bytes=2**37, origin="nvml")


@pytest.mark.parametrize(
    ("gpu", "has_cuda", "expected"),
    [
        (HERE, True, True),
        (HERE, False, False),
        (load_gpu("H200"), True, True),
        (load_gpu("H100"), True, False),
        (cpu_gpu(), True, False),
    ],
)
def test_runs_are_the_cards_where_it_is_here_and_torch_can(monkeypatch, gpu, has_cuda, expected):
    monkeypatch.setattr(card, "torch_has_cuda", lambda: has_cuda)
    monkeypatch.setattr(card, "load_gpu", lambda name: HERE)
    monkeypatch.setattr(card, "find_spec", lambda name: object())
    assert card.runs_on(gpu) is expected


def test_what_torch_was_built_for_is_what_torch_says(one_thread):
    assert card.torch_has_cuda() is (one_thread.version.cuda is not None)


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        ("CUDA error: an illegal memory access was encountered", True),
        ("Triton Error [CUDA]: an illegal memory access was encountered", True),
        ("CUDA error: device-side assert triggered", True),
        ("CUDA error: invalid configuration argument", False),
        ("CUDA out of memory. Tried to allocate 20.00 GiB", False),
        ("CUDA error: out of memory", False),
        ("shape mismatch", False),
    ],
)
def test_only_errors_after_which_nothing_works_end_the_process(text, lost):
    assert is_lost_context(RuntimeError(text)) is lost


def test_out_of_memory_on_a_card_names_the_cards_knob():
    error = rebuild_error(describe_error(RuntimeError("CUDA out of memory")), "in the run")
    assert error.knob == "gpu_memory_utilization"
    assert rebuild_error(describe_error(MemoryError("no")), "in the run").knob == "cpu_memory_gib"


def test_a_lost_context_is_said_and_the_next_call_has_a_new_process():
    worker, events = Worker("fake_backend:FakeBackend"), []
    try:
        worker.call("load", {}, events.append)
        worker.call("configure", {"plan": to_plain(example_plan())}, events.append)
        first = worker.pid
        workload = {**to_plain(example_workload(2, 2)), "name": "fault:context@run"}
        with pytest.raises(WorkerError, match=r"context is lost.*illegal memory access"):
            worker.call("run", {"workload": workload}, events.append)
        worker.call("load", {}, events.append)
        assert worker.pid not in (None, first)
    finally:
        worker.close()
