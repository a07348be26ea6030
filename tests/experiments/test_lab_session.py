"""The session around a fake backend: plans, runs, Cancel, deaths, a full store; it can always be used again."""

import dataclasses
import sqlite3
import threading

import pytest
from example_runs import example_workload

from labkit.errors import (
    DoesNotFitError,
    LabkitError,
    OutOfRangeError,
    StoreError,
    UnknownNameError,
    UnsupportedError,
    WorkerError,
)
from labkit.experiments.lab_session import LabSession
from labkit.experiments.run import RunOptions
from labkit.experiments.runner import LocalRunner
from labkit.experiments.store import RunStore, RunWriter
from labkit.experiments.worker import Worker
from labkit.specs import synthetic_workload
from labkit.specs.engine_config import EngineConfig

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.fixture
def session(tmp_path):
    runner = LocalRunner(Worker("fake_backend:FakeBackend"))
    session = LabSession(MODEL, "cpu", example_workload(), store=tmp_path / "runs.sqlite3", runner=runner)
    yield session
    session.close()


def named(name, num_requests=4, output_tokens=4):
    return dataclasses.replace(example_workload(num_requests, output_tokens), name=name)


def test_run_gives_a_complete_record_that_the_store_has_too(session):
    events = []
    record = session.run(EngineConfig(block_size=32), on_event=events.append)
    assert record.status == "finished"
    assert record.name == "block 32"
    assert [row.request_id for row in record.requests] == [0, 1, 2, 3]
    assert all(row.output_tokens == 4 and row.finish_reason == "length" for row in record.requests)
    assert len(record.steps) == 4
    assert record.config == EngineConfig(block_size=32)
    assert record.plan.config.max_model_len is not None
    assert record.measured.activation_bytes == 77
    assert sum(record.measured.parts().values()) == record.plan.breakdown.total_bytes
    assert record.counters.method.startswith("simulated")
    assert record.counters.card == "H100 SXM"
    assert record.energy_j == 2.5
    assert record.workload["licence"] == "Apache-2.0"
    assert session.store.get(record.run_id) == record
    assert session.records() == (record,)
    kinds = [event["type"] for event in events]
    assert kinds[-1] == "done"
    assert {"status", "progress", "step"} <= set(kinds)
    assert "rows" not in kinds


def test_weights_are_loaded_once_for_many_configurations(session):
    for block_size in (8, 16, 32):
        session.run(block_size=block_size)
    assert session._runner.worker.generation == 1
    assert sorted(run.name for run in session.store.list_runs()) == ["block 32", "block 8", "starting settings"]
    session.run(dtype="bfloat16")
    assert len(session.store.list_runs()) == 4


def test_plan_follows_the_chosen_card_and_run_says_that_it_is_the_cpu(tmp_path):
    runner = LocalRunner(Worker("fake_backend:FakeBackend"))
    with LabSession(MODEL, "H200", example_workload(), store=tmp_path / "s.db", runner=runner) as session:
        assert session.plan().gpu.name == "H200"
        events = []
        record = session.run(on_event=events.append)
    assert record.gpu.is_cpu
    assert record.counters.card == "H200"
    assert any("nothing of it is measured on H200" in event.get("message", "") for event in events)


def test_bad_knobs_and_missing_traffic_are_said_before_anything_runs(session, tmp_path):
    with pytest.raises(UnknownNameError, match="block_size"):
        session.plan(blok_size=3)
    with pytest.raises(OutOfRangeError, match="block_size"):
        session.run(block_size=-1)
    with LabSession(MODEL, "cpu", store=session.store) as without, pytest.raises(LabkitError, match="no traffic"):
        without.run()
    with pytest.raises(OutOfRangeError, match="arrival_scale"):
        RunOptions(arrival_scale=-1)
    assert session.store.list_runs() == ()


