"""The run store by its rules: nothing acknowledged is lost, nothing foreign is touched, every refusal says why."""

import contextlib
import dataclasses
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import sqlalchemy as sa
from example_runs import example_record, example_requests, example_steps

from labkit.errors import StoreError
from labkit.experiments.store import RunStore
from labkit.experiments.store_tables import network_file_system, store_url


def running_record(**changes):
    return example_record(requests=(), steps=(), status="running", **changes)


def test_a_saved_run_comes_back_equal(store):
    record = example_record()
    store.save(record)
    assert store.get("run-1") == record
    assert RunStore(store.location).get("run-1") == record


def test_another_database_url_gives_the_same(tmp_path):
    store = RunStore(f"sqlite:///{tmp_path}/ein Ordner ü.db")
    store.save(example_record())
    assert store.get("run-1") == example_record()


def test_default_store_is_in_labkit_home(monkeypatch, tmp_path):
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path / "with space ü"))
    store = RunStore()
    assert store.location == str(tmp_path / "with space ü" / "runs.sqlite3")
    assert store.list_runs() == ()


def test_without_labkit_home_the_users_data_folder_is_taken(monkeypatch, tmp_path):
    monkeypatch.delenv("LABKIT_HOME")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert store_url(None).database == str(tmp_path / "labkit" / "runs.sqlite3")


def test_list_is_newest_first_and_carries_no_rows(store):
    store.save(example_record("old", created="2026-01-01T00:00:00Z"))
    store.save(example_record("new", created="2026-02-01T00:00:00Z"))
    listed = store.list_runs()
    assert [run.run_id for run in listed] == ["new", "old"]
    assert listed[0].record.requests == ()
    assert listed[0].record.config == example_record().config


def test_runs_of_one_second_are_listed_by_when_they_ended(store):
    for run_id in ("b", "c", "a", "d"):
        store.save(example_record(run_id, created="2026-01-01T00:00:00Z"))
    assert [run.run_id for run in store.list_runs()] == ["d", "a", "c", "b"]
    store.set_note("c", "read again")
    assert [run.run_id for run in store.list_runs()] == ["d", "a", "c", "b"]


def test_rows_are_readable_while_the_run_is_written(store):
    writer = store.begin(running_record())
    writer.append(requests=example_requests(2), steps=example_steps(3))
    writer.append(steps=example_steps(2, first=3))
    record = RunStore(store.location).get("run-1")
    assert record.status == "running"
    assert record.requests == example_requests(2)
    assert record.steps == example_steps(5)
    writer.finish(example_record(num_requests=2, num_steps=5))
    assert store.get("run-1") == example_record(num_requests=2, num_steps=5)


def test_states_only_go_forward(store):
    writer = store.begin(running_record())
    writer.finish(example_record(status="cancelled"))
    writer.finish(example_record(status="cancelled"))
    with pytest.raises(StoreError, match="already ended as cancelled"):
        writer.finish(example_record(status="finished"))
    with pytest.raises(StoreError, match="already ended"):
        writer.append(steps=example_steps(1))
    with pytest.raises(StoreError, match="cannot end as 'running'"):
        writer.finish(running_record())
    assert store.get("run-1").status == "cancelled"


def test_the_same_id_twice_is_refused_and_the_first_stays(store):
    store.save(example_record(note="first"))
    with pytest.raises(StoreError, match="already"):
        store.save(example_record(note="second"))
    assert store.get("run-1").note == "first"


def test_unknown_run_names_itself(store):
    for call in (store.get, store.delete, store.restore, store.lock):
        with pytest.raises(StoreError, match="no run 'nothing'"):
            call("nothing")


def test_user_edits_survive_the_end_of_the_run(store):
    writer = store.begin(running_record())
    store.rename("run-1", "my name")
    store.set_note("run-1", "my note")
    writer.finish(example_record())
    assert (store.get("run-1").name, store.get("run-1").note) == ("my name", "my note")


