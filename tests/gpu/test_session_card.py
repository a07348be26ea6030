"""A whole session on a card: plan, run, another knob, run, another weight format, run, report."""

from __future__ import annotations

import pytest

from labkit.experiments import LabSession, RunStore
from labkit.report import write_report
from labkit.specs import load_gpu, synthetic_workload
from labkit.specs.engine_config import EngineConfig

# Fixed, so that programs beside the test change nothing.
POOL_BYTES = 2 * 2**30


def test_runs_under_other_knobs_and_a_report(tmp_path):
    config = EngineConfig(
        max_model_len=1024, max_num_seqs=16, max_num_batched_tokens=1024, gpu_memory_utilization=0.1,
        load_format="dummy", kv_cache_memory_bytes=POOL_BYTES,
    )  # fmt: skip
    traffic = synthetic_workload(12, input_lengths=200, output_lengths=40, seed=1)
    events, again = [], []
    with LabSession("Qwen/Qwen3-0.6B", load_gpu("auto"), traffic, config=config, store=tmp_path / "runs") as session:
        assert session.runs_on_card
        plan = session.plan()
        first_run = session.run(on_event=events.append)
        pid = session.worker_pid
        second = session.run(block_size=32, kv_cache_dtype="fp8")
        third = session.run(quantization="fp8", enforce_eager=True, on_event=again.append)
        assert session.worker_pid == pid
        records = session.records()
    for record in (first_run, second, third):
        assert record.status == "finished"
        assert [row.output_tokens for row in record.requests] == [40] * 12
        assert record.measured.weights_bytes == pytest.approx(record.plan.breakdown.weights_bytes, rel=0.02)
        assert record.measured.kv_cache_bytes == pytest.approx(POOL_BYTES, rel=0.01)
        assert record.versions["torch"]
    assert first_run.plan.block_bytes == plan.block_bytes
    assert third.measured.weights_bytes < 0.75 * first_run.measured.weights_bytes
    # A first run begins with its process; weights of another format are loaded in the same one.
    assert [event["phase"] for event in events if event["type"] == "status"] == ["start", "configure", "run"]
    assert [event["phase"] for event in again if event["type"] == "status"] == ["load", "configure", "run"]
    for told in (events, again):
        first, *reads, last = [event for event in told if event["type"] == "progress" and event["phase"] == "load"]
        assert (first["done"], last["done"], last["total"], last["remaining_s"]) == (0, 1, 1, 0.0)
        assert reads
        for event in reads:
            assert event["unit"] == "bytes"
            assert event["total"] == pytest.approx(first_run.measured.weights_bytes, rel=0.02)
            assert 0 < event["done"] <= event["total"]
            assert event["remaining_s"] >= 0
    stored = RunStore(tmp_path / "runs")
    assert [entry.run_id for entry in stored.list_runs()][::-1] == [record.run_id for record in records]
    page = write_report(tmp_path / "report.html", records, [plan], created="2026-11-30T12:00:00Z").read_text()
    assert page.startswith("<!DOCTYPE html>")
    for record in records:
        assert record.run_id in page
