"""The comparison with a card: its grid, its fit and its bars, on counts made by a simulation with known settings."""

import dataclasses
import json

import pytest

from labkit.measure import validate_l2
from labkit.measure.l2_calibration import L2Calibration
from labkit.measure.l2_simulator import simulate_attention
from labkit.measure.run_record import Counters
from labkit.specs.gpu_catalogue import catalogue_gpu

H200 = catalogue_gpu("H200")


def test_the_grid_covers_what_was_promised():
    grid = validate_l2.points()
    shapes = [point.shape for point in grid]
    assert len(grid) >= 60
    assert len({point.name for point in grid}) == len(grid)
    assert {shape.block_size for shape in shapes} == {8, 16, 32, 64, 128, 256}
    assert {shape.group for shape in shapes} == {1, 2, 4, 8}
    assert {1, 256} <= {len(shape.batch.context_lens) for shape in shapes}
    assert {shape.kv_cache_dtype for shape in shapes} == {"bfloat16", "fp8"}
    shares = {shape.batch.shared_prefix_tokens / shape.batch.context_lens[0] for shape in shapes}
    assert {0, 0.25, 0.5, 0.75, 1} <= shares
    assert {point.variant for point in grid} >= {"full", "prefill", "shared prefix", validate_l2.UNPACKED}
    assert set(validate_l2.NCU_POINTS) <= {point.name for point in grid}


@pytest.fixture(scope="module")
def sensitive():
    """Points whose hits depend on how much of the L2 counts."""
    names = ("shared 100 % of 32 × 4096", "prefill 4 × 512 over 8192", "prefill 1 × 2048 over 14336 group 1",
             "shared 75 % of 32 × 4096", "decode 1 × 32768 bfloat16")  # fmt: skip
    return [point for point in validate_l2.points() if point.name in names]


@pytest.fixture(scope="module")
def small_card():
    """An L2 small enough that these points do not fit."""
    return dataclasses.replace(H200, l2_bytes=6 * 2**20, sm_count=20)


def made(points, gpu, calibration):
    return [(point, simulate_attention(point.shape, gpu, point.variant, calibration=calibration).counters)
            for point in points]  # fmt: skip


@pytest.mark.parametrize("share", [0.4, 0.9])
def test_the_fit_finds_the_settings_that_made_the_counts(monkeypatch, sensitive, small_card, share):
    monkeypatch.setattr(validate_l2, "CAPACITY_SHARES", (0.4, 0.65, 0.9))
    truth = L2Calibration(share, 16)
    counted = made(sensitive, small_card, truth)
    found = validate_l2.fit(small_card, counted)
    assert (found.capacity_share, found.ways, found.calibrated) == (share, 16, True)
    assert max(abs(each.hit_error) for each in validate_l2.compare(small_card, counted, found)) == 0


def test_bars():
    point = validate_l2.points()[0]
    simulated = Counters("simulated", "H200", 0.50, 104.0, 1.0, 1.0)
    counted = Counters("measured", "H200", 0.46, 100.0, 1.0, 1.0)
    compared = [validate_l2.Compared(point, counted, simulated)] * 60
    bars = validate_l2.summary(compared, [(0.5, -1.0)])
    values = {name: entry["value"] for name, entry in bars.items()}
    assert values == {
        "points": 60, "hit_rate_mean_error_points": pytest.approx(4), "hit_rate_worst_error_points": pytest.approx(4),
        "dram_bytes_mean_error_percent": pytest.approx(4), "methods_hit_rate_differ_points": 0.5,
        "methods_dram_bytes_differ_percent": 1.0,
    }  # fmt: skip
    assert [name for name, entry in bars.items() if not entry["ok"]] == ["hit_rate_mean_error_points"]
    assert not any(entry["ok"] for entry in validate_l2.summary([], []).values())


def test_the_table_is_written_and_misses_are_kept(monkeypatch, tmp_path, sensitive):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr("labkit.specs.gpu_loading.load_gpu", lambda name: H200)
    monkeypatch.setattr(validate_l2, "CAPACITY_SHARES", (0.5,))
    counted = made(sensitive, H200, L2Calibration(0.5, 16))
    monkeypatch.setattr(validate_l2, "count_all", lambda gpu: (counted, [{"name": "x", "error": "y"}]))
    monkeypatch.setattr(validate_l2, "count_with_ncu", lambda card, name: validate_l2.Counted(notes=("no ncu",)))
    out = tmp_path / "counters.json"
    assert validate_l2.main([str(out)]) == 1
    content = json.loads(out.read_text())
    assert len(content["rows"]) == len(sensitive)
    assert content["refused"] == [{"name": "x", "error": "y"}]
    assert content["summary"]["points"]["ok"] is False
    assert content["calibration"]["capacity_share"] == 0.5
    assert content["both_methods"][0]["notes"] == ["no ncu"]


def test_without_a_card_it_is_one_line(capsys, tmp_path):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a card")
    assert validate_l2.main([str(tmp_path / "x.json")]) == 2
    assert "no NVIDIA card" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        validate_l2.main([])