def test_delete_restore_lock_and_trash(store):
    store.save(example_record())
    store.lock("run-1")
    with pytest.raises(StoreError, match="locked"):
        store.delete("run-1")
    store.lock("run-1", False)
    store.delete("run-1")
    assert store.list_runs() == ()
    assert [run.run_id for run in store.list_runs(trashed=True)] == ["run-1"]
    store.restore("run-1")
    assert store.get("run-1") == example_record()
    store.delete("run-1")
    assert store.empty_trash() == 1
    with pytest.raises(StoreError):
        store.get("run-1")
    assert store.check() == ()


def test_a_run_that_is_being_written_cannot_be_deleted(store):
    store.begin(running_record())
    with pytest.raises(StoreError, match="still running"):
        store.delete("run-1")


def test_run_of_a_dead_writer_is_unfinished_and_keeps_its_rows(store, tmp_path):
    code = (
        "import sys, os; sys.path.insert(0, sys.argv[2])\n"
        "from example_runs import *\nfrom labkit.experiments.store import RunStore\n"
        "writer = RunStore(sys.argv[1]).begin(example_record(requests=(), steps=()))\n"
        "writer.append(example_requests(2), example_steps(3))\nos.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, store.location, os.path.dirname(__file__)], check=False)
    assert done.returncode == -9
    (listed,) = store.list_runs()
    assert listed.status == "unfinished"
    record = store.get("run-1")
    assert (record.status, record.requests, record.steps) == ("unfinished", example_requests(2), example_steps(3))
    store.delete("run-1")


def test_reused_process_id_is_not_taken_for_the_writer(store):
    store.begin(running_record())
    with store._writing("test") as connection:
        connection.exec_driver_sql("UPDATE runs SET writer_started = writer_started - 1")
    assert store.list_runs()[0].status == "unfinished"


def test_writer_on_another_machine_is_believed_until_it_falls_silent(store):
    store.begin(running_record())
    with store._writing("test") as connection:
        connection.exec_driver_sql("UPDATE runs SET writer_host = 'elsewhere'")
    assert store.list_runs()[0].status == "running"
    with store._writing("test") as connection:
        connection.exec_driver_sql("UPDATE runs SET updated_at = updated_at - 3600")
    assert store.list_runs()[0].status == "unfinished"


def test_store_of_a_newer_schema_is_refused_and_not_edited(store):
    store.save(example_record())
    with store._writing("test") as connection:
        connection.exec_driver_sql("UPDATE labkit_meta SET value = '99'")
    before = Path(store.location).read_bytes()
    with pytest.raises(StoreError, match=r"newer labkit.*schema 99.*schema 1"):
        RunStore(store.location)
    assert Path(store.location).read_bytes() == before


def test_foreign_database_is_refused_and_not_edited(tmp_path):
    path = tmp_path / "other.db"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE recipes (name TEXT)")
    connection.commit()
    connection.close()
    before = path.read_bytes()
    with pytest.raises(StoreError, match="another program's"):
        RunStore(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "content", [b"not a database at all, but long enough" * 20, b"SQLite format 3\0" + b"\xff" * 4080]
)
def test_damaged_file_is_named_and_left_alone(tmp_path, content):
    path = tmp_path / "damaged.db"
    path.write_bytes(content)
    with pytest.raises(StoreError, match=r"damaged\.db is damaged and was left as it is"):
        RunStore(path)
    assert path.read_bytes() == content


def test_damage_in_the_middle_names_the_file_and_changes_nothing(store):
    for index in range(20):
        store.save(example_record(f"run-{index}", num_steps=200))
    damaged = bytearray(Path(store.location).read_bytes())
    for page in range(2, len(damaged) // 4096):
        damaged[page * 4096 : page * 4096 + 64] = b"\xde" * 64
    Path(store.location).write_bytes(damaged)
    with pytest.raises(StoreError, match="left as it is"):
        RunStore(store.location).list_runs()
    assert Path(store.location).read_bytes() == bytes(damaged)


def test_one_damaged_run_leaves_the_others_readable(store):
    store.save(example_record("good"))
    store.save(example_record("bad"))
    with store._writing("test") as connection:
        connection.exec_driver_sql("UPDATE run_rows SET payload = '[[1, 2' WHERE run_id = 'bad' AND kind = 'step'")
    with pytest.raises(StoreError, match=r"run bad in .* cannot be read and was left"):
        store.get("bad")
    assert store.get("good") == example_record("good")
    (problem,) = store.check()
    assert "bad" in problem


def test_field_of_a_newer_labkit_is_named(store):
    store.save(example_record())
    head = json.loads(sqlite3.connect(store.location).execute("SELECT head FROM runs").fetchone()[0])
    head["record"]["flux_capacity"] = 3
    with store._writing("test") as connection:
        connection.execute(sa.text("UPDATE runs SET head = :head"), {"head": json.dumps(head)})
    with pytest.raises(StoreError, match="flux_capacity"):
        store.get("run-1")


def test_a_run_of_another_version_hides_no_other_from_the_list(store):
    store.save(example_record("good"))
    store.save(example_record("other"))
    with store._writing("test") as connection:
        connection.exec_driver_sql("UPDATE runs SET head = '{\"format\": \"old\"}' WHERE run_id = 'other'")
    assert [run.run_id for run in store.list_runs()] == ["good"]
    (sentence,) = store.unreadable()
    assert "run other in" in sentence
    assert "cannot be read and was left" in sentence


def test_unwritable_folder_says_so(tmp_path):
    blocked = tmp_path / "a file, no folder"
    blocked.write_text("")
    with pytest.raises(StoreError, match=r"(?s)cannot open.*folder that you may write to.*turn: store"):
        RunStore(blocked / "runs.sqlite3")


@pytest.mark.parametrize("is_own", [True, False])
def test_errors_name_what_the_store_was_given_by(monkeypatch, tmp_path, is_own):
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path))
    path, given = tmp_path / "runs.sqlite3", None if is_own else tmp_path / "runs.sqlite3"
    with contextlib.closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE people (name TEXT)")
    found = []
    with pytest.raises(StoreError) as foreign:
        RunStore(given)
    found.append(foreign.value)
    path.write_bytes(b"no database at all" * 100)
    with pytest.raises(StoreError) as damaged:
        RunStore(given)
    found.append(damaged.value)
    path.unlink()
    store = RunStore(given)
    found.append(store._explain("save a run", sqlite3.OperationalError("database or disk is full")))
    found.append(store._explain("save a run", OSError("Permission denied")))
    with store._writing("test") as connection:
        connection.exec_driver_sql("UPDATE labkit_meta SET value = '99'")
    with pytest.raises(StoreError) as newer:
        RunStore(given)
    found.append(newer.value)
    assert [error.knob for error in found] == ["LABKIT_HOME" if is_own else "store"] * 5
    with store._writing("test") as connection:
        connection.exec_driver_sql("UPDATE labkit_meta SET value = '1'")
    with pytest.raises(StoreError) as missing:
        store.get("nowhere")
    assert missing.value.works == ("an id from `labkit runs`" if is_own else
                                   f"an id from `labkit runs --store {path}`")  # fmt: skip


