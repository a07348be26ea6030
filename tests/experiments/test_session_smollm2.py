"""The whole way once with the real engine on SmolLM2: load once, configure anew, run, measure, cancel, go on."""

from types import SimpleNamespace

import pytest

import labkit
from labkit.experiments import engine_backend
from labkit.experiments.engine_backend import EngineBackend
from labkit.experiments.run import RunOptions
from labkit.specs import synthetic_workload
from labkit.specs.engine_config import EngineConfig

SMALL = EngineConfig(cpu_memory_gib=0.7, max_model_len=128, max_num_batched_tokens=32, max_num_seqs=4)


@pytest.fixture(scope="module")
def session(smollm2_gguf, tmp_path_factory):
    workload = synthetic_workload(3, 20, 4, seed=1)
    store = tmp_path_factory.mktemp("store") / "runs.sqlite3"
    with labkit.Session(model=str(smollm2_gguf), gpu="cpu", workload=workload, store=store) as session:
        yield session


@pytest.mark.parametrize(
    "changes", [{}, {"block_size": 32, "max_num_batched_tokens": 16}, {"kv_cache_dtype": "fp8", "max_num_seqs": 2}]
)
def test_predicted_is_measured(session, changes):
    record = session.run(SMALL, **changes)
    assert record.status == "finished"
    assert [row.output_tokens for row in record.requests] == [4, 4, 4]
    predicted, measured = record.plan.breakdown.parts(), record.measured.parts()
    for part in ("weights", "kv_cache", "block_tables", "workspace"):
        assert measured[part] == pytest.approx(predicted[part], rel=0.02), part
    assert measured["activation"] == pytest.approx(predicted["activation"], rel=0.10)
    assert sum(measured.values()) == record.measured.total_bytes == sum(predicted.values())
    assert session._runner.worker.generation == 1
    assert session.store.get(record.run_id) == record
    assert record.versions["torch"]
    assert record.energy_j is None


def test_counters_and_memory_say_what_they_are(session, tmp_path):
    """On a CPU: the cache of a card is simulated, memory is the process's, and what only a card has is said."""
    options = RunOptions(report_every_s=0.0, counted_steps=2, snapshot_file=str(tmp_path / "snapshot.pickle"))
    record = session.run(SMALL, options=options)
    assert record.counters.method.startswith("simulated")
    assert record.counters.scope == "attention of a decode step of 3 requests"
    assert record.step_counters is record.nvml is None
    assert "no memory snapshot: torch's allocator keeps no account on a CPU" in record.counter_notes[0]
    assert max(sample.kv_used_bytes for sample in record.memory_timeline) > 0
    assert min(sample.process_bytes for sample in record.memory_timeline) > record.measured.weights_bytes
    assert session.store.get(record.run_id) == record


@pytest.mark.parametrize(
    ("error", "ends"), [(RuntimeError("no kernel"), False), (RuntimeError("CUDA error: illegal access"), True)]
)
def test_a_run_stands_when_counting_fails(monkeypatch, error, ends):
    def fail(*_):
        raise error

    backend = EngineBackend()
    monkeypatch.setattr(engine_backend, "count_decode_steps", fail)
    outcome = SimpleNamespace(fullest_requests=((0, 3),))
    ask = (outcome, RunOptions(counted_steps=1), lambda index: [1, 2], lambda event: None, lambda: False)
    if ends:
        with pytest.raises(RuntimeError):
            backend._counted(*ask)
    else:
        assert backend._counted(*ask).notes == ("not counted: RuntimeError: no kernel",)


def test_weights_are_loaded_once(session):
    session.run(SMALL)
    phases = []
    session.run(SMALL, on_event=lambda event: phases.append(event.get("phase")), block_size=8)
    assert "configure" in phases
    assert "load" not in phases


def test_a_first_run_tells_how_far_its_weights_are(smollm2_gguf, tmp_path):
    """What is told until the worker has its own process is `start`; all that is told of the weights is `load`."""
    workload, events = synthetic_workload(1, 4, 2), []
    with labkit.Session(str(smollm2_gguf), "cpu", workload, store=tmp_path / "runs.sqlite3") as session:
        record = session.run(SMALL, on_event=events.append)
    phases = list(dict.fromkeys(event["phase"] for event in events if "phase" in event))
    assert phases[:4] == ["start", "load", "configure", "run"]
    loads = [event for event in events if event.get("phase") == "load"]
    assert {event["type"] for event in loads} == {"progress"}
    first, *reads, last = loads
    assert (first["done"], first["total"], first["remaining_s"]) == (0, 1, None)
    assert (last["done"], last["total"], last["remaining_s"]) == (1, 1, 0.0)
    assert reads
    for event in reads:
        assert event["unit"] == "bytes"
        assert event["total"] == pytest.approx(record.measured.weights_bytes, rel=0.02)
        assert 0 < event["done"] <= event["total"]
        assert event["remaining_s"] >= 0


def test_cancel_in_the_middle_of_a_real_run(session):
    def stop(event):
        if event["type"] == "step" and event["num_output_tokens"] > 2:
            session.cancel()

    long = synthetic_workload(2, 8, 100, seed=2)
    record = session.run(SMALL, on_event=stop, workload=long, options=RunOptions(report_every_s=0.0))
    assert record.status == "cancelled"
    assert sum(row.output_tokens for row in record.requests) < 200
    assert record.measured is None
    assert session.run(SMALL).status == "finished"
    assert session._runner.worker.generation == 1


def test_catalogue_name_finds_the_installed_weights(smollm2_gguf, tmp_path):
    workload = synthetic_workload(1, 4, 2)
    with labkit.Session("SmolLM2-135M-Instruct", "cpu", workload, store=tmp_path / "runs.sqlite3") as session:
        assert session.run(SMALL).status == "finished"
