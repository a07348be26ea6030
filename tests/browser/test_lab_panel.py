"""The panel in real JupyterLab: the way through it on a real model, then looks, keyboard and names on a made-up one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.browser.conftest import HUB_TOKEN, LAB_TOKEN, make_notebook, open_notebook, run_all

ROOT = Path(__file__).resolve().parents[2]

MEMORY_TOTAL = """() => {
  const plot = document.querySelectorAll('.lk-plot')[0];
  if (!plot || !plot.data) return 0;
  return plot.data.reduce((sum, trace) => sum + trace.x[0], 0);
}"""
CHART_POINTS = "() => document.querySelectorAll('.lk-plot')[1]?.data?.[0]?.x?.length || 0"
FAKE = """
from dataclasses import replace
from tests.figures.samples import HOSTILE, sample_model, state_records
from tests.widgets.fake_session import FakeSession
from labkit.widgets import Panel
"""


@pytest.fixture
def fresh_lab(chromium, lab):
    """The server with no page and no kernel of an earlier test: an open page would save its old outputs again."""
    lab.end_sessions()
    yield lab
    for context in chromium.contexts:
        context.close()
    lab.end_sessions()


def wait_for_plots(page, count: int = 2) -> None:
    page.wait_for_function(f"() => document.querySelectorAll('.lk-plot .main-svg').length >= {count}", timeout=60_000)


def press_run(page) -> None:
    page.locator(".lk-panel .jupyter-button").filter(has_text="Run").first.click()


def open_fake(chromium, lab, name: str, call: str, **options):
    make_notebook(lab.folder / name, f"{FAKE}\npanel = {call}\npanel")
    watched = open_notebook(chromium, lab, name, **options)
    run_all(watched)
    wait_for_plots(watched.page)
    return watched


def files_with_a_token(lab) -> list[str]:
    """Notebooks, reports and everything in labkit's own folder that carry a token of the server or the hub."""
    written = [path for place in (lab.folder, lab.folder.parent / "labkit-home") for path in place.rglob("*")]
    files = [path for path in written if path.is_file()]
    assert {".ipynb", ".sqlite3", ".html"} <= {path.suffix for path in files}
    return [path.name for path in files for token in (LAB_TOKEN, HUB_TOKEN) if token.encode() in path.read_bytes()]


@pytest.mark.usefixtures("smollm2_gguf")
def test_the_way_through_the_quickstart(chromium, fresh_lab):
    """Open, run all, turn a knob, see the plan redrawn, run, see the chart grow, cancel, reload, still see it."""
    shutil.copy(ROOT / "notebooks" / "01-quickstart.ipynb", fresh_lab.folder / "quickstart.ipynb")
    watched = open_notebook(chromium, fresh_lab, "quickstart.ipynb")
    page = watched.page
    run_all(watched)
    wait_for_plots(page)
    assert page.evaluate(MEMORY_TOTAL) == pytest.approx(2.0, abs=0.01)
    assert page.locator(".lk-answer .lk-words").inner_text().startswith("Fits: ")

    box = page.get_by_label("cpu_memory_gib in GiB")
    box.fill("1.5")
    box.press("Tab")
    page.wait_for_function(f"() => Math.abs(({MEMORY_TOTAL})() - 1.5) < 0.01", timeout=10_000)

    press_run(page)
    page.wait_for_function(f"() => ({CHART_POINTS})() >= 1", timeout=60_000)
    before = page.evaluate(CHART_POINTS)
    page.wait_for_function(f"() => ({CHART_POINTS})() > {before}", timeout=60_000)
    page.locator(".lk-panel .jupyter-button").filter(has_text="Cancel").click()
    page.get_by_text("Cancelled; ").wait_for(timeout=20_000)
    assert page.locator(".lk-runs tbody tr").count() == 1
    assert "cancelled" in page.locator(".lk-runs tbody tr").inner_text()

    page.locator(".lk-panel .jupyter-button").filter(has_text="Report").click()
    page.get_by_text("Report written").wait_for(timeout=20_000)

    points = page.evaluate(CHART_POINTS)
    page.evaluate("() => globalThis.jupyterapp.commands.execute('docmanager:save')")
    page.wait_for_function("() => !globalThis.jupyterapp.shell.currentWidget.context.model.dirty", timeout=10_000)
    page.reload()
    wait_for_plots(page)
    page.wait_for_function(f"() => Math.abs(({MEMORY_TOTAL})() - 1.5) < 0.01", timeout=20_000)
    assert page.evaluate(CHART_POINTS) == points
    assert files_with_a_token(fresh_lab) == []
    assert "SENTINEL" not in page.inner_text("body")
    assert watched.foreign == []
    assert watched.errors == []


