"""The worker process: whatever happens to it is said with its cause, and the next call works again."""

import contextlib
import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from example_runs import example_plan, example_workload

from labkit.errors import CancelledError, DoesNotFitError, OutOfRangeError, WorkerError
from labkit.experiments.serialise import to_plain
from labkit.experiments.worker import CANCEL_GRACE_S, DRAIN_S, Worker

FAKE = "fake_backend:FakeBackend"


@pytest.fixture
def worker():
    worker = Worker(FAKE)
    yield worker
    worker.close()


class Events(list):
    def __call__(self, event):
        self.append(event)

    def logs(self):
        return " ".join(event["message"] for event in self if event["type"] == "log")


def run_arguments(name="plain", num_requests=4, output_tokens=4):
    workload = to_plain(example_workload(num_requests, output_tokens))
    return {"workload": {**workload, "name": name}}


def prepare(worker, events):
    worker.call("load", {}, events)
    worker.call("configure", {"plan": to_plain(example_plan())}, events)


def run(worker, events, name="plain", cancel=None, **rest):
    return worker.call("run", run_arguments(name, **rest), events, cancel)


def prepare_and_run(worker, events, order):
    worker.call("load", {"source": order}, events)
    plan = to_plain(example_plan())
    worker.call("configure", {"plan": {**plan, "model": {**plan["model"], "source": order}}}, events)
    run(worker, events, order)


def works_again(worker, events=None):
    events = Events() if events is None else events
    prepare(worker, events)
    answer = run(worker, events)
    return answer["status"] == "finished" and sum(event["type"] == "rows" for event in events) == 4


def test_weights_stay_loaded_between_configurations_and_runs(worker):
    events = Events()
    first = worker.call("load", {}, events)
    for _ in range(3):
        worker.call("configure", {"plan": to_plain(example_plan())}, events)
        assert run(worker, events)["status"] == "finished"
    assert first["times_loaded"] == 1
    assert worker.pid == first["pid"]
    assert worker.generation == 1


DEATHS = {
    "kill": "SIGKILL",
    "segv": "SIGSEGV",
    "exit": "exit code 3",
    "pickle": "not JSON",
    "long": "2,147,483,648 bytes",
    "half": "middle of a message",
    "header": "SIGKILL",
    "list": "without a type",
    "hang": "said nothing|Cancel",
}


@pytest.mark.parametrize("place", ["load", "configure", "run", "step"])
@pytest.mark.parametrize("death", ["kill", "segv", "exit"])
def test_death_at_every_place_is_named_and_survived(worker, death, place):
    order, events = f"fault:{death}@{place}", Events()
    with pytest.raises(WorkerError, match=rf"died (while|during) .*{DEATHS[death]}") as caught:
        prepare_and_run(worker, events, order)
    assert caught.value.works
    assert works_again(worker)


@pytest.mark.parametrize("nonsense", ["pickle", "long", "half", "header", "list"])
def test_nonsense_on_the_pipe_ends_the_worker_and_loads_nothing(worker, nonsense):
    touched = Path("/tmp/labkit-pickle-was-loaded")
    touched.unlink(missing_ok=True)
    events = Events()
    prepare(worker, events)
    with pytest.raises(WorkerError, match=DEATHS[nonsense]):
        run(worker, events, f"fault:{nonsense}@step")
    assert not touched.exists()
    assert worker.pid is None
    assert works_again(worker)


def test_ordinary_errors_leave_the_worker_and_its_weights(worker):
    events = Events()
    prepare(worker, events)
    pid = worker.pid
    with pytest.raises(WorkerError, match=r"failed during the run: RuntimeError: broken \[31mthing"):
        run(worker, events, "fault:error@run")
    assert "fake_backend.py" in events.logs()
    with pytest.raises(WorkerError, match="PanicException: rust panicked"):
        run(worker, events, "fault:panic@step")
    with pytest.raises(DoesNotFitError, match="ran out of memory during the run"):
        run(worker, events, "fault:memory@step")
    assert run(worker, events)["status"] == "finished"
    assert worker.pid == pid


def test_labkits_own_errors_keep_class_and_parts(worker):
    with pytest.raises(DoesNotFitError, match=r"nothing is configured \(would work: configure first\)"):
        run(worker, Events())


def test_address_space_limit_ends_in_a_message():
    worker = Worker(FAKE, memory_limit_bytes=600 * 2**20)
    try:
        prepare(worker, Events())
        with pytest.raises(DoesNotFitError, match="ran out of memory"):
            run(worker, Events(), "fault:address space@step")
        assert works_again(worker)
    finally:
        worker.close()


def test_death_while_idle_is_said_at_the_next_use(worker):
    prepare(worker, Events())
    os.kill(worker.pid, signal.SIGKILL)
    os.waitid(os.P_PID, worker._process.pid, os.WEXITED | os.WNOWAIT)
    events = Events()
    worker.call("load", {}, events)
    assert re.search(r"worker had ended \(signal 9 \(SIGKILL\).*new one", events.logs())
    assert worker.generation == 2


def set_after(seconds):
    cancel = threading.Event()
    threading.Timer(seconds, cancel.set).start()
    return cancel


def test_cancel_keeps_worker_and_finished_part(worker):
    events = Events()
    prepare(worker, events)
    answer = run(worker, events, cancel=set_after(0.1), num_requests=2, output_tokens=100_000)
    assert answer["status"] == "cancelled"
    assert sum(event["type"] == "rows" for event in events) >= 1
    assert [row[8] for row in answer["requests"]] == ["cancelled", "cancelled"]
    assert worker.generation == 1
    assert run(worker, events)["status"] == "finished"


