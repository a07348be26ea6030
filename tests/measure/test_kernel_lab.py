"""The lab's points and the verdicts on them: from simulated points, and from points planted to say the opposite."""

import dataclasses

import pytest

from labkit.errors import OutOfRangeError
from labkit.measure.kernel_lab import LINE_VARIANTS, card_count, lab_settings, run_lab
from labkit.measure.l2_claims import UNPACKED, judge_claims, recorded_counters
from labkit.measure.roofline import Ceilings
from labkit.measure.run_record import Counters


@pytest.fixture(scope="module")
def simulated():
    return run_lab(lab_settings("A10", num_seqs=8, context_len=512))


def planted(result, rates, method="measured (test)", speeds=None):
    """`result` with hit rates by block size for the full kernel; other kernels stay."""

    def change(point):
        if point.variant != "full":
            return dataclasses.replace(point, counters=dataclasses.replace(point.counters, method=method))
        rate = rates.get(point.block_size, 0.5)
        counters = Counters(method, "A10", rate, 1e6 * (1 - rate), (speeds or {}).get(point.block_size, 4e11), 1e-5)
        return dataclasses.replace(point, counters=counters)

    return dataclasses.replace(result, lines=tuple(map(change, result.lines)), heat=tuple(map(change, result.heat)))


def findings(result):
    return {each.claim_id: each.finding for each in judge_claims(result)}


def test_points_of_lines_and_heat(simulated):
    settings = simulated.settings
    assert len(simulated.lines) == len(LINE_VARIANTS) * len(settings.block_sizes)
    assert len(simulated.heat) == len(settings.prefix_shares) * len(settings.block_sizes)
    assert simulated.line(UNPACKED)[16].counters.l2_hit_rate == pytest.approx(0.75, abs=0.02)
    shared = [point.counters.l2_hit_rate for point in simulated.heat if point.prefix_share == 0.5]
    assert shared == pytest.approx([0.5 * 7 / 8] * 6, abs=0.03)


def test_every_launch_has_its_roofline(simulated):
    """600 GB/s in the A10's data sheet, nine tenths of it for a kernel that reads."""
    point = simulated.line("full")[16]
    roof = point.roofline
    assert roof.flops == 4 * 128 * 32 * 8 * 512
    assert (roof.bound, roof.floor_s) == ("memory", pytest.approx(point.counters.dram_bytes / 540e9))
    assert roof.share_reached is None
    counted = Counters("measured (test)", "A10", 0.25, 1e6, 4e11, 2e-5)
    own = Ceilings(1e11, 1e14, "measured on a card")
    found = run_lab(lab_settings("A10", block_sizes=(16,)), lambda *_: counted, ceilings=own).lines[0].roofline
    assert (found.floor_s, found.share_reached) == (pytest.approx(1e-5), pytest.approx(0.5))


def test_the_simulation_contradicts_all_four(simulated):
    assert findings(simulated) == dict.fromkeys(("C01", "C02", "C03", "C28"), "contradicted")
    first = judge_claims(simulated)[0]
    assert (first.card, first.method.split()[0]) == ("A10", "simulated")
    assert "2.1 times what an A10's memory can give" in first.evidence


def test_data_as_claimed_support_the_claims(simulated):
    rates = {8: 0.82, 16: 0.925, 32: 0.76, 64: 0.6, 128: 0.5, 256: 0.4}
    speeds = {16: 4e11, 32: 3e11}
    assert findings(planted(simulated, rates, speeds=speeds)) == dict.fromkeys(
        ("C01", "C02", "C03", "C28"), "supported"
    )


def test_each_claim_turns_on_its_own_number(simulated):
    flat = dict.fromkeys((8, 16, 32, 64, 128, 256), 0.5)
    assert findings(planted(simulated, flat))["C01"] == "contradicted"
    assert findings(planted(simulated, flat | {32: 0.9}))["C01"] == "contradicted"
    assert findings(planted(simulated, flat | {32: 0.84}))["C02"] == "supported"
    assert findings(planted(simulated, flat, speeds={16: 4e11, 32: 3.7e11}))["C03"] == "contradicted"


def test_missing_block_sizes_decide_nothing():
    few = run_lab(lab_settings("L4", num_seqs=2, context_len=64, block_sizes=(64,), prefix_shares=(0.0,)))
    assert findings(few) == {"C01": "not decided", "C02": "not decided", "C03": "not decided", "C28": "contradicted"}
    shared = run_lab(lab_settings("L4", num_seqs=32, context_len=512, prefix_share=1.0))
    assert findings(shared)["C28"] == "not decided"


def test_launches_that_cannot_be_counted_are_left_out(simulated):
    counters = simulated.lines[0].counters
    seen = []
    result = run_lab(
        simulated.settings,
        lambda shape, gpu, variant: None if variant == "tile = block" else counters,
        lambda done, total: seen.append((done, total)),
    )
    assert {point.variant for point in result.lines} == {"full", UNPACKED}
    assert seen[-1] == (48, 48)
    nothing = run_lab(simulated.settings, lambda *_: None)
    assert (nothing.method, nothing.lines) == ("", ())
    assert set(findings(nothing).values()) == {"not decided"}


def test_settings_are_checked():
    for wrong in ({"prefix_share": 1.1}, {"prefix_shares": (-0.1,)}, {"block_sizes": ()}):
        with pytest.raises(OutOfRangeError):
            lab_settings("A10", **wrong)
    assert not lab_settings("auto").gpu.is_cpu
    assert card_count(lab_settings("A10").gpu) is None


def test_recorded_counters_have_a_source():
    recorded = recorded_counters()
    assert "H200" in recorded["source"]
    assert [row["block_size"] for row in recorded["rows"]] == [8, 16, 32, 64, 128]