WIDTHS = """() => {
  const panel = document.querySelector('.lk-panel');
  const visible = (element) => element.clientWidth > 0 && !element.closest('.lk-scroll');
  const cut = [...panel.querySelectorAll('.lk-text, .lk-knob, .lk-bar, .lk-column, .lk-chart, .jupyter-button')]
    .filter((element) => visible(element) && element.scrollWidth > element.clientWidth + 1);
  return {over: panel.scrollWidth - panel.clientWidth, cut: cut.map((element) => element.className)};
}"""
UNNAMED = """() => {
  const panel = document.querySelector('.lk-panel');
  const name = (element) => element.getAttribute('aria-label') || element.labels?.[0]?.innerText
    || (element.tagName === 'BUTTON' ? element.innerText.trim() : '');
  const controls = panel.querySelectorAll('button, input, select, textarea, progress, [role=img]');
  return [...controls].filter((element) => !name(element)).map((element) => element.outerHTML.slice(0, 120));
}"""
CHOSEN_IN_VIEW = """() => {
  const box = document.querySelector('.lk-runs .lk-scroll').getBoundingClientRect();
  const row = document.querySelector('.lk-runs tbody tr:last-child');
  const place = row.getBoundingClientRect();
  return row.getAttribute('aria-selected') === 'true' && place.top >= box.top && place.bottom <= box.bottom + 1;
}"""
MODEBAR = "() => [...document.querySelectorAll('.lk-panel .modebar-btn')].map((one) => one.dataset.title)"
SAID_GONE = """() => [...document.querySelectorAll('.lk-panel, .lk-panel *')]
  .map((element) => getComputedStyle(element, '::before'))
  .filter((style) => style.content.includes('kernel was restarted'))"""
# Words of the panel with less contrast than WCAG's 4.5 against what is behind them; what is disabled may be weak.
WEAK = """() => {
  const parse = (color) => color.match(/[\\d.]+/g).map(Number);
  const linear = (value) => (value / 255 <= 0.03928 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4);
  const luminance = (color) => 0.2126 * linear(color[0]) + 0.7152 * linear(color[1]) + 0.0722 * linear(color[2]);
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const color = parse(getComputedStyle(at).backgroundColor);
      if (color.length < 4 || color[3] > 0.5) return color;
    }
    return [255, 255, 255];
  };
  const weak = [];
  const walker = document.createTreeWalker(document.querySelector('.lk-panel'), NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const [text, element] = [walker.currentNode.textContent.trim(), walker.currentNode.parentElement];
    if (!text || !element.getClientRects().length || element.closest('svg, style, option, [disabled]')) continue;
    const [a, b] = [luminance(parse(getComputedStyle(element).color)), luminance(behind(element))];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < 4.5) weak.push(`${text.slice(0, 40)}: ${contrast.toFixed(2)}`);
  }
  return weak;
}"""
LOOKS = """() => {
  const words = document.querySelector('.lk-answer .lk-words');
  const chart = document.querySelector('.lk-plot .xtitle');
  return [getComputedStyle(words).color, getComputedStyle(chart).fill];
}"""


