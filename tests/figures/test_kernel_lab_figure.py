"""The lab's pictures carry the points, their method, and words where there is nothing."""

import pytest

from labkit.figures import kernel_lab
from labkit.measure.kernel_lab import lab_settings, run_lab
from labkit.measure.l2_claims import judge_claims


@pytest.fixture(scope="module")
def result():
    return run_lab(lab_settings("L4", num_seqs=4, context_len=256, block_sizes=(16, 32), prefix_shares=(0.0, 1.0)))


def test_lines(result):
    info = kernel_lab.get_kernel_lab_info(result)
    for theme, narrow in (("light", False), ("dark", True)):
        figure = kernel_lab.draw_kernel_lab(info, theme, narrow)
        assert len(figure.data) == 9
        assert [trace.showlegend for trace in figure.data].count(True) == 3
    rates = [100 * point.counters.l2_hit_rate for _, point in sorted(result.line("full").items())]
    assert list(figure.data[0].y) == rates
    assert list(figure.data[0].x) == ["16", "32"]


def test_heat_map_and_its_gaps(result):
    info = kernel_lab.get_kernel_lab_info(result)
    figure = kernel_lab.draw_hit_map(info)
    narrow = kernel_lab.draw_hit_map(info, narrow=True)
    assert (figure.data[0].showscale, narrow.data[0].showscale) == (True, False), "each cell has its number anyway"
    assert narrow.layout.title.text == "L2 hits, simulated"
    assert [list(row) for row in figure.data[0].z] == [
        [100 * rate for rate in row] for row in info.heat
    ]  # fmt: skip
    assert info.heat[1][0] > info.heat[0][0] + 0.5
    some = run_lab(
        result.settings, lambda shape, gpu, variant: None if shape.block_size == 16 else result.heat[0].counters
    )
    gaps = kernel_lab.get_kernel_lab_info(some)
    assert [row[0] for row in gaps.heat] == [None, None]
    assert kernel_lab.draw_hit_map(gaps).data[0].text[0][0] == ""


def test_words_and_tables(result):
    info = kernel_lab.get_kernel_lab_info(result)
    sentence = kernel_lab.caption(info)
    assert sentence.startswith("L4, simulated: from block 16 to 32")
    assert "shortest that bytes and operations allow" in sentence
    table = kernel_lab.table(info)
    assert len(table) == 6
    assert "simulated" in table.caption
    assert "ceilings: data sheet, 90 % of its bandwidth" in table.caption
    assert {tuple(row[-2:]) for row in table.rows} == {("memory", "–")}
    claims = kernel_lab.claims_table(judge_claims(result))
    assert [row[0] for row in claims] == ["C01", "C02", "C03", "C28"]


def test_nothing_yet():
    info = kernel_lab.get_kernel_lab_info(None)
    assert kernel_lab.caption(info) == "Nothing was counted yet."
    assert kernel_lab.draw_kernel_lab(info).layout.annotations[0].text
    assert kernel_lab.draw_hit_map(info).layout.annotations[0].text
    assert len(kernel_lab.table(info)) == 0
    assert len(kernel_lab.claims_table(())) == 0
