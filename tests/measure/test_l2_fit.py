"""The fit of the L2 on counts that a simulation with known settings made, and each series foretold by the others."""

import dataclasses
import json
from pathlib import Path

import pytest

from labkit.errors import FileFormatError
from labkit.measure import l2_fit
from labkit.measure.l2_calibration import L2Calibration
from labkit.measure.l2_points import points, unseen_points
from labkit.measure.l2_simulator import simulate_attention
from labkit.specs.gpu_catalogue import catalogue_gpu

ROOT = Path(__file__).parents[2]
SMALL_CARD = dataclasses.replace(catalogue_gpu("H200"), l2_bytes=6 * 2**20, sm_count=20)
NAMES = ("shared 100 % of 32 × 4096", "prefill 4 × 512 over 8192", "prefill 1 × 2048 over 14336 group 1",
         "shared 75 % of 32 × 4096", "decode 1 × 32768 bfloat16")  # fmt: skip


@pytest.fixture(autouse=True)
def _coarse(monkeypatch):
    monkeypatch.setattr(l2_fit, "CAPACITY_SHARES", (0.4, 0.65, 0.9))


def made(calibration, names=NAMES, change=lambda counters: counters):
    """`change` alters the counters of the last point."""
    chosen = [point for point in points() if point.name in names]
    counted = [
        (point, simulate_attention(point.shape, SMALL_CARD, point.variant, calibration=calibration).counters)
        for point in chosen
    ]
    return [*counted[:-1], (counted[-1][0], change(counted[-1][1]))]


@pytest.mark.parametrize("share", [0.4, 0.9])
def test_the_fit_finds_the_settings_that_made_the_counts(share):
    counted = made(
        L2Calibration(
            share,
            16,
            partitions=2,
            lockstep_next=20.0,
            lockstep_cluster=6.0,
            coalesced_later=0.1,
            coalesced_row_power=1.5,
        )
    )
    found = l2_fit.fit(SMALL_CARD, counted)
    assert (found.capacity_share, found.ways, found.calibrated) == (share, 16, True)
    assert max(abs(each.hit_error) for each in l2_fit.compare(SMALL_CARD, counted, found)) == 0


def test_a_series_that_is_left_out_has_no_say():
    """One series was counted with another L2: without it the fit is that of the others, and its own error shows."""
    truth, other = (L2Calibration(share, 16, partitions=2, lockstep_cluster=6.0) for share in (0.4, 0.9))
    prefill = [name for name in NAMES if name.startswith("prefill")]
    counted = made(truth, [name for name in NAMES if name not in prefill]) + made(other, prefill)
    found = {each.group: each for each in l2_fit.held_out(SMALL_CARD, counted)}
    assert {group: len(each.compared) for group, each in found.items()} == {
        "shared prefix": 2, "batch size": 1, "prefill": 2,
    }  # fmt: skip
    assert (found["prefill"].calibration.capacity_share, found["prefill"].calibration.source) == (
        0.4, "fitted to 3 counted launches",
    )  # fmt: skip
    assert max(abs(each.hit_error) for each in found["prefill"].compared) > 1


def test_errors_of_what_was_left_out_are_written(tmp_path):
    """Means over launches, not over series."""
    counted = made(L2Calibration(0.65, 16, partitions=2))
    content = {
        "card": "H200",
        "rows": [{"name": point.name, "counted": dataclasses.asdict(each) | {"new": 1}} for point, each in counted],
    }
    source, out = tmp_path / "counters.json", tmp_path / "out.json"
    source.write_text(json.dumps(content))
    assert l2_fit.main([str(source), str(out)]) in (0, 1)
    written = json.loads(out.read_text())
    errors = [(row["hit_rate_mean_error_points"], row["launches"]) for row in written["rows"]]
    assert written["card"] == "H200"
    assert sum(launches for _, launches in errors) == len(counted)
    mean = sum(error * launches for error, launches in errors) / len(counted)
    assert written["summary"]["hit_rate_mean_error_points"]["value"] == pytest.approx(mean)


@pytest.mark.parametrize("text", ["", "{}", '{"card": "H200", "rows": [{"name": "x"}]}', '{"card": 1, "rows": 3}'])
def test_files_of_another_form_are_refused_in_one_line(tmp_path, capsys, text):
    source = tmp_path / "counters.json"
    source.write_text(text)
    with pytest.raises(FileFormatError):
        l2_fit.read_counted(source)
    assert l2_fit.main([str(source), str(tmp_path / "out.json")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_recorded_errors_are_those_of_the_recorded_counters():
    """Every series of the counters is held out, and the bars are met but the worst of single waves: how many of their
    reads meet differs from launch to launch, and what is left knows no other launches of the kind."""
    written = json.loads((ROOT / "results" / "counters-held-out.json").read_text())
    _, counted = l2_fit.read_counted(ROOT / "results" / "counters.json")
    series = {}
    for point, _ in counted:
        series[point.group] = series.get(point.group, 0) + 1
    assert {row["left_out"]: row["launches"] for row in written["rows"]} == series
    missed = {name for name, entry in written["summary"].items() if not entry["ok"]}
    assert missed <= {"hit_rate_worst_error_points"}
    worst = {row["left_out"]: row["hit_rate_worst_error_points"] for row in written["rows"]}
    assert max(value for name, value in worst.items() if not name.startswith("one wave")) <= 8


def test_unseen_launches_are_of_other_shapes():
    unseen, seen = unseen_points(), {point.shape for point in points()}
    assert len({point.name for point in unseen}) == len(unseen) == 36
    assert not seen & {point.shape for point in unseen}
    assert unseen == unseen_points()
    assert unseen != unseen_points(seed=3)
    assert {point.variant for point in unseen} >= {"full", "prefill", "shared prefix"}
    assert any(len(set(point.shape.batch.context_lens)) > 1 for point in unseen)
