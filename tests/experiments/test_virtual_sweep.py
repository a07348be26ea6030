"""A sweep on a virtual card: one record a combination, progress that counts up, and Cancel."""

from __future__ import annotations

import pytest

import labkit
from labkit.errors import OutOfRangeError, UnknownNameError
from labkit.experiments.virtual_sweep import simulate_sweep
from labkit.specs import load_gpu, load_model, synthetic_workload
from labkit.specs.engine_config import EngineConfig

GRID = {"max_num_seqs": [1, 4], "max_model_len": [128, 512, 10**6]}


def sweep(**settings):
    traffic = synthetic_workload(4, input_lengths=60, output_lengths=20, seed=1)
    model, card = load_model("Qwen/Qwen3-8B"), load_gpu("A10")
    return tuple(simulate_sweep(model, card, traffic, GRID, EngineConfig(), **settings))


def test_one_record_a_combination_and_progress_to_the_end():
    events = []
    records = sweep(on_event=events.append)
    assert [(record.config.max_num_seqs, record.config.max_model_len) for record in records] == [
        (seqs, length) for seqs in GRID["max_num_seqs"] for length in GRID["max_model_len"]
    ]
    assert [record.status for record in records] == ["finished", "finished", "failed"] * 2
    assert [event["done"] for event in events] == list(range(7))
    assert [record.counters and record.counters.card for record in records] == ["A10", "A10", None] * 2
    assert records[0].counters.method.startswith("simulated")
    assert events[-1]["remaining_s"] == 0


def test_cancel_keeps_what_was_done():
    events = []
    records = sweep(on_event=events.append, is_cancelled=lambda: len(events) >= 2)
    assert 1 <= len(records) <= 2
    assert events[-1]["done"] == len(records)


def test_a_wrong_value_is_refused_before_anything_runs():
    with pytest.raises(OutOfRangeError):
        simulate_sweep(
            load_model("Qwen/Qwen3-8B"), load_gpu("A10"), synthetic_workload(1), {"block_size": [16, 0]},
            on_event=lambda event: pytest.fail("it ran"),
        )  # fmt: skip


@pytest.fixture
def session(tmp_path):
    traffic = synthetic_workload(4, input_lengths=60, output_lengths=20, seed=1)
    with labkit.Session("Qwen/Qwen3-8B", "A10", traffic, store=tmp_path / "runs.sqlite3") as session:
        yield session


def test_a_sessions_sweep_keeps_its_records_and_says_what_does_not_fit(session):
    events = []
    records = session.simulate_sweep(GRID, on_event=events.append)
    assert [(record.config.max_num_seqs, record.config.max_model_len) for record in records] == [
        (seqs, length) for seqs in GRID["max_num_seqs"] for length in GRID["max_model_len"][:2]
    ]
    assert session.records() == records
    assert {run.run_id for run in session.store.list_runs()} == {record.run_id for record in records}
    assert records[0] == session.store.get(records[0].run_id)
    assert [event["done"] for event in events if event["type"] == "progress"] == list(range(7))
    said = [event["message"] for event in events if event["type"] == "log"]
    assert len(said) == 2
    assert "length 1,000,000, seqs 1: Qwen/Qwen3-8B does not fit A10" in said[0]


def test_a_sessions_sweep_is_cancelled_and_can_be_begun_again(session):
    def cancel_after_two(event):
        if event["type"] == "progress" and event["done"] == 2:
            session.cancel()

    records = session.simulate_sweep(GRID, on_event=cancel_after_two)
    assert 2 <= len(records) <= 3
    assert len(session.simulate_sweep({"max_model_len": [128, 256]})) == 2
    with pytest.raises(UnknownNameError):
        session.simulate_sweep({"no_such_knob": [1]})
