"""Memory that ends at each operation in turn: loading, configuring, running. The next attempt works as the first."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from failing_memory import FailAt

from labkit.experiments.backend import describe_error
from labkit.experiments.engine_backend import EngineBackend
from labkit.experiments.run import RunOptions
from labkit.experiments.serialise import to_plain
from labkit.memory import plan as make_plan
from labkit.specs import load_gpu
from labkit.specs.engine_config import EngineConfig
from labkit.specs.model_spec import LayerSpec, ModelSpec
from labkit.specs.workload import RequestSpec, Workload

TINY = ModelSpec(
    name="tiny", architecture="", model_type="llama", layers=(LayerSpec("full", 2, 1, 32),) * 2, hidden_size=32,
    intermediate_size=48, vocab_size=128, max_position_embeddings=128, dtype="float32",
)  # fmt: skip
LOAD = {"model": to_plain(TINY), "source": "", "dtype": "float32", "load_format": "dummy", "device": "cpu"}
CONFIG = EngineConfig(cpu_memory_gib=0.1, max_model_len=128, max_num_seqs=4, swap_space=0.001)
WORKLOAD = Workload("plain", tuple(RequestSpec(0.0, 5 + index, 6) for index in range(4)))


def ignore(event) -> None:
    """Events are not looked at here."""


def attempt(backend: EngineBackend, command: str, arguments: dict, number: int) -> bool:
    """True when memory ended during `command`, which then said so."""
    with FailAt(number) as memory:
        try:
            getattr(backend, command)(arguments, ignore, lambda: False)
        except torch.OutOfMemoryError as error:
            event = describe_error(error)
            return event["kind"] == "out_of_memory" and memory.reached
    return False


@pytest.fixture(scope="module")
def commands(one_thread):
    plan = make_plan(TINY, dataclasses.replace(load_gpu("cpu")), CONFIG)
    run = {"workload": to_plain(WORKLOAD), "options": to_plain(RunOptions())}
    return {"load": LOAD, "configure": {"plan": to_plain(plan)}, "run": run}


def outcome(backend: EngineBackend, commands: dict) -> tuple:
    for command in ("load", "configure"):
        backend_answer = getattr(backend, command)(commands[command], ignore, lambda: False)
        assert backend_answer
    return run_only(backend, commands)


def run_only(backend: EngineBackend, commands: dict) -> tuple:
    rows = []
    answer = backend.run(commands["run"], lambda event: rows.extend(event.get("requests", [])), lambda: False)
    counts = sorted((row[0], row[5], row[8]) for row in [*rows, *answer["requests"]])
    return answer["status"], counts, answer["memory_parts"]["kv_cache"]


@pytest.mark.parametrize(("command", "stride"), [("load", 3), ("configure", 1)])
def test_operations_before_a_run_may_be_the_last(command, stride, commands):
    expected = outcome(EngineBackend(), commands)
    assert expected[0] == "finished"
    backend, number = EngineBackend(), 1
    if command == "configure":
        backend.load(LOAD, ignore, lambda: False)
    while attempt(backend, command, commands[command], number):
        number += stride
    assert number > 8
    # The last attempt, which nothing stopped, left a backend that goes on.
    if command == "load":
        backend.configure(commands["configure"], ignore, lambda: False)
    assert run_only(backend, commands) == expected


def test_a_run_may_end_at_any_operation(commands):
    backend = EngineBackend()
    expected = outcome(backend, commands)
    for number in (1, 2, 3, 10, 40, 150, 400):
        assert attempt(backend, "run", commands["run"], number)
        backend.configure(commands["configure"], ignore, lambda: False)
        assert run_only(backend, commands) == expected
