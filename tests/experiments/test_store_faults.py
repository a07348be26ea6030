"""The run store under fire: full disk, I/O errors, power cuts, kill -9, several writers at once."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from example_runs import example_record
from store_faults import drain, fork_writer, lost, write_runs

from labkit.experiments.store import RunStore

SCRIPT = Path(__file__).with_name("store_faults.py")
FAULTS = {
    "disk full": ("pwrite64:error=ENOSPC:when=100+", "refused"),
    "write error": ("pwrite64:error=EIO:when=100", "refused"),
    "sync error": ("fdatasync:error=EIO:when=100+", "refused"),
    "power cut at a sync": ("fdatasync:signal=SIGKILL:when=100", "killed"),
    "power cut at a write": ("pwrite64:signal=SIGKILL:when=100", "killed"),
}


def run_script(*command):
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.startswith("{"), done.stderr[-2000:]
    return json.loads(done.stdout)


def strace_works():
    if shutil.which("strace") is None:
        return False
    probe = [*strace("/dev/null", "pwrite64:error=EIO:when=100"), "true"]
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


def strace(log, inject):
    return ["strace", "-f", "-o", str(log), "-e", "trace=pwrite64,fdatasync", "-e", f"inject={inject}"]


@pytest.mark.parametrize("fault", FAULTS)
def test_twenty_places_of_each_fault(fault, tmp_path):
    if not strace_works():
        pytest.skip("strace is not installed or may not trace here: F1 to F3 need it")
    inject, outcome = FAULTS[fault]
    log = tmp_path / "strace.log"
    result = run_script(*strace(log, inject), sys.executable, str(SCRIPT), "injected", "--places", "20")
    assert result["problems"] == []
    assert result["outcomes"] == {outcome: 20}


def test_twenty_kills_lose_nothing():
    result = run_script(sys.executable, str(SCRIPT), "kills", "--count", "20", "--seed", "5")
    assert result["problems"] == []
    assert result["acknowledged_operations"] > 100


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
