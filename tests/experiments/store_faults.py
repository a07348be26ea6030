"""Faults against the run store: kill -9 at random times, failing and torn writes; prints what was lost as JSON.

`python store_faults.py all --count 500 --places 60 --out results/store-faults.json` does everything; `kills` only
kills, `injected` one kind of fault, and runs under the strace of `strace_command`. Writers are forks of this
process: the store keeps no connection between two calls, so nothing is carried over.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from example_runs import example_record, example_requests, example_steps

from labkit.errors import StoreError
from labkit.experiments.store import RunStore
from labkit.results import at_least, at_most, write_results

FIRST_FAULT = 100
# Fault → what strace injects, and how the writer must end.
FAULTS = {
    "disk full": (f"pwrite64:error=ENOSPC:when={FIRST_FAULT}+", "refused"),
    "write error": (f"pwrite64:error=EIO:when={FIRST_FAULT}", "refused"),
    "sync error": (f"fdatasync:error=EIO:when={FIRST_FAULT}+", "refused"),
    "power cut at a sync": (f"fdatasync:signal=SIGKILL:when={FIRST_FAULT}", "killed"),
    "power cut at a write": (f"pwrite64:signal=SIGKILL:when={FIRST_FAULT}", "killed"),
}


def strace_command(inject: str) -> list[str]:
    """strace that injects `inject` into what follows."""
    return ["strace", "-f", "-o", os.devnull, "-e", "trace=pwrite64,fdatasync", "-e", f"inject={inject}"]


def under_strace(fault: str, places: int) -> dict:
    """The result of this script's `injected` mode under the strace of `fault`."""
    script = [sys.executable, str(Path(__file__)), "injected", "--places", str(places)]
    done = subprocess.run(
        [*strace_command(FAULTS[fault][0]), *script], capture_output=True, text=True, timeout=600, check=False
    )
    if not done.stdout.startswith("{"):
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout)


def write_runs(path: Path, prefix: str, acknowledge, count: int = 10**9) -> None:
    """Write runs until killed; every line given to `acknowledge` is about something the store has confirmed."""
    store = RunStore(path)
    for index in range(count):
        run_id = f"{prefix}-{index}"
        if index % 3 == 2:
            store.save(example_record(run_id))
            acknowledge(f"end {run_id} finished 3 5")
            continue
        writer = store.begin(example_record(run_id, requests=(), steps=()))
        acknowledge(f"begin {run_id}")
        for batch in range(3):
            writer.append(example_requests(1, batch), example_steps(2, 2 * batch))
            acknowledge(f"rows {run_id} {batch + 1} {2 * batch + 2}")
        status = ("finished", "cancelled")[index % 2]
        writer.finish(example_record(run_id, num_requests=3, num_steps=6, status=status))
        acknowledge(f"end {run_id} {status} 3 6")


def lost(store: RunStore, acknowledged: list[str]) -> list[str]:
    """What the store confirmed and does not have; one sentence each."""
    expected: dict[str, tuple[str, int, int]] = {}
    for line in acknowledged:
        kind, run_id, *rest = line.split()
        if kind == "begin":
            expected[run_id] = ("running", 0, 0)
        elif kind == "rows":
            expected[run_id] = ("running", int(rest[0]), int(rest[1]))
        else:
            expected[run_id] = (rest[0], int(rest[1]), int(rest[2]))
    problems = []
    present = [run.run_id for run in store.list_runs()]
    problems += [f"{run_id} is there twice" for run_id in set(present) if present.count(run_id) > 1]
    for run_id, (status, requests, steps) in expected.items():
        if run_id not in present:
            problems.append(f"{run_id} is missing")
            continue
        record = store.get(run_id)
        if len(record.requests) < requests or len(record.steps) < steps:
            problems.append(f"{run_id} lacks rows: {len(record.requests)}/{requests}, {len(record.steps)}/{steps}")
        if status != "running" and record.status != status:
            problems.append(f"{run_id} is {record.status}, was acknowledged as {status}")
        if record.steps != example_steps(len(record.steps)):
            problems.append(f"{run_id} has rows twice or out of order")
    return problems