def test_cancel_of_work_that_does_not_listen_returns_at_once_and_the_next_run_works(worker, monkeypatch):
    events = Events()
    prepare(worker, events)
    cancel = set_after(0.1)
    monkeypatch.setattr("labkit.experiments.worker.DRAIN_S", 60.0)
    with pytest.raises(CancelledError):
        run(worker, events, "deaf", cancel=cancel, num_requests=1, output_tokens=400)
    assert CANCEL_GRACE_S < 1.0
    assert run(worker, events)["status"] == "finished"
    assert worker.generation == 1
    monkeypatch.setattr("labkit.experiments.worker.DRAIN_S", 0.2)
    with pytest.raises(CancelledError):
        run(worker, events, "fault:hang@step", cancel=set_after(0.05))
    events = Events()
    assert works_again(worker, events)
    assert "did not stop within 0.2 s; the worker is restarted" in events.logs()
    assert DRAIN_S > 0.2
    assert worker.generation == 2


def test_stopped_process_is_said_cancelled_or_ended(worker):
    events = Events()
    prepare(worker, events)
    with pytest.raises(CancelledError):
        run(worker, events, "fault:stop@step", cancel=set_after(0.2))
    os.kill(worker.pid, signal.SIGCONT)
    assert run(worker, events)["status"] == "finished"
    worker.hang_timeout_s = 3.0
    with pytest.raises(WorkerError, match="said nothing for 3 s during the run"):
        run(worker, events, "fault:stop@step")
    worker.hang_timeout_s = 60.0
    assert works_again(worker)


def test_a_failing_callback_stops_the_run_and_harms_nothing_else(worker):
    def explode(event):
        if event["type"] == "step":
            raise KeyboardInterrupt

    prepare(worker, Events())
    with pytest.raises(KeyboardInterrupt):
        run(worker, explode, output_tokens=100_000)
    assert run(worker, Events())["status"] == "finished"
    assert worker.generation == 1


def test_the_memory_killer_takes_the_worker_first(worker):
    prepare(worker, Events())
    assert int(Path(f"/proc/{worker.pid}/oom_score_adj").read_text()) > int(
        Path("/proc/self/oom_score_adj").read_text()
    )


@pytest.mark.parametrize(("chosen", "seen"), [(None, "PCI_BUS_ID"), ("FASTEST_FIRST", "FASTEST_FIRST")])
def test_cards_have_the_same_numbers_for_cuda_and_nvml(monkeypatch, chosen, seen):
    """NVML goes by the bus (nvml.h, nvmlDeviceGetHandleByIndex); CUDA does so only when told."""
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    if chosen:
        monkeypatch.setenv("CUDA_DEVICE_ORDER", chosen)
    with contextlib.closing(Worker(FAKE)) as started:
        started.call("load", {}, Events())
        assert psutil.Process(started.pid).environ()["CUDA_DEVICE_ORDER"] == seen


def test_what_the_worker_prints_is_limited_and_its_end_is_quoted(worker):
    prepare(worker, Events())
    os.write(worker._log.fileno(), b"x" * (5 * 2**20))
    run(worker, Events())
    assert os.fstat(worker._log.fileno()).st_size < 2**20
    os.write(worker._log.fileno(), b"\x1b[31mlast words\n")
    with pytest.raises(WorkerError, match=r"its last words: .*\[31mlast words"):
        run(worker, Events(), "fault:kill@step")


def test_second_run_at_the_same_time_is_refused(worker):
    prepare(worker, Events())
    problems = []

    def second(event):
        if event["type"] == "step" and not problems:
            with pytest.raises(WorkerError, match="busy") as caught:
                run(worker, Events())
            problems.append(caught.value)

    assert run(worker, second)["status"] == "finished"
    assert problems


def test_nothing_is_left_behind():
    gc.collect()
    shared_memory, descriptors = sorted(os.listdir("/dev/shm")), len(os.listdir("/proc/self/fd"))
    threads = threading.active_count()
    for order in ("plain", "fault:kill@step"):
        worker = Worker(FAKE)
        prepare(worker, Events())
        pid = worker.pid
        with contextlib.suppress(WorkerError):
            run(worker, Events(), order)
        worker.close()
        worker.close()
        assert not psutil.pid_exists(pid)
    assert sorted(os.listdir("/dev/shm")) == shared_memory
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    assert threading.active_count() <= threads
    assert [child.pid for child in psutil.Process().children() if child.status() == "zombie"] == []


SCRIPT = """
import sys; sys.path.insert(0, {folder!r})
print("main runs once", flush=True)
from labkit.experiments.worker import Worker
worker = Worker("fake_backend:FakeBackend")
print(worker.call("load", {{}}, print)["pid"], flush=True)
{end}
"""


def run_as_script(tmp_path, end):
    path = tmp_path / "script without a main guard.py"
    path.write_text(SCRIPT.format(folder=os.path.dirname(__file__), end=end))
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=False, timeout=60)
    return done, int(done.stdout.split()[-1])


def test_a_script_without_a_main_guard_runs_once(tmp_path):
    done, pid = run_as_script(tmp_path, "worker.close()")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("main runs once") == 1
    assert not psutil.pid_exists(pid)


def test_worker_ends_when_its_parent_is_killed(tmp_path):
    done, pid = run_as_script(tmp_path, "import os; os.kill(os.getpid(), 9)")
    assert done.returncode == -9
    deadline = time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie"


def test_bad_settings_are_refused():
    with pytest.raises(OutOfRangeError, match="num_threads"):
        Worker(FAKE, num_threads=0)


def test_backend_that_cannot_be_imported_says_so():
    worker = Worker("no_such_module:Backend")
    try:
        with pytest.raises(WorkerError, match="No module named 'no_such_module'"):
            worker.call("load", {}, Events())
    finally:
        worker.close()
