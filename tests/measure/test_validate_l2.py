"""The comparison with a card: its grid, its fit and its bars, on counts made by a simulation with known settings."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from labkit.measure import l2_fit, validate_l2
from labkit.measure.l2_calibration import L2Calibration, load_l2_calibration
from labkit.measure.l2_points import NCU_POINTS, UNPACKED, points, unseen_points
from labkit.measure.l2_simulator import simulate_attention
from labkit.measure.ncu import NcuKernel
from labkit.measure.roofline import Ceilings
from labkit.measure.run_record import Counters
from labkit.specs.gpu_catalogue import catalogue_gpu

H200 = catalogue_gpu("H200")
ROOT = Path(__file__).parents[2]


def test_the_grid_covers_what_was_promised():
    grid = points()
    shapes = [point.shape for point in grid]
    assert len(grid) >= 60
    assert len({point.name for point in grid}) == len(grid)
    assert {shape.block_size for shape in shapes} == {8, 16, 32, 64, 128, 256}
    assert {shape.group for shape in shapes} == {1, 2, 4, 8, 16}
    assert {1, 256} <= {len(shape.batch.context_lens) for shape in shapes}
    assert {shape.kv_cache_dtype for shape in shapes} == {"bfloat16", "fp8"}
    shares = {shape.batch.shared_prefix_tokens / shape.batch.context_lens[0] for shape in shapes}
    assert {0, 0.25, 0.5, 0.75, 1} <= shares
    assert {point.variant for point in grid} >= {"full", "prefill", "shared prefix", UNPACKED}
    assert set(NCU_POINTS) <= {point.name for point in grid}


@pytest.fixture(scope="module")
def sensitive():
    """Points whose hits depend on how much of the L2 counts."""
    names = ("shared 100 % of 32 × 4096", "prefill 4 × 512 over 8192", "prefill 1 × 2048 over 14336 group 1",
             "shared 75 % of 32 × 4096", "decode 1 × 32768 bfloat16")  # fmt: skip
    return [point for point in points() if point.name in names]


def made(points, gpu, calibration):
    return [(point, simulate_attention(point.shape, gpu, point.variant, calibration=calibration).counters)
            for point in points]  # fmt: skip


def test_bars():
    point = points()[0]
    simulated = Counters("simulated", "H200", 0.50, 104.0, 1.0, 1.0)
    counted = Counters("measured", "H200", 0.46, 100.0, 1.0, 1.0)
    worse = dataclasses.replace(counted, l2_hit_rate=0.41)
    compared = (l2_fit.Compared(point, counted, simulated, None),) * 60
    unseen = (*compared[:2], l2_fit.Compared(point, worse, simulated, None))
    by_ncu = {point.name: dataclasses.replace(counted, l2_hit_rate=0.465, dram_bytes=99.0)}
    found = validate_l2.Validation(H200, compared, unseen, L2Calibration(), (), 0.1, 0.3, by_ncu, "")
    bars = validate_l2.summary(found)
    values = {name: entry["value"] for name, entry in bars.items()}
    assert values == {
        "points": 60, "hit_rate_mean_error_points": pytest.approx(4), "hit_rate_worst_error_points": pytest.approx(4),
        "dram_bytes_mean_error_percent": pytest.approx(4),
        "unseen_hit_rate_mean_error_points": pytest.approx(17 / 3),
        "unseen_hit_rate_worst_error_points": pytest.approx(9),
        "unseen_dram_bytes_mean_error_percent": pytest.approx(4),
        "methods_hit_rate_differ_points": pytest.approx(0.5), "methods_dram_bytes_differ_percent": pytest.approx(1.0),
        "simulated_decode_64x4096_cpu_s": 0.1, "counted_launch_median_s": 0.3,
    }  # fmt: skip
    missed = {"hit_rate_mean_error_points", "unseen_hit_rate_mean_error_points", "unseen_hit_rate_worst_error_points"}
    assert {name for name, entry in bars.items() if not entry["ok"]} == missed
    nothing = validate_l2.summary(validate_l2.Validation(H200, (), (), L2Calibration()))
    assert not any(entry["ok"] for entry in nothing.values())


def test_the_table_is_written_and_misses_are_kept(monkeypatch, tmp_path, sensitive):
    """The fit is to the grid alone; what it has not seen is simulated by it."""
    monkeypatch.setattr("labkit.specs.gpu_loading.load_gpu", lambda name: H200)
    monkeypatch.setattr(validate_l2, "measure_ceilings", lambda: Ceilings(4.5e12, 9e14, "measured (test)"))
    monkeypatch.setattr(l2_fit, "CAPACITY_SHARES", (0.5,))
    counted, unseen = made(sensitive, H200, L2Calibration(0.5, 16)), made(unseen_points()[:2], H200, L2Calibration(0.9))

    def count_all(gpu, asked):
        is_grid = asked == points()
        return (counted, [{"name": "x", "error": "y"}], [0.3]) if is_grid else (unseen, [], [9.0])

    monkeypatch.setattr(validate_l2, "count_all", count_all)
    monkeypatch.setattr(validate_l2, "count_with_ncu", lambda gpu, names: ({}, "no ncu"))
    out = tmp_path / "counters.json"
    assert validate_l2.main([str(out)]) == 1
    content = json.loads(out.read_text())
    assert len(content["rows"]) == len(sensitive)
    assert [row["name"] for row in content["unseen"]] == [point.name for point, _ in unseen]
    assert content["refused"] == [{"name": "x", "error": "y"}]
    assert content["summary"]["points"]["ok"] is False
    assert content["summary"]["counted_launch_median_s"]["value"] == 0.3
    assert content["calibration"]["capacity_share"] == 0.5
    roof = content["rows"][0]["roofline"]
    assert roof["ceilings"]["source"] == "measured (test)"
    assert roof["share_reached"] == roof["floor_s"] / content["rows"][0]["counted"]["kernel_time_s"]
    assert (content["both_methods"], content["ncu_refused"]) == ([], "no ncu")


def test_both_methods_are_compared(tmp_path, sensitive):
    counted = made(sensitive, H200, L2Calibration(0.5, 16))
    point, here = counted[0]
    other = dataclasses.replace(here, l2_hit_rate=here.l2_hit_rate - 0.004, dram_bytes=1.01 * here.dram_bytes)
    compared = l2_fit.compare(H200, counted, L2Calibration(0.5, 16))
    found = validate_l2.Validation(H200, compared, (), L2Calibration(), ncu={point.name: other, "gone": other})
    out = tmp_path / "counters.json"
    bars = validate_l2.write_validation(str(out), found)
    assert bars["methods_hit_rate_differ_points"]["value"] == pytest.approx(0.4)
    assert bars["methods_dram_bytes_differ_percent"]["value"] == pytest.approx(1)
    twice = json.loads(out.read_text())["both_methods"]
    assert [(each["name"], each["ncu"]["dram_bytes"]) for each in twice] == [(point.name, other.dram_bytes)]


def test_what_was_counted_before_is_simulated_again_without_a_card(monkeypatch, tmp_path, sensitive):
    """Counts, times and ncu's counters stay, the simulation is today's."""
    monkeypatch.setattr(l2_fit, "CAPACITY_SHARES", (0.5,))
    counted, unseen = made(sensitive, H200, L2Calibration(0.5, 16)), made(unseen_points()[:2], H200, L2Calibration(0.5))
    wrong = dataclasses.replace(counted[0][1], l2_hit_rate=0.9)
    ceilings = Ceilings(4.5e12, 9e14, "measured (test)")
    compared, others = (l2_fit.compare(H200, each, L2Calibration(0.9), ceilings) for each in (counted, unseen))
    found = validate_l2.Validation(
        H200, compared, others, L2Calibration(0.9), (), 0.1, 0.3, {sensitive[0].name: wrong}, ""
    )
    source, out = tmp_path / "counters.json", tmp_path / "again.json"
    validate_l2.write_validation(str(source), found)
    assert validate_l2.main([str(out), "--counted", str(source)]) == 1  # five launches are not sixty
    before, after = (json.loads(path.read_text()) for path in (source, out))
    assert [row["counted"] for row in after["rows"]] == [row["counted"] for row in before["rows"]]
    assert [row["roofline"] for row in after["unseen"]] == [row["roofline"] for row in before["unseen"]]
    assert after["both_methods"] == before["both_methods"]
    today = l2_fit.compare(H200, counted, l2_fit.fit(H200, counted))
    assert [row["hit_error_points"] for row in after["rows"]] == [each.hit_error for each in today]
    assert (after["counted_at"], "--counted" in after["command"]) == (before["made"], True)


def test_ncu_counts_all_its_points_in_one_process(monkeypatch):
    names, card = NCU_POINTS[:2], dataclasses.replace(H200, uuid="GPU-second")

    def run(command, metrics, kernel, card_uuid):
        assert card_uuid == "GPU-second"
        assert [json.loads(job)["variant"] for job in command[3:]] == ["full", UNPACKED]
        values = [1e9 if launch % 13 == 0 else 100.0 * (1 + launch // 13) for launch in range(26)]
        return tuple(
            NcuKernel(index, "k", dict(zip(metrics, (value, value / 2, value, 1.0), strict=True)))
            for index, value in enumerate(values)
        )

    monkeypatch.setattr(validate_l2, "run_ncu", run)
    found, why_not = validate_l2.count_with_ncu(card, names)
    assert why_not == ""
    assert [found[name].dram_bytes for name in names] == [100.0, 200.0]
    monkeypatch.setattr(validate_l2, "run_ncu", lambda *_, **__: ())
    assert validate_l2.count_with_ncu(card, names) == ({}, "ncu saw 0 launches (would work: 13 of each point)")


def test_what_was_counted_on_an_h200_is_still_what_is_simulated():
    """The shipped calibration and today's launches against the recorded counters, within the promised bars."""
    card, counted = l2_fit.read_counted(ROOT / "results" / "counters.json")
    assert card == H200.name
    compared = l2_fit.compare(H200, counted, load_l2_calibration(H200))
    assert len(compared) >= 60
    bars = l2_fit.error_bars(compared)
    assert all(entry["ok"] for entry in bars.values()), bars


def test_the_page_is_made_of_the_results():
    done = subprocess.run([sys.executable, str(ROOT / "tools" / "make_l2_table.py"), "--check"], check=False)
    assert done.returncode == 0, "run tools/make_l2_table.py"


def test_without_a_card_it_is_one_line(capsys, tmp_path):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a card")
    assert validate_l2.main([str(tmp_path / "x.json")]) == 2
    assert "no NVIDIA card" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        validate_l2.main([])
