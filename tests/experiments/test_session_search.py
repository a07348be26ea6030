"""The search on a session whose card is not here: simulated launches that say so, kept in a study."""

from __future__ import annotations

import pytest

from labkit.errors import OutOfRangeError, UnsupportedError
from labkit.experiments.lab_session import LabSession
from labkit.experiments.session_search import search_session
from labkit.specs import synthetic_workload
from labkit.specs.engine_config import EngineConfig

SPACE = {"max_num_seqs": [4, 16, 64], "kv_cache_dtype": ["auto", "fp8"]}


@pytest.fixture
def session(store):
    traffic = synthetic_workload(40, input_lengths=200, output_lengths=60, seed=4)
    config = EngineConfig(max_model_len=4096, max_num_seqs=4)
    return LabSession("Qwen/Qwen3-8B", "L40S", traffic, config=config, store=store)


def test_more_sequences_are_found_and_launches_are_simulated(session):
    found, records = search_session(session, SPACE)
    assert found.best.point["max_num_seqs"] > 4
    assert found.is_different
    assert {record.origin for record in records} == {"simulated"}
    assert len(records) == len(found.launches) <= 8
    assert found.num_candidates == 6


def test_a_study_goes_on_without_repeating(session, tmp_path):
    storage = f"sqlite:///{tmp_path / 'study.sqlite3'}"
    first, records = search_session(session, SPACE, study_name="one", storage=storage)
    again, none = search_session(session, SPACE, study_name="one", storage=storage)
    assert len(records) > 0 == len(none)
    assert again.best.point == first.best.point
    assert again.best.measured.value == first.best.measured.value


def test_a_limit_that_nothing_meets(session):
    found, _ = search_session(session, SPACE, limits={"e2e_p99_s": 1e-6}, max_runs=3)
    assert found.best is None


TWO = {"ttft_p99_s": 1.0, "e2e_p99_s": 1.0}


@pytest.mark.parametrize(
    "wrong", [{"goal": "speed"}, {"limits": {"p99": 1.0}}, {"limits": {"ttft_p99_s": 0.0}}, {"limits": TWO}]
)
def test_wrong_goals_and_limits_are_named(session, wrong):
    with pytest.raises(OutOfRangeError):
        search_session(session, SPACE, **wrong)


def test_a_cpu_or_no_traffic_is_refused(session, store):
    session.workload = None
    with pytest.raises(UnsupportedError):
        search_session(session, SPACE)
    cpu = LabSession("Qwen/Qwen3-8B", "cpu", synthetic_workload(1), store=store)
    with pytest.raises(UnsupportedError):
        search_session(cpu, SPACE)
