"""`tune` around a fake backend: a report and a recommendation in every case, and the cuts of the traffic are said."""

import json
import re

import pytest
from example_runs import example_workload

from labkit.errors import LabkitError, OutOfRangeError, StoreError
from labkit.experiments.run import Speed
from labkit.experiments.runner import LocalRunner
from labkit.experiments.store import RunStore, RunWriter
from labkit.experiments.worker import Worker
from labkit.measure.run_record import StepRow
from labkit.specs.engine_config import EngineConfig
from labkit.specs.workload import RequestSpec, Workload
from labkit.tune import _arriving_within, _requests_in, report_of_runs, tune

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.fixture
def run_tune(tmp_path):
    def run(workload=None, **settings):
        settings = {"store": tmp_path / "runs.sqlite3", "out": tmp_path / "report.html", "budget_s": 20, **settings}
        settings.setdefault("runner", LocalRunner(Worker("fake_backend:FakeBackend")))
        return tune(MODEL, "cpu", workload or example_workload(6, 6), **settings)

    return run


def test_baseline_variants_and_repeats_then_report(run_tune, tmp_path):
    events = []
    result = run_tune(on_event=events.append, created="2026-11-30T12:00:00Z")
    stored = RunStore(tmp_path / "runs.sqlite3").list_runs()
    names = [run.name for run in sorted(stored, key=lambda run: result.run_ids.index(run.run_id))]
    assert names[0] == "baseline"
    assert names[-1] == "baseline again"
    variants = {run.name: run.record.config for run in stored if run.name in names[1:4]}
    repeated = next(run for run in stored if run.name == names[4])
    assert repeated.record.config == variants[repeated.name.removesuffix(" again")]
    assert len(names) == len(set(names)) == 6
    assert "fp8 KV" in names
    assert result.report_path.read_text().startswith("<!DOCTYPE html>")
    assert "vllm serve" in result.recommendation.command
    phases = {event["phase"].partition(":")[0] for event in events if event["type"] == "progress"}
    assert {"trial run", "run 1", "run 6 of 6"} <= phases
    assert all(event["remaining_s"] is None or event["remaining_s"] >= 0 for event in events if "remaining_s" in event)


def test_all_runs_have_the_same_traffic(run_tune, tmp_path):
    run_tune()
    workloads = [run.record.workload for run in RunStore(tmp_path / "runs.sqlite3").list_runs()]
    assert all(workload == workloads[0] for workload in workloads)
    assert workloads[0]["num_requests"] >= 4


def test_what_does_not_fit_still_gives_a_report(run_tune):
    result = run_tune(config=EngineConfig(cpu_memory_gib=0.1))
    assert result.run_ids == ()
    assert result.recommendation.outcome == "nothing fits"
    assert result.report_path.exists()


class DiesOnce(LocalRunner):
    """Its worker is killed when the fp8 run begins."""

    def run(self, job, on_event, on_rows, cancel):
        def kill(event):
            if event["type"] == "status" and event["phase"] == "run" and job.plan.config.kv_cache_dtype == "fp8":
                self.worker._process.kill()
                self.worker._process.wait()
            on_event(event)

        return super().run(job, kill, on_rows, cancel)


def test_a_run_that_dies_is_reported_and_the_others_go_on(run_tune, tmp_path):
    result = run_tune(runner=DiesOnce(Worker("fake_backend:FakeBackend")))
    statuses = {run.name: run.status for run in RunStore(tmp_path / "runs.sqlite3").list_runs()}
    assert statuses.pop("fp8 KV") == "failed"
    assert set(statuses.values()) == {"finished"}
    assert len(statuses) == 5
    assert "SIGKILL" in result.report_path.read_text()


def test_a_store_that_gets_full_costs_no_run_and_no_report(run_tune, tmp_path, monkeypatch):
    finish, begin, ended, begun, events = RunWriter.finish, RunStore.begin, [], [], []

    def refuse_the_second(writer, record):
        ended.append(record)
        if len(ended) == 2:
            raise StoreError("the disk is full")
        finish(writer, record)

    def refuse_the_fourth(store, record):
        begun.append(record)
        if len(begun) == 4:
            raise StoreError("there is still no room")
        return begin(store, record)

    monkeypatch.setattr(RunWriter, "finish", refuse_the_second)
    monkeypatch.setattr(RunStore, "begin", refuse_the_fourth)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    result = run_tune(on_event=events.append)
    assert len(result.run_ids) == 3
    assert result.report_path.exists()
    told = [event["message"] for event in events if event["type"] == "log"]
    assert any("the disk is full; the run is finished, and kept in" in message for message in told)
    assert any(message.startswith("no further run: there is still no room") for message in told)


@pytest.mark.parametrize("budget_s", [0, -1, float("nan"), 10**9])
def test_bad_budget(run_tune, budget_s):
    with pytest.raises(OutOfRangeError, match="budget_s"):
        run_tune(budget_s=budget_s)


def test_unwritable_report_says_so(run_tune, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LabkitError, match="cannot write"):
        run_tune(out=tmp_path / "file" / "report.html")


def test_requests_that_fit_in_a_time():
    speed = Speed()
    speed.add(StepRow(0, 1.0, 100, 100, 0, 1, 0, 1, 0, 1))
    speed.add(StepRow(1, 1.0, 10, 0, 10, 10, 0, 1, 0, 1))
    workload = Workload("w", tuple(RequestSpec(float(index), 100, 10) for index in range(9)))
    assert speed.seconds_for(100, 10) == pytest.approx(2.0)
    assert _requests_in(workload, speed, 1.9) == 0
    assert _requests_in(workload, speed, 6.5) == 3
    assert _requests_in(workload, speed, 1e9) == 9


def test_arrivals_are_drawn_together_and_it_is_said():
    workload = Workload("w", tuple(RequestSpec(10.0 * index, 8, 8) for index in range(5)))
    near = _arriving_within(workload, 4.0)
    assert near.requests[-1].arrival_s == pytest.approx(4.0)
    assert len(near.steps) == len(workload.steps) + 1
    assert _arriving_within(near, 4.1) is near


def test_report_of_stored_runs(run_tune, tmp_path):
    result = run_tune()
    store = tmp_path / "runs.sqlite3"
    path = report_of_runs(out=tmp_path / "again.html", store=store)
    data = re.search(r'<script type="application/json"[^>]*>(.*?)</script>', path.read_text(), re.S)
    assert all(run_id in data.group(1) for run_id in result.run_ids)
    assert json.loads(data.group(1).replace("<\\/", "</"))
    one = report_of_runs([result.run_ids[0]], out=tmp_path / "one.html", store=store)
    assert result.run_ids[1] not in one.read_text()
    with pytest.raises(StoreError, match="no run 'x'"):
        report_of_runs(["x"], out=tmp_path / "none.html", store=store)
    with pytest.raises(StoreError, match=r"there is no store .*missing\.db.*in that folder: runs\.sqlite3"):
        report_of_runs(out=tmp_path / "none.html", store=tmp_path / "missing.db")
    assert not (tmp_path / "missing.db").exists()
    RunStore(tmp_path / "empty.db").close()
    with pytest.raises(StoreError, match="there is no run"):
        report_of_runs(out=tmp_path / "none.html", store=tmp_path / "empty.db")
