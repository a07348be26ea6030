"""The kernel lab without a browser: controls decide, errors are said, verdicts come from the points."""

from __future__ import annotations

from labkit.measure.run_record import Counters
from labkit.widgets import KernelLab


def small(**rest):
    return KernelLab("A10", num_seqs=2, context_len=128, block_sizes=(16, 32), prefix_shares=(0.0, 1.0), **rest)


def test_run_shows_points_and_verdicts():
    lab = small()
    assert lab.conclusion.text == "Nothing was counted yet."
    lab.run_button.click()
    assert lab.status.text == "10 launches, simulated."
    assert [line.heading[:3] for line in lab.claims] == ["C01", "C02", "C03", "C28"]
    assert all(line.text.endswith("[simulated, A10]") for line in lab.claims)
    assert lab.conclusion.text.startswith("A10, simulated")
    assert lab.chart.figure["data"][0]["x"] == ["16", "32"]
    assert lab.heat.figure["data"][0]["type"] == "heatmap"
    assert not lab.run_button.disabled


def test_controls_decide():
    lab = small()
    lab.card.value, lab.num_seqs.value, lab.context_len.value = "H200", 4, 256
    lab.kv_cache_dtype.value, lab.group.value, lab.prefix_percent.value = "fp8", 8, 50
    lab.block_sizes.value = "64, 8 ,8"
    settings = lab.settings()
    assert (settings.gpu.name, settings.num_seqs, settings.context_len) == ("H200", 4, 256)
    assert (settings.kv_cache_dtype, settings.group, settings.prefix_share) == ("fp8", 8, 0.5)
    assert settings.block_sizes == (8, 64)
    assert settings.shape(8).num_heads == 64


def test_wrong_block_sizes_are_said_and_nothing_runs():
    lab = small()
    for text in ("", "a", "8, -1", "8;16", "0", "300", "99999", ",".join(["8"] * 13)):
        lab.block_sizes.value = text
        lab.run()
        assert lab.status.level == "bad", text
        assert not lab.run_button.disabled
    assert lab.result is None


def test_the_own_card_is_counted_and_others_are_simulated():
    counted = Counters("measured (test)", "A10", 0.25, 1e6, 4e11, 1e-5)
    lab = small(count=lambda shape, gpu, variant: counted)
    lab.run()
    assert lab.status.text == "10 launches, measured."
    lab.card.value = "L4"
    lab.run()
    assert lab.status.text == "10 launches, simulated."


def test_a_theme_is_drawn_again():
    lab = small()
    lab.run()
    before = lab.chart.figure["data"][0]["line"]["color"]
    lab.screen.theme = "dark"
    assert lab.chart.figure["data"][0]["line"]["color"] != before
