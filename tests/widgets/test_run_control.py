"""Time left of a list of runs."""

from __future__ import annotations

import pytest

from labkit.widgets.run_bar import RunBar
from labkit.widgets.run_control import RunView, read_event


def test_the_time_left_counts_the_runs_that_wait():
    # Two runs took 20 s in all; the third has 4 s left and a fourth waits: 4 + 10.
    view = RunView(run_index=2, num_runs=4, begun_s=100.0, started_s=120.0, left_s=4.0)
    assert view.left_in_all_s(126.0) == pytest.approx(14.0)
    # Without a guess of its own the third is taken to be like the mean: 10 − 6, and 10.
    view.left_s = None
    assert view.left_in_all_s(126.0) == pytest.approx(14.0)
    assert view.left_in_all_s(140.0) == pytest.approx(10.0)


def test_the_first_run_and_a_single_one_say_nothing_of_others():
    assert RunView(run_index=0, num_runs=4, started_s=1.0, begun_s=1.0).left_in_all_s(5.0) is None
    assert RunView(run_index=0, num_runs=1).left_in_all_s(5.0) is None
    bar = RunBar()
    bar.show_progress(RunView(run_index=1, num_runs=2, begun_s=0.0, started_s=10.0, left_s=3.0), "")
    assert bar.status.text.startswith("Run 2 of 2, ")
    assert "about 3.00 s left (3.00 s for all)" in bar.status.text


def test_loading_says_stage_bytes_share_and_time_left():
    bar, view = RunBar(), RunView()
    read_event({"type": "status", "phase": "start", "message": "starting the worker"}, view)
    bar.show_progress(view, "")
    assert bar.status.text.startswith("starting the worker, which loads torch once and then stays, ")
    assert bar.status.progress is None
    load = {"type": "progress", "phase": "load", "done": 2**30, "total": 4 * 2**30, "unit": "bytes", "remaining_s": 12}
    read_event(load, view)
    bar.show_progress(view, "")
    assert bar.status.text.startswith("loading the weights: 1.00 GiB of 4.00 GiB (25 %), ")
    assert "about 12.0 s left" in bar.status.text
    assert bar.status.progress == 0.25
    read_event({"type": "status", "phase": "configure"}, view)
    bar.show_progress(view, "")
    assert bar.status.text.startswith("allocating the KV pool, ")
    assert bar.status.progress is None, "the next stage has a count of its own, or none"
