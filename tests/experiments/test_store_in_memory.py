"""A store in memory, `sqlite://`: kept as long as it is open, from whatever thread."""

from __future__ import annotations

import threading

from labkit.experiments import RunStore
from tests.figures.samples import sample_record


def test_runs_saved_in_one_thread_are_read_in_another():
    store = RunStore("sqlite://")
    threads = [
        threading.Thread(target=store.save, args=(sample_record(run_id=f"run-{index}", num_steps=3, num_requests=1),))
        for index in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(run.run_id for run in store.list_runs()) == [f"run-{index}" for index in range(4)]
    assert store.get("run-2").steps == sample_record(run_id="run-2", num_steps=3, num_requests=1).steps
    assert RunStore("sqlite://").list_runs() == (), "each store in memory is its own"
