"""The session's bench measures what it says, here around a fake backend; the numbers are in results/session.json."""

import json

import pytest

from labkit.errors import OutOfRangeError
from labkit.experiments.runner import LocalRunner
from labkit.experiments.session_bench import SETTINGS, bench_session
from labkit.experiments.worker import Worker


def test_every_duration_is_measured_as_often_as_asked(tmp_path):
    runner = LocalRunner(Worker("fake_backend:FakeBackend"))
    result = bench_session(tmp_path / "session.json", repeats=1, runner=runner)
    assert [row["count"] for row in result["rows"]] == [1, len(SETTINGS), 2, 1]
    assert runner.worker.generation == 2
    assert runner.worker.pid is None
    for row in result["rows"]:
        assert 0 < row["median_s"] <= row["max_s"]
    assert json.loads((tmp_path / "session.json").read_text()) == result


def test_no_repeat_is_refused():
    with pytest.raises(OutOfRangeError, match="repeats"):
        bench_session(repeats=0)