def test_widths_themes_names_and_hostile_text(chromium, fresh_lab):
    records = "[replace(r, run_id=str(at)) for at, r in enumerate(state_records().values()) if r]"
    call = f"Panel(FakeSession(model=sample_model(HOSTILE), records={records}))"
    watched = open_fake(chromium, fresh_lab, "looks.ipynb", call, height=1400)
    page = watched.page
    page.evaluate("() => globalThis.jupyterapp.shell.collapseLeft()")
    page.locator(".lk-panel button").filter(has_text="Paste").click()
    page.get_by_label("command, settings or log").fill("vllm serve m --blok-size 3")
    page.locator(".lk-panel button").filter(has_text="Read it").click()
    page.get_by_text("did you mean --block-size").wait_for(timeout=10_000)
    for width in (1440, 1024, 640, 390):
        page.set_viewport_size({"width": width, "height": 1400})
        page.wait_for_timeout(700)
        assert page.evaluate(WIDTHS) == {"over": 0, "cut": []}, width
    for tab in ("Throughput and latency", "Limits", "L2 and bandwidth", "KV over time", "Blocks", "Requests"):
        page.locator(".widget-toggle-button").filter(has_text=tab).click()
        page.wait_for_timeout(250)
    assert page.evaluate(UNNAMED) == []
    assert page.locator(".lk-panel img").count() == 0
    assert set(page.evaluate(MODEBAR)) == {"Download plot as a PNG", "Reset axes"}
    assert "<img src=x onerror=alert(1)>" in page.locator(".lk-answer .lk-heading").inner_text()

    page.locator(".lk-runs tbody tr").last.click()
    page.wait_for_timeout(300)
    assert page.evaluate(CHOSEN_IN_VIEW), "a click must not scroll the chosen row away"
    page.locator(".lk-runs tbody tr").first.click()
    page.locator(".lk-panel .jupyter-button").filter(has_text="Pin as baseline").click()
    page.locator(".lk-runs tr.lk-pinned").first.wait_for(timeout=10_000)
    assert page.evaluate(WEAK) == []
    light = page.evaluate(LOOKS)
    page.evaluate("() => globalThis.jupyterapp.commands.execute('apputils:change-theme', {theme: 'JupyterLab Dark'})")
    page.wait_for_function(f"(light) => ({LOOKS})().every((color, at) => color !== light[at])", arg=light)
    assert page.evaluate(WEAK) == []
    page.evaluate("() => globalThis.jupyterapp.commands.execute('apputils:change-theme', {theme: 'JupyterLab Light'})")
    assert watched.foreign == []
    assert watched.errors == []


def test_set_run_and_pin_by_keyboard_alone(chromium, fresh_lab):
    watched = open_fake(chromium, fresh_lab, "keys.ipynb", "Panel(FakeSession(pause_s=0.01))")
    page = watched.page
    focus = "() => document.activeElement.innerText || document.activeElement.getAttribute('aria-label') || ''"
    page.get_by_label("block_size in tokens").focus()
    page.keyboard.press("ArrowUp")
    page.wait_for_function("() => document.querySelector('[aria-label=\"block_size in tokens\"]').value === '32'")
    # What was refused stays in the box, and the value of before, typed again, takes the error away.
    box, error = page.get_by_label("block_size in tokens"), page.locator(".lk-knob-error").filter(has_text="'abc'")
    box.fill("abc")
    box.press("Tab")
    error.wait_for(timeout=10_000)
    assert box.input_value() == "abc"
    box.fill("32")
    box.press("Tab")
    error.wait_for(state="detached", timeout=10_000)
    assert box.input_value() == "32"
    box.focus()
    for _ in range(40):
        page.keyboard.press("Shift+Tab")
        if page.evaluate(focus).strip() == "Run":
            break
    page.keyboard.press("Enter")
    page.get_by_text("1 run finished").wait_for(timeout=20_000)
    for _ in range(12):
        page.keyboard.press("Tab")
        if page.evaluate(focus).strip() == "Pin as baseline":
            break
    page.keyboard.press("Enter")
    page.locator(".lk-runs tr.lk-pinned").wait_for(timeout=5_000)
    assert watched.errors == []

    # The panel of a kernel that was restarted says so once.
    page.evaluate("() => globalThis.jupyterapp.shell.currentWidget.context.sessionContext.session.kernel.restart()")
    page.wait_for_function(f"() => ({SAID_GONE})().length === 1", timeout=60_000)
