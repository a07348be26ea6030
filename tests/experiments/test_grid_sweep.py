"""Sweeps: every combination once, in order; what does not fit is a violated constraint; a stopped sweep goes on."""

import pytest
from example_runs import example_workload

from labkit.errors import OutOfRangeError, UnknownNameError, WorkerError
from labkit.experiments.grid_sweep import grid_points, sweep
from labkit.experiments.lab_session import LabSession
from labkit.experiments.runner import LocalRunner
from labkit.experiments.worker import Worker
from labkit.specs.engine_config import EngineConfig

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.fixture
def session(tmp_path):
    runner = LocalRunner(Worker("fake_backend:FakeBackend"))
    session = LabSession(MODEL, "cpu", example_workload(2, 2), store=tmp_path / "runs.sqlite3", runner=runner)
    yield session
    session.close()


def test_points_are_all_combinations_in_order():
    points = grid_points({"block_size": [8, 16], "enable_prefix_caching": [True, False]}, EngineConfig())
    assert points == [
        {"block_size": 8, "enable_prefix_caching": True},
        {"block_size": 8, "enable_prefix_caching": False},
        {"block_size": 16, "enable_prefix_caching": True},
        {"block_size": 16, "enable_prefix_caching": False},
    ]


@pytest.mark.parametrize(
    ("grid", "error"),
    [
        ({}, OutOfRangeError),
        ({"block_size": []}, OutOfRangeError),
        ({"block_size": [16, -1]}, OutOfRangeError),
        ({"blocksize": [16]}, UnknownNameError),
        ({"block_size": range(1, 200), "max_num_seqs": range(1, 200)}, OutOfRangeError),
    ],
)
def test_bad_grids_are_refused_before_anything_runs(session, grid, error):
    with pytest.raises(error):
        sweep(session, grid)
    assert session.store.list_runs() == ()


def test_every_combination_is_run_and_what_does_not_fit_is_told(session):
    events = []
    records, study = sweep(session, {"cpu_memory_gib": [0.05, 2.0], "block_size": [8, 16]}, on_event=events.append)
    assert [record.config.block_size for record in records] == [8, 16]
    assert {record.config.cpu_memory_gib for record in records} == {2.0}
    states = [trial.state.name for trial in study.trials]
    assert states == ["PRUNED", "PRUNED", "COMPLETE", "COMPLETE"]
    assert "does not fit" in study.trials[0].user_attrs["error"]
    assert study.best_trial.user_attrs["labkit_run_id"] in {record.run_id for record in records}
    assert [event["done"] for event in events if event.get("phase") == "sweep"] == [0, 1, 2, 3]


def test_cancelled_sweep_goes_on_where_it_stopped(session, tmp_path):
    storage = f"sqlite:///{tmp_path}/study.db"
    grid = {"block_size": [8, 16, 32]}

    def stop(event):
        if event["type"] == "step" and len(session.records()) == 1:
            session.cancel()

    settings = {"study_name": "s", "storage": storage, "workload": example_workload(2, 20)}
    first, _ = sweep(session, grid, on_event=stop, **settings)
    assert [record.status for record in first] == ["finished", "cancelled"]
    second, study = sweep(session, grid, **settings)
    assert [record.config.block_size for record in second] == [16, 32]
    assert sum(trial.state.name == "COMPLETE" for trial in study.trials) == 3
    assert sweep(session, grid, **settings)[0] == ()


def test_a_dead_worker_ends_the_sweep_and_it_can_go_on(session, tmp_path):
    settings = {"study_name": "s", "storage": f"sqlite:///{tmp_path}/study.db"}

    def kill(event):
        if event["type"] == "step" and len(session.records()) == 1:
            session._runner.worker._process.kill()

    with pytest.raises(WorkerError, match="SIGKILL"):
        sweep(session, {"block_size": [8, 16]}, on_event=kill, workload=example_workload(2, 30), **settings)
    records, _ = sweep(session, {"block_size": [8, 16]}, **settings)
    assert [record.config.block_size for record in records] == [16]
