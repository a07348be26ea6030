"""The run store under fire: full disk, I/O errors, power cuts, kill -9, several writers at once."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from example_runs import example_record
from store_faults import FAULTS, drain, fork_writer, kill_cycles, lost, strace_command, under_strace, write_runs

from labkit.experiments.store import RunStore


def strace_works():
    if shutil.which("strace") is None:
        return False
    probe = [*strace_command(FAULTS["write error"][0]), "true"]
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("fault", FAULTS)
def test_twenty_places_of_each_fault(fault):
    if not strace_works():
        pytest.skip("strace is not installed or may not trace here: F1 to F3 need it")
    result = under_strace(fault, places=20)
    assert result["problems"] == []
    assert result["outcomes"] == {FAULTS[fault][1]: 20}


def test_twenty_kills_lose_nothing():
    result = kill_cycles(20, seed=5)
    assert result["problems"] == []
    assert result["acknowledged_operations"] > 200


def test_the_checker_sees_every_kind_of_loss(store):
    lines = []
    write_runs(Path(store.location), "w", lines.append, count=2)
    assert lost(store, lines) == []
    assert lost(store, [*lines, "begin w-9"]) == ["w-9 is missing"]
    assert lost(store, [*lines, "end w-0 cancelled 3 6"]) == ["w-0 is finished, was acknowledged as cancelled"]
    (problem,) = lost(store, [*lines, "end w-0 finished 4 6"])
    assert "lacks rows: 3/4" in problem


def test_four_writers_and_a_reader_agree_on_one_history(tmp_path):
    path = tmp_path / "runs.sqlite3"
    store = RunStore(path)
    store.save(example_record("first"))
    read_ends = []
    for index in range(4):
        pid, read_end = fork_writer(path, f"w{index}", 4)
        read_ends.append((pid, read_end))
    seen: dict[str, str] = {}
    backward = []
    while any(os.waitpid(pid, os.WNOHANG) == (0, 0) for pid, _ in read_ends[:1]):
        for run in store.list_runs():
            if seen.get(run.run_id, "running") not in ("running", run.status):
                backward.append((run.run_id, seen[run.run_id], run.status))
            seen[run.run_id] = run.status
    acknowledged = [line for _, read_end in read_ends for line in drain(read_end)]
    for pid, _ in read_ends[1:]:
        os.waitpid(pid, 0)
    assert backward == []
    assert sum(line.startswith("end ") for line in acknowledged) == 16
    assert lost(store, acknowledged) == []
    assert store.check() == ()
    assert len(store.list_runs()) == 17


def test_a_fork_with_an_open_store_writes_beside_its_parent(store):
    store.save(example_record("before"))
    pid = os.fork()
    if pid == 0:
        store.save(example_record("child"))
        os._exit(0)
    store.save(example_record("parent"))
    assert os.waitpid(pid, 0)[1] == 0
    assert {run.run_id for run in store.list_runs()} == {"before", "child", "parent"}
    assert store.check() == ()
