"""The comparison of planned and measured pools: what it counts, and what it says where nothing was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from labkit.errors import FileFormatError
from labkit.memory import plan
from labkit.memory.labkit_plan_bench import PARTS, bench_labkit_plan, compare
from labkit.specs import load_gpu, load_model
from labkit.specs.engine_config import EngineConfig

CARD, MODEL = load_gpu("H200"), "Qwen/Qwen3-0.6B"
KNOBS = {"max_num_batched_tokens": 2048, "max_num_seqs": 64, "max_model_len": 4096}


def measured(share, more_activation=0):
    """A row that agrees with the planner but for so many bytes of activation."""
    settings = {**KNOBS, "gpu_memory_utilization": share}
    config = EngineConfig(**settings, dtype="bfloat16")
    found = plan(load_model(MODEL), CARD, config)
    rank = found.details["ranks"][0]
    names = {"weights": "weights_bytes", "block_tables": "tables_bytes", "activation": "activation_bytes",
             "cuda_graphs": "graphs_reserved_bytes", "workspace": "non_torch_bytes"}  # fmt: skip
    parts = {part: rank[name] for part, name in names.items()}
    parts["activation"] += more_activation
    left = rank["available_kv_bytes"] - more_activation
    blocks = plan(load_model(MODEL), CARD, config.replace(kv_cache_memory_bytes=left)).num_gpu_blocks
    return {
        "model": MODEL, "num_layers": None, "settings": settings, "num_gpu_blocks": blocks, "budget_parts": parts,
        "memory_parts": {"cuda_graphs": 0}, "total_bytes": CARD.total_bytes,
    }  # fmt: skip


def bench(tmp_path, rows):
    path = tmp_path / "memory.json"
    path.write_text(json.dumps({"card": "H200", "made": "now", "rows": rows}))
    return bench_labkit_plan(tmp_path / "plan.json", path)


def test_rows_that_agree_have_no_error(tmp_path):
    found = bench(tmp_path, [measured(0.5), measured(0.03)])
    assert all(entry["ok"] for entry in found["summary"].values())
    assert [row["error_percent"] for row in found["rows"]] == [0, 0]
    assert set(found["rows"][0]["parts"]) == set(PARTS)
    assert json.loads((tmp_path / "plan.json").read_text())["measured"]["card"] == "H200"


def test_an_error_is_a_miss_and_measured_parts_still_agree(tmp_path):
    """Half a GiB of activation more: 4 % of a pool of 12 GiB, 20 % of one of 2.6."""
    found = bench(tmp_path, [measured(0.12, 2**29), measured(0.03, 2**29)])
    summary = found["summary"]
    assert summary["pools from measured parts that differ"]["ok"]
    large = summary["pools of a tenth of the card or more, largest error [%]"]
    assert not large["ok"]
    assert large["value"] == pytest.approx(3.2, abs=0.5)
    assert summary["smaller pools, largest error [MiB]"]["value"] == pytest.approx(512, abs=2)
    assert not summary["activation, largest error [MiB]"]["ok"]


def test_nothing_measured_is_a_miss(tmp_path):
    assert not any(entry["ok"] for entry in bench(tmp_path, [])["summary"].values())


def test_rows_that_failed_are_left_out(tmp_path):
    found = bench(tmp_path, [measured(0.5), {"model": MODEL, "error": "out of memory"}])
    assert len(found["rows"]) == 1


@pytest.mark.parametrize("content", ["", "[]", '{"rows": [{"model": 3}]}', '{"card": "H200", "made": 1, "rows": [{}]}'])
def test_another_file_is_refused(tmp_path, content):
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(FileFormatError, match="does not hold memory"):
        bench_labkit_plan(tmp_path / "plan.json", path)
    with pytest.raises(FileFormatError):
        bench_labkit_plan(tmp_path / "plan.json", tmp_path / "none.json")


RECORDED = json.loads((Path(__file__).parents[2] / "results" / "labkit-memory.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "row", RECORDED["rows"], ids=lambda row: f"{row['model'].split('/')[1]}-{row['num_gpu_blocks']}"
)
def test_recorded_pools_are_foretold(row):
    """Exactly from the measured parts, and within one percent without them, from 0.4 GiB to nearly the whole card."""
    found = compare(row, RECORDED["card"])
    assert found["from_measured_parts"] == row["num_gpu_blocks"]
    assert abs(found["error_percent"]) <= 1
    assert abs(found["error_mib"]) <= 64