def test_a_run_that_was_begun_here_is_ended_by_saving_it(store):
    store.begin(running_record())
    store.save(example_record())
    assert store.get("run-1") == example_record()
    with pytest.raises(StoreError, match="is in the store already"):
        store.save(example_record(note="another"))


def test_a_run_that_another_process_is_writing_is_not_ended_by_saving_one_of_its_id(store):
    store.begin(running_record())
    with store._writing("test") as connection:
        connection.exec_driver_sql("UPDATE runs SET writer_host = 'another'")
    with pytest.raises(StoreError, match="is in the store already"):
        store.save(example_record())


def test_what_is_damaged_is_told_and_the_others_are_read(store):
    for name in ("good", "rows", "head"):
        store.save(example_record(name))
    with store._writing("test") as connection:
        connection.exec_driver_sql("UPDATE run_rows SET payload = '[[1, 2' WHERE run_id = 'rows' AND kind = 'step'")
        connection.exec_driver_sql("UPDATE runs SET head = '{}' WHERE run_id = 'head'")
    told = []
    assert [run.run_id for run in store.get_readable(["rows", "good", "head"], told.append)] == ["good"]
    assert [sentence.split(" in ")[0] for sentence in told] == ["run rows", "run head"]
    with pytest.raises(StoreError, match="no run 'nowhere'"):
        list(store.get_readable(["nowhere"], told.append))