@pytest.mark.parametrize("gib", [0.05, 0.6])
def test_the_memory_that_would_work_works_and_less_does_not(session, gib):
    with pytest.raises(DoesNotFitError) as caught:
        session.run(cpu_memory_gib=gib)
    enough = float(caught.value.works.split(",")[0].removeprefix("cpu_memory_gib = "))
    assert session.run_plan(cpu_memory_gib=enough).verdict == "fits"
    assert session.run_plan(cpu_memory_gib=enough - 0.01).verdict == "does not fit"
    if gib == 0.6:
        largest = int(caught.value.works.rpartition(" = ")[2])
        assert session.run_plan(cpu_memory_gib=gib, max_model_len=largest).verdict == "fits"
        assert session.run_plan(cpu_memory_gib=gib, max_model_len=largest + 16).verdict == "does not fit"


def test_what_does_not_fit_is_refused_with_what_would_work(session):
    events = []
    with pytest.raises(DoesNotFitError, match=r"needed.*available.*would work.*turn: cpu_memory_gib"):
        session.run(cpu_memory_gib=0.05, on_event=events.append)
    assert events[-1]["type"] == "error"
    assert events[-1]["knob"] == "cpu_memory_gib"
    assert session.store.list_runs() == ()


@pytest.mark.parametrize(
    ("fault", "error", "words"),
    [
        ("kill@step", WorkerError, "SIGKILL"),
        ("segv@run", WorkerError, "SIGSEGV"),
        ("memory@step", DoesNotFitError, "ran out of memory"),
        ("error@run", WorkerError, "broken"),
    ],
)
def test_failed_run_is_kept_as_failed_and_the_session_goes_on(session, fault, error, words):
    events = []
    with pytest.raises(error, match=words):
        session.run(workload=named(f"fault:{fault}"), on_event=events.append)
    assert events[-1]["type"] == "error"
    (stored,) = session.store.list_runs()
    assert stored.status == "failed"
    assert words in stored.record.error
    assert session.run().status == "finished"


@pytest.mark.parametrize("phase", ["configure", "run"])
def test_death_between_two_commands_is_a_death_and_not_a_worker_without_weights(session, phase):
    def kill(event):
        if event["type"] == "status" and event["phase"] == phase:
            session._runner.worker._process.kill()
            session._runner.worker._process.wait()

    with pytest.raises(WorkerError, match=r"died (while|during) .*SIGKILL"):
        session.run(on_event=kill)
    assert session.run().status == "finished"


def test_rows_before_a_death_are_kept(session):
    with pytest.raises(WorkerError):
        session.run(workload=named("fault:kill@step", output_tokens=50))
    (stored,) = session.store.list_runs()
    assert len(session.store.get(stored.run_id).steps) == 2


def test_cancel_keeps_the_finished_part(session):
    def stop(event):
        if event["type"] == "step" and event["time_s"] > 0.1:
            session.cancel()

    record = session.run(workload=named("long", 2, 100_000), on_event=stop)
    assert record.status == "cancelled"
    assert len(record.steps) > 3
    assert {row.finish_reason for row in record.requests} == {"cancelled"}
    assert session.store.get(record.run_id) == record
    assert session.run().status == "finished"


def test_cancel_of_a_deaf_worker_keeps_what_had_arrived(session):
    def stop(event):
        if event["type"] == "step" and event["time_s"] > 0.05:
            session.cancel()

    record = session.run(workload=named("deaf", 1, 100_000), on_event=stop)
    assert record.status == "cancelled"
    assert record.steps
    assert session.run(workload=named("after", 1, 2)).status == "finished"


def test_interrupt_is_kept_as_cancelled(session):
    def interrupt(event):
        if event["type"] == "step":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.run(workload=named("long", 2, 100_000), on_event=interrupt)
    assert session.store.list_runs()[0].status == "cancelled"
    assert session.run().status == "finished"


def test_second_run_at_the_same_time_is_refused(session):
    refused = []

    def again(event):
        if event["type"] == "step" and not refused:
            with pytest.raises(WorkerError, match="running already") as caught:
                session.run()
            refused.append(caught.value)

    session.run(on_event=again)
    assert refused
    assert not session.is_running


def test_run_in_another_thread_as_a_panel_does(session):
    done = []
    thread = threading.Thread(target=lambda: done.append(session.run()))
    thread.start()
    thread.join()
    assert done[0].status == "finished"


