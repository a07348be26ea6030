"""The session's bench measures what it says, here around a fake backend; the numbers are in results/session.json."""

import json

import pytest

from labkit.errors import OutOfRangeError
from labkit.experiments.runner import LocalRunner
from labkit.experiments.session_bench import SETTINGS, bench_session
from labkit.experiments.worker import Worker


def test_every_duration_is_measured_as_often_as_asked():
    runner = LocalRunner(Worker("fake_backend:FakeBackend"))
    result = bench_session(repeats=1, runner=runner)
    assert result["other_settings_s"]["count"] == len(SETTINGS)
    assert result["cancel_s"]["count"] == 2
    assert result["after_worker_was_killed_s"]["count"] == 1
    assert runner.worker.generation == 2
    assert runner.worker.pid is None
    for name in ("other_settings_s", "cancel_s", "after_worker_was_killed_s"):
        assert 0 < result[name]["median"] <= result[name]["max"]
    assert json.dumps(result)


def test_no_repeat_is_refused():
    with pytest.raises(OutOfRangeError, match="repeats"):
        bench_session(repeats=0)
