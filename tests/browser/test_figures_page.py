"""Every figure in Chromium with our plotly.js: drawn, hostile names letter by letter, no request, no script run."""

from __future__ import annotations

import plotly.io as pio
import pytest
from plotly.offline import get_plotlyjs

from labkit.figures import (
    block_map,
    kv_over_time,
    l2,
    latency,
    memory_breakdown,
    memory_timeline,
    pareto,
    requests,
    throughput,
)
from labkit.figures.runs import distinctly_named
from labkit.specs.engine_config import EngineConfig
from labkit.text import plain
from tests.browser.conftest import open_page
from tests.figures.samples import HOSTILE, sample_record, state_records

# Texts of each drawn figure that lie on another one or leave the figure.
COLLISIONS = """() => [...document.querySelectorAll('.js-plotly-plot')].flatMap((plot) => {
  const edge = plot.getBoundingClientRect();
  const texts = [...plot.querySelectorAll('text')]
    .filter((text) => text.textContent.trim() && getComputedStyle(text).visibility !== 'hidden')
    .map((text) => [text.textContent, text.getBoundingClientRect()]).filter(([, box]) => box.width > 1);
  const cut = texts.filter(([, box]) => box.left < edge.left - 1 || box.right > edge.right + 1
    || box.top < edge.top - 1 || box.bottom > edge.bottom + 1).map(([text]) => `${plot.id} cut: ${text}`);
  const met = texts.flatMap(([text, a], at) => texts.slice(at + 1).filter(([, b]) =>
    Math.min(a.right, b.right) - Math.max(a.left, b.left) > 2
    && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 4).map(([other]) => `${plot.id}: ${text} × ${other}`));
  return [...cut, ...met];
})"""


@pytest.fixture(scope="module")
def page_file(tmp_path_factory):
    hostile = state_records()["hostile"]
    runs = [hostile, sample_record(run_id="other")]
    figures = [
        memory_breakdown.plot_memory_breakdown(hostile.plan, hostile, hostile),
        latency.plot_latency(runs), throughput.plot_throughput(runs), kv_over_time.plot_kv_over_time(hostile),
        block_map.plot_block_map(hostile), pareto.plot_pareto(runs, baseline=hostile), l2.plot_l2(runs),
        requests.plot_requests(runs),
    ]  # fmt: skip
    parts = [pio.to_html(figure, full_html=False, include_plotlyjs=False, include_mathjax=False, div_id=f"f{at}")
             for at, figure in enumerate(figures)]  # fmt: skip
    path = tmp_path_factory.mktemp("figures") / "page.html"
    head = f'<!doctype html><meta charset="utf-8"><title>figures</title><script>{get_plotlyjs()}</script>'
    path.write_text(head + "".join(parts), encoding="utf-8")
    return path


def test_hostile_names_are_shown_and_never_run(chromium, page_file):
    watched = open_page(chromium, own=page_file.as_uri(), width=1000)
    page = watched.page
    page.goto(page_file.as_uri())
    page.wait_for_function("() => document.querySelectorAll('.js-plotly-plot .main-svg').length >= 16")
    assert page.locator(".js-plotly-plot").count() == 8
    shown = " ".join(page.locator("#f5 text").all_text_contents() + page.locator("#f7 text").all_text_contents())
    assert plain(HOSTILE, 24) in shown
    assert page.locator("svg img, svg image[href='x'], svg b").count() == 0
    assert page.title() == "figures"
    assert watched.foreign == []
    assert watched.errors == []


def crowded(number: int) -> list:
    """Runs that differ in two knobs and have long names, two of them the same."""
    names = [f"fp8 KV, block {8 << index % 3}, {16 + 16 * (index // 2)} requests at once, eager" for index in range(8)]
    made = [
        sample_record(EngineConfig(block_size=8 << index % 3, max_num_seqs=16 + index), run_id=f"r{index}",
                      name=names[index], slowness=1 + index / 3)
        for index in range(number)
    ]  # fmt: skip
    return list(distinctly_named(made))


def figures_of(runs: list, narrow: bool) -> list:
    last = runs[-1]
    infos = {
        memory_breakdown: memory_breakdown.get_memory_breakdown_info(last.plan, last, runs[0]),
        throughput: throughput.get_throughput_info(runs),
        latency: latency.get_latency_info(runs),
        pareto: pareto.get_pareto_info(runs),
        requests: requests.get_requests_info(runs),
        l2: l2.get_l2_info(runs[-6:]),
        kv_over_time: kv_over_time.get_kv_over_time_info(last),
        memory_timeline: memory_timeline.get_memory_timeline_info(last),
        block_map: block_map.get_block_map_info(last),
    }
    drawn = []
    for room, info in infos.items():
        draw = getattr(room, f"draw_{room.__name__.rpartition('.')[2]}")
        takes_narrow = "narrow" in draw.__code__.co_varnames[: draw.__code__.co_argcount]
        drawn.append(draw(info, narrow=narrow) if takes_narrow else draw(info))
    return drawn


@pytest.mark.parametrize(("width", "narrow"), [(340, True), (700, False)])
def test_no_text_lies_on_another_or_is_cut(chromium, tmp_path, width, narrow):
    along = [
        sample_record(EngineConfig(block_size=8 << at), run_id=f"b{at}", name=f"block {8 << at}") for at in range(8)
    ]
    figures = [figure for runs in (crowded(1), crowded(8), along) for figure in figures_of(runs, narrow)]
    parts = [pio.to_html(figure, full_html=False, include_plotlyjs=False, include_mathjax=False, div_id=f"f{at}",
                         default_width=f"{width}px", default_height=f"{figure.layout.height or 340}px")
             for at, figure in enumerate(figures)]  # fmt: skip
    path = tmp_path / "page.html"
    head = f'<!doctype html><meta charset="utf-8"><title>figures</title><script>{get_plotlyjs()}</script>'
    path.write_text(head + "".join(parts), encoding="utf-8")
    page = open_page(chromium, own=path.as_uri(), width=width + 40).page
    page.goto(path.as_uri(), timeout=120_000)
    page.wait_for_function(
        f"() => document.querySelectorAll('.main-svg').length >= {2 * len(figures)}", timeout=120_000
    )
    page.wait_for_timeout(500)
    assert page.evaluate(COLLISIONS) == []
    page.context.close()
