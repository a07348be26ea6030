"""The worker tells how much of the weights is read, and stops reading after Cancel."""

from __future__ import annotations

import pytest
from test_failing_memory import LOAD

from labkit.errors import CancelledError
from labkit.experiments import engine_backend
from labkit.experiments.engine_backend import EngineBackend


@pytest.fixture
def backend(monkeypatch, one_thread):
    monkeypatch.setattr(engine_backend, "READING_TOLD_S", 0.0)
    made = EngineBackend()
    yield made
    made.close()


def test_bytes_share_and_time_left_are_told(backend):
    events = []
    backend.load(LOAD, events.append, lambda: False)
    assert {event["phase"] for event in events} == {"load"}
    told = [event for event in events if event["unit"] == "bytes"]
    assert len(told) > 10
    done = [event["done"] for event in told]
    assert done == sorted(done)
    assert done[-1] == told[-1]["total"]
    for event in told:
        left_s = event["elapsed_s"] * (event["total"] - event["done"]) / event["done"]
        assert event["remaining_s"] == pytest.approx(left_s)


def test_cancel_ends_the_reading_and_the_next_one_is_whole(backend):
    told = []
    with pytest.raises(CancelledError):
        backend.load(LOAD, lambda event: told.append(event["unit"]), lambda: "bytes" in told)
    assert told.count("bytes") == 1
    assert backend._decoder is None
    assert backend.load(LOAD, told.append, lambda: False)["load_s"] > 0
