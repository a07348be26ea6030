"""The panel's benchmark counts what it says and writes it; no test asserts a time."""

from __future__ import annotations

import json

from labkit.widgets import bench, bench_panel


def test_every_change_that_redraws_is_timed_and_written(tmp_path, monkeypatch):
    """Two rounds, of which the first is not counted; a value that stands already redraws nothing."""
    monkeypatch.setattr(bench, "CHANGES", {"block_size": (8, 16), "kv_cache_dtype": ("fp8", "auto", "auto")})
    path = tmp_path / "deep" / "panel.json"
    result = bench_panel(path, cases=[("HuggingFaceTB/SmolLM2-135M-Instruct", "cpu")], rounds=1)
    assert json.loads(path.read_text()) == result
    (case,) = result["rows"]
    assert case["changes"] == 4
    for name in ("traces_ms", "change_ms", "change_cpu_ms"):
        assert 0 < case[name]["median"] <= case[name]["p95"] <= case[name]["max"]
    assert case["traces_ms"]["median"] <= case["change_ms"]["median"]