def fork_writer(path: Path, prefix: str, count: int = 10**9) -> tuple[int, int]:
    """A writing child and the read end of its acknowledgements."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        write_runs(path, prefix, lambda line: os.write(write_end, f"{line}\n".encode()), count)
        os._exit(0)
    os.close(write_end)
    return pid, read_end


def drain(read_end: int) -> list[str]:
    """Every acknowledgement that was written whole."""
    *lines, _cut = drain_bytes(read_end).decode().split("\n")
    return lines


def drain_bytes(read_end: int) -> bytes:
    """All that is left in the pipe."""
    chunks = []
    while chunk := os.read(read_end, 1 << 16):
        chunks.append(chunk)
    os.close(read_end)
    return b"".join(chunks)


def read_lines(read_end: int, count: int) -> bytes:
    """What the pipe gives until it has given `count` lines."""
    data = b""
    while data.count(b"\n") < count:
        data += os.read(read_end, 1 << 12)
    return data


def kill_cycles(count: int, seed: int) -> dict:
    """`count` writers killed at random times, twenty to a store; each is checked at once."""
    rng = random.Random(seed)
    problems: list[str] = []
    num_acknowledged, slowest_open_s = 0, 0.0
    with tempfile.TemporaryDirectory(prefix="labkit-faults-") as folder:
        for cycle in range(count):
            path = Path(folder) / f"runs-{cycle // 20}.sqlite3"
            pid, read_end = fork_writer(path, f"c{cycle}")
            # A number of operations and a moment inside the next one: as random on a busy machine as on an idle one.
            early = read_lines(read_end, rng.randint(0, 40))
            time.sleep(rng.uniform(0.0, 0.02))
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            *acknowledged, _cut = (early + drain_bytes(read_end)).decode().split("\n")
            num_acknowledged += len(acknowledged)
            start = time.monotonic()
            store = RunStore(path)
            store.list_runs()
            slowest_open_s = max(slowest_open_s, time.monotonic() - start)
            problems += lost(store, acknowledged)
            if cycle % 10 == 9 or cycle == count - 1:
                problems += store.check()
            running = [run.run_id for run in store.list_runs() if run.status == "running"]
            problems += [f"{run_id} of a killed writer still counts as running" for run_id in running]
    return {
        "kills": count,
        "seed": seed,
        "acknowledged_operations": num_acknowledged,
        "problems": problems,
        "slowest_open_s": round(slowest_open_s, 3),
        "sqlite": sqlite3.sqlite_version,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
    }


def injected_faults(places: int) -> dict:
    """One writer for each place of the fault: the k-th write or sync of the store, from the first to `places`.

    strace counts the calls of each process by itself and strikes from call `FIRST_FAULT` on, so a writer that first
    makes n dummy calls meets the fault n calls earlier in its own work. Preparing and checking happen in processes
    of their own, which stay below that count.
    """
    problems: list[str] = []
    outcomes: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="labkit-faults-") as folder:
        for place in range(1, places + 1):
            path = Path(folder) / f"runs-{place}.sqlite3"
            in_fork(lambda path=path: RunStore(path).save(example_record("earlier")))
            before = path.read_bytes()
            acknowledged, outcome = _one_injected(path, Path(folder) / "dummy", FIRST_FAULT - place)
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
            _tear_unsynced_journal(path, before, place)
            found = in_fork(lambda path=path, acknowledged=acknowledged: _after_the_fault(path, acknowledged))
            problems += [f"fault {place}: {problem}" for problem in found]
    return {"places": places, "outcomes": outcomes, "problems": problems}


def in_fork(function) -> list[str]:
    """What `function` returns, run in a process of its own; a failure comes back as a sentence."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        try:
            result = function() or []
        except BaseException as error:
            result = [repr(error)]
        os.write(write_end, json.dumps(result).encode() + b"\n")
        os._exit(0)
    os.close(write_end)
    lines = drain(read_end)
    os.waitpid(pid, 0)
    return json.loads(lines[0])


def _after_the_fault(path: Path, acknowledged: list[str]) -> list[str]:
    store = RunStore(path)
    problems = lost(store, acknowledged) + list(store.check())
    if store.get("earlier") != example_record("earlier"):
        problems.append("the earlier run changed")
    store.save(example_record("second try"))
    return problems


def _one_injected(path: Path, dummy: Path, num_dummy_calls: int) -> tuple[list[str], str]:
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        handle = os.open(dummy, os.O_RDWR | os.O_CREAT)
        for _ in range(num_dummy_calls):
            os.pwrite(handle, b"x", 0)
            os.fdatasync(handle)
        try:
            write_runs(path, "faulty", lambda line: os.write(write_end, f"{line}\n".encode()), count=2)
        except StoreError:
            os._exit(7)
        os._exit(0)
    os.close(write_end)
    acknowledged = drain(read_end)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return acknowledged, "killed"
    return acknowledged, {0: "untouched", 7: "refused"}.get(os.WEXITSTATUS(status), "crashed")


def _tear_unsynced_journal(path: Path, before: bytes, seed: int) -> None:
    """After a power cut before the database was touched, the journal's tail may never have reached the disk."""
    journal = path.with_name(path.name + "-journal")
    if journal.exists() and path.read_bytes() == before and journal.stat().st_size:
        size = journal.stat().st_size
        os.truncate(journal, max(0, size - random.Random(seed).randint(1, 4096)))


def _record(path: Path, result: dict, options: str) -> None:
    injected = result.get("injected", {})
    write_results(
        path,
        command=f"python tests/experiments/store_faults.py {options} --out {path}",
        rows=[result],
        summary={
            "kills": at_least(result.get("kills", 0), 500),
            "injected faults": at_least(sum(found["places"] for found in injected.values()), 100),
            "acknowledged operations lost or double, damaged files": at_most(len(result["problems"]), 0),
            "slowest open after a fault [s]": at_most(result.get("slowest_open_s", 0.0), 2.0),
        },
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=("kills", "injected", "all"))
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--places", type=int, default=20)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.mode == "kills":
        result = kill_cycles(arguments.count, arguments.seed)
    elif arguments.mode == "injected":
        result = injected_faults(arguments.places)
    else:
        result = kill_cycles(arguments.count, arguments.seed)
        result["injected"] = {fault: under_strace(fault, arguments.places) for fault in FAULTS}
        result["problems"] += [text for found in result["injected"].values() for text in found["problems"]]
    print(json.dumps(result, indent=1))
    if arguments.out:
        _record(arguments.out, result, f"{arguments.mode} --count {arguments.count} --places {arguments.places}")
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
