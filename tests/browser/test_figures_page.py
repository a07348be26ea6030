"""Every figure in Chromium with our plotly.js: drawn, hostile names letter by letter, no request, no script run."""

from __future__ import annotations

import plotly.io as pio
import pytest
from plotly.offline import get_plotlyjs

from labkit.figures import block_map, kv_over_time, l2, latency, memory_breakdown, pareto, requests, throughput
from labkit.text import plain
from tests.browser.conftest import open_page
from tests.figures.samples import HOSTILE, sample_record, state_records


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
