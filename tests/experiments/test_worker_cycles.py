"""The worker as a state machine: 40 cycles of work, faults and Cancel in an order drawn from a printed seed."""

import os
import random
import signal
import threading
import time

import psutil
import pytest
from example_runs import example_plan, example_workload

from labkit.errors import LabkitError
from labkit.experiments.run import RunOptions
from labkit.experiments.runner import LocalRunner, RunJob
from labkit.experiments.worker import Worker

NUM_CYCLES = int(os.environ.get("LABKIT_WORKER_CYCLES", "40"))
SEED = int(os.environ.get("LABKIT_WORKER_SEED", "20261130"))
FAULTS = ("kill", "segv", "exit", "memory", "error", "panic", "header", "pickle", "list", "long")
PLACES = ("load", "configure", "run", "step")


class Machine:
    """One runner under test and what must be true of it after every action."""

    def __init__(self, rng):
        self.rng = rng
        self.runner = LocalRunner(Worker("fake_backend:FakeBackend"))
        self.pids = set()
        self.messages = []
        self.sources = 0

    def job(self, name="plain", source="", num_requests=2, output_tokens=3):
        plan = example_plan()
        self.sources += 1
        model = plan.model.replace(source=source or f"model {self.sources % 3}")
        workload = example_workload(num_requests, output_tokens)
        return RunJob(
            type(plan)(**{**vars(plan), "model": model}),
            type(workload)(**{**vars(workload), "name": name}),
            source or model.source,
            RunOptions(),
        )

    def attempt(self, job, cancel=None, on_event=lambda event: None):
        rows = []
        try:
            answer = self.runner.run(
                job, on_event, lambda requests, steps: rows.extend(requests), cancel or threading.Event()
            )
        except LabkitError as error:
            self.messages.append(str(error))
            return "failed", rows
        finally:
            if self.runner.worker.pid:
                self.pids.add(self.runner.worker.pid)
        return answer.status, [*rows, *answer.requests]

    def work(self):
        status, rows = self.attempt(self.job())
        assert status == "finished"
        assert sorted(row.request_id for row in rows) == [0, 1]

    def fault(self):
        place = self.rng.choice(PLACES)
        order = f"fault:{self.rng.choice(FAULTS)}@{place}"
        job = self.job(order, order if place in ("load", "configure") else "")
        assert self.attempt(job)[0] == "failed"

    def cancel(self):
        cancel = threading.Event()
        timer = threading.Timer(self.rng.uniform(0, 0.1), cancel.set)
        timer.start()
        status, rows = self.attempt(self.job(num_requests=2, output_tokens=1000), cancel)
        timer.join()
        # A Cancel before the run began ends as an error of its own class, which a session stores as cancelled.
        assert status in ("cancelled", "failed")
        assert len({row.request_id for row in rows}) == len(rows)

    def idle_death(self):
        pid = self.runner.worker.pid
        if pid:
            os.kill(pid, self.rng.choice((signal.SIGKILL, signal.SIGSEGV)))
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)

    def stop_and_go(self):
        pid = self.runner.worker.pid
        if pid:
            os.kill(pid, signal.SIGSTOP)
            threading.Timer(0.2, os.kill, (pid, signal.SIGCONT)).start()

    def close(self):
        self.runner.close()


def test_forty_cycles_leave_the_worker_usable_and_nothing_behind():
    print("seed", SEED)
    rng = random.Random(SEED)
    shared_memory, descriptors = sorted(os.listdir("/dev/shm")), len(os.listdir("/proc/self/fd"))
    machine = Machine(rng)
    try:
        for cycle in range(NUM_CYCLES):
            action = rng.choice(
                (machine.fault, machine.fault, machine.cancel, machine.idle_death, machine.stop_and_go, machine.close)
            )
            action()
            machine.work()
            assert all(machine.messages)
            living = [pid for pid in machine.pids if _runs(pid)]
            assert living == [machine.runner.worker.pid], f"cycle {cycle} after {action.__name__}"
    finally:
        machine.close()
    deadline = time.monotonic() + 5
    while any(_runs(pid) for pid in machine.pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in machine.pids if _runs(pid)]
    assert sorted(os.listdir("/dev/shm")) == shared_memory
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def _runs(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_full_shared_memory_changes_nothing():
    """The worker uses no named segment, so a /dev/shm without a free byte does not matter (F8)."""
    free = os.statvfs("/dev/shm")
    size = free.f_bavail * free.f_frsize
    if not os.access("/dev/shm", os.W_OK) or size > 2**28:
        pytest.skip("/dev/shm is not writable or too large to fill here")
    path = f"/dev/shm/labkit-test-{os.getpid()}"
    try:
        with open(path, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, size)
        machine = Machine(random.Random(1))
        machine.work()
        machine.close()
    finally:
        os.unlink(path)
