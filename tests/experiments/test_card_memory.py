"""The list of memory runs, and the file that they leave; what they measure is tested on a card."""

from __future__ import annotations

import json

import pytest

from labkit.experiments import card_memory
from labkit.experiments.card_memory import LARGE_MODEL, SMALL_MODEL, measure_memory, memory_runs
from labkit.memory import plan
from labkit.specs import load_gpu

CARD = load_gpu("H200")


def test_every_run_has_a_pool():
    runs = memory_runs()
    pools = [plan(run.spec(), CARD, run.config) for run in runs]
    assert all(found.num_gpu_blocks > 100 for found in pools)
    shares = [found.num_gpu_blocks * found.block_bytes / CARD.total_bytes for found in pools]
    assert min(shares) < 0.005
    assert max(shares) > 0.85
    assert len({json.dumps([run.model, dict(run.knobs)], sort_keys=True) for run in runs}) == len(runs)


def test_a_cut_model_keeps_its_first_layers():
    run = next(run for run in memory_runs() if run.num_layers == 8)
    assert run.spec().num_layers == 8


@pytest.fixture
def fake(monkeypatch):
    """A bench that fails on 8-bit KV."""

    class Bench:
        def __init__(self, gpu, device):
            self.closed = 0

        def row(self, run):
            if "kv_cache_dtype" in run.knobs:
                raise MemoryError("full")
            return {"model": run.model, "num_layers": run.num_layers, "num_gpu_blocks": 7, "planned_blocks": 7}

        def close(self):
            self.closed += 1

    monkeypatch.setattr(card_memory, "MemoryBench", Bench)


def test_rows_of_other_models_stay_and_errors_are_rows(tmp_path, fake):
    path, lines = tmp_path / "memory.json", []
    measure_memory(path, 60, CARD, [SMALL_MODEL], on_progress=lines.append)
    rows = measure_memory(path, 60, CARD, [LARGE_MODEL], on_progress=lines.append)
    assert json.loads(path.read_text())["rows"] == rows
    small = [row for row in rows if row["model"] == SMALL_MODEL]
    assert len(small) == sum(run.model == SMALL_MODEL for run in memory_runs())
    assert [row["error"] for row in small if "error" in row] == ["MemoryError: full"] * 2
    again = measure_memory(path, 60, CARD, [SMALL_MODEL], on_progress=lines.append)
    assert len(again) == len(rows)
    assert "7 blocks, planned 7" in lines[0]


def test_what_ran_is_kept_when_the_time_is_over(tmp_path, fake):
    lines = []
    assert measure_memory(tmp_path / "memory.json", -1, CARD, on_progress=lines.append) == []
    assert lines == ["-1 s were over; 0 rows"]