def test_store_that_is_locked_during_the_run_loses_nothing(session, monkeypatch):
    monkeypatch.setattr("labkit.experiments.store_tables.BUSY_TIMEOUT_MS", 50)
    monkeypatch.setattr("labkit.experiments.lab_session.STORE_EVERY_S", 0.0)
    session.store = RunStore(session.store.location)
    holder, events = sqlite3.connect(session.store.location, isolation_level=None), []

    def hold(event):
        events.append(event)
        if event["type"] == "step" and sum(entry["type"] == "step" for entry in events) == 2:
            holder.execute("BEGIN IMMEDIATE")
        if event["type"] == "log" and holder.in_transaction:
            holder.execute("ROLLBACK")

    record = session.run(workload=named("long", 2, 20), on_event=hold)
    assert any("another process held its lock" in event.get("message", "") for event in events)
    assert session.store.get(record.run_id) == record


def test_store_that_refuses_the_end_says_so_and_the_record_stays(session, monkeypatch, tmp_path):
    def refuse(*_):
        raise StoreError("the disk is full", works="freeing space")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("labkit.experiments.store.RunWriter.finish", refuse)
    with pytest.raises(StoreError, match="disk is full"):
        session.run()
    (record,) = session.records()
    assert record.status == "finished"
    assert len(record.requests) == 4


def test_a_run_that_its_store_has_no_room_for_is_kept_elsewhere_and_can_be_saved_later(session, monkeypatch, tmp_path):
    finish, refused = RunWriter.finish, []

    def refuse_once(writer, record):
        if not refused:
            refused.append(record)
            raise StoreError("the disk is full", works="freeing space", knob="store")
        finish(writer, record)

    monkeypatch.setattr("labkit.experiments.store.RunWriter.finish", refuse_once)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    with pytest.raises(StoreError) as caught:
        session.run()
    (record,), (path,) = session.records(), (tmp_path / "temporary").glob("*/*.sqlite3")
    assert RunStore(path).get(record.run_id) == record
    assert f"labkit runs --store {path}" in caught.value.works
    assert caught.value.knob == "store"
    # There is room again.
    session.save(record)
    assert session.store.get(record.run_id) == record


def test_where_not_even_temporary_files_have_room_the_error_says_that_memory_is_all_there_is(
    session, monkeypatch, tmp_path
):
    def refuse(*_):
        raise StoreError("the disk is full")

    monkeypatch.setattr("labkit.experiments.store.RunWriter.finish", refuse)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(StoreError, match=r"nowhere but in this session's records\(\)") as caught:
        session.run()
    assert caught.value.works.startswith("session.save(record)")
    assert session.records()[0].status == "finished"
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("labkit.experiments.store.RunStore.save", refuse)
    with pytest.raises(StoreError, match="nowhere but"):
        session.run()
    assert not list(tmp_path.glob("labkit-run-*")), "what could not be kept leaves nothing behind"


def test_close_twice(session):
    session.run()
    session.close()
    session.close()
    assert session._runner.worker.pid is None


def test_a_model_that_the_decoder_lacks_is_refused_before_anything_is_loaded(tmp_path):
    traffic = synthetic_workload(1, 4, 1)
    with (
        LabSession("deepseek-ai/DeepSeek-V3", "cpu", traffic, store=tmp_path / "runs.sqlite3") as session,
        pytest.raises(UnsupportedError, match="mla layers"),
    ):
        session.run()


def test_weights_beyond_the_budget_are_named_with_the_memory_that_works(tmp_path):
    traffic = synthetic_workload(1, 4, 1)
    with (
        LabSession("Qwen/Qwen3-0.6B", "cpu", traffic, store=tmp_path / "runs.sqlite3") as session,
        pytest.raises(DoesNotFitError, match="weights and activations") as refused,
    ):
        session.run(max_model_len=256)
    # 0.6 B parameters of 4 B each, and a GiB over the 92 % that utilization leaves of 2 GiB.
    assert "GiB before any KV cache" in refused.value.needed
    assert refused.value.available == "1.84 GiB within utilization"
    assert session.plan(max_model_len=256, cpu_memory_gib=float(refused.value.works.split(" = ")[1])).verdict == "fits"