def test_a_run_that_cannot_be_read_can_be_deleted(store):
    store.save(example_record())
    with store._writing("test") as connection:
        connection.exec_driver_sql("UPDATE runs SET head = '{}'")
    store.delete("run-1")
    assert (store.num_trashed(), store.unreadable()) == (1, ())
    assert store.empty_trash() == 1
    assert store.num_trashed() == 0


def test_unknown_driver_and_broken_url():
    with pytest.raises(StoreError, match="nosuchdatabase"):
        RunStore("nosuchdatabase://host/name")
    with pytest.raises(StoreError, match="not a database URL"):
        RunStore("://")


def test_lock_held_too_long_is_said_and_the_rows_go_with_the_next_batch(store, monkeypatch):
    monkeypatch.setattr("labkit.experiments.store_tables.BUSY_TIMEOUT_MS", 50)
    patient = RunStore(store.location)
    writer = patient.begin(running_record())
    holder = sqlite3.connect(store.location, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreError, match="another process held its lock"):
        writer.append(steps=example_steps(2))
    holder.execute("ROLLBACK")
    holder.close()
    writer.append(steps=example_steps(1, first=2))
    assert patient.get("run-1").steps == example_steps(3)


def test_threads_of_one_process_share_a_store(store):
    def work(name):
        writer = store.begin(dataclasses.replace(running_record(), run_id=name))
        writer.append(steps=example_steps(2))
        writer.finish(example_record(name))

    threads = [threading.Thread(target=work, args=(f"run-{index}",)) for index in range(6)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert {run.run_id for run in store.list_runs()} == {f"run-{index}" for index in range(6)}
    assert all(run.status == "finished" for run in store.list_runs())


def test_no_descriptor_stays_open(store):
    store.save(example_record())
    store.list_runs()
    targets = [os.readlink(f"/proc/self/fd/{entry}") for entry in os.listdir("/proc/self/fd") if _is_link(entry)]
    assert store.location not in targets


def _is_link(entry):
    return os.path.islink(f"/proc/self/fd/{entry}")


def test_network_file_system_is_found_and_warned_of(monkeypatch, tmp_path):
    entry = type("Entry", (), {"mountpoint": str(tmp_path), "fstype": "nfs4"})
    monkeypatch.setattr("psutil.disk_partitions", lambda all: [entry])
    assert network_file_system(tmp_path / "x") == "nfs4"
    with pytest.warns(UserWarning, match="nfs4"):
        store = RunStore(tmp_path / "runs.sqlite3")
    assert "locks are not reliable" in store.warnings[0]


def test_copied_store_opens(store, tmp_path):
    store.save(example_record())
    shutil.copy(store.location, tmp_path / "copy.db")
    assert RunStore(tmp_path / "copy.db").get("run-1") == example_record()


def test_rollback_journal_and_full_synchronisation(store):
    with store._writing("test") as connection:
        pragmas = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in ("journal_mode", "synchronous")
        }
    assert pragmas == {"journal_mode": "truncate", "synchronous": 2}


@pytest.fixture
def commits_report_failure(store, monkeypatch):
    """Turns on and off that every commit of the store happens and then reports an error."""
    dialect = store._engine.dialect
    commit = dialect.do_commit

    def commit_and_fail(connection):
        commit(connection)
        raise sqlite3.OperationalError("disk I/O error")

    return lambda failing: monkeypatch.setattr(dialect, "do_commit", commit_and_fail if failing else commit)


def test_end_that_was_committed_in_spite_of_an_error_counts_once(store, commits_report_failure):
    writer = store.begin(running_record())
    commits_report_failure(True)
    with pytest.raises(StoreError, match="disk I/O error"):
        writer.finish(example_record())
    commits_report_failure(False)
    writer.finish(example_record())
    assert store.get("run-1") == example_record()


def test_rows_that_were_committed_in_spite_of_an_error_are_not_doubled(store, commits_report_failure):
    writer = store.begin(running_record())
    commits_report_failure(True)
    with pytest.raises(StoreError, match="disk I/O error"):
        writer.append(steps=example_steps(2))
    commits_report_failure(False)
    writer.append(steps=example_steps(1, first=2))
    assert store.get("run-1").steps == example_steps(3)
