"""The report in Chromium with the network cut: drawn, quiet, narrow, printable, and blind to hostile names."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS / "figures"), str(TESTS / "report")]

from hostile_names import HOSTILE_NAMES, with_text_everywhere  # noqa: E402
from samples import sample_plan, sample_record  # noqa: E402

from labkit.advice import recommend  # noqa: E402
from labkit.report import Notice, write_report  # noqa: E402
from labkit.specs.engine_config import EngineConfig  # noqa: E402

CREATED = "2026-11-30T12:00:00Z"
NUM_FIGURES = 8
ALL_DRAWN = "document.querySelectorAll('.plot[data-drawn]').length === document.querySelectorAll('.plot').length"


@pytest.fixture
def browser(chromium):
    return chromium


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    runs = [
        sample_record(EngineConfig(block_size=size), run_id=f"r{size}", name=f"block {size}", slowness=slow)
        for size, slow in ((16, 1.0), (8, 1.3), (32, 0.7))
    ]
    path = tmp_path_factory.mktemp("report") / "tuning report.html"
    return write_report(path, runs, [], recommend([], runs, what_if=sample_plan), created=CREATED)


class Visit:
    """A page opened with all network aborted; remembers requests, dialogs and console messages."""

    def __init__(self, browser, path: Path, width: int = 1280, scheme: str = "light") -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.requests: list[str] = []
        self.dialogs: list[str] = []
        self.messages: list[str] = []
        address = path.as_uri()
        self.page.route("**/*", lambda route: self._route(route, address))
        self.page.on("dialog", lambda dialog: (self.dialogs.append(dialog.message), dialog.dismiss()))
        self.page.on("console", lambda message: self.messages.append(message.text))
        self.page.on("pageerror", lambda error: self.messages.append(str(error)))
        self.page.goto(address)
        self.wait(ALL_DRAWN)

    def _route(self, route, address: str) -> None:
        if route.request.url == address:
            route.continue_()
        else:
            self.requests.append(route.request.url)
            route.abort()

    def wait(self, condition: str, timeout_s: float = 60.0) -> None:
        """Until `condition` holds. Playwright's own wait needs eval, which the page's policy forbids."""
        ends = time.monotonic() + timeout_s
        while not self.page.evaluate(condition):
            assert time.monotonic() < ends, f"never true: {condition}"
            self.page.wait_for_timeout(50)

    def __enter__(self) -> Visit:
        return self

    def __exit__(self, *_) -> None:
        self.context.close()


def test_all_figures_are_drawn_without_a_request_or_a_complaint(browser, report):
    with Visit(browser, report) as visit:
        assert visit.page.locator(".plot svg.main-svg").count() >= NUM_FIGURES
        assert visit.page.locator(".plot[data-drawn]").count() == NUM_FIGURES
        traces = visit.page.evaluate(
            "Array.from(document.querySelectorAll('.plot')).map(p => p.querySelectorAll('path, image').length)"
        )
        assert min(traces) > 3, "a figure without marks is a blank"
        assert (visit.requests, visit.dialogs, visit.messages) == ([], [], [])


@pytest.mark.parametrize("width", [1280, 640, 390, 360])
def test_no_width_needs_horizontal_scrolling(browser, report, width):
    with Visit(browser, report, width) as visit:
        sizes = "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
        scroll, client = visit.page.evaluate(sizes)
        assert scroll <= client
        visit.page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
        scroll, client = visit.page.evaluate(sizes)
        assert scroll <= client
        overflowing = visit.page.evaluate(
            "Array.from(document.querySelectorAll('.plot svg.main-svg')).filter(s => s.getBoundingClientRect().right"
            " > document.documentElement.clientWidth + 1).length"
        )
        assert overflowing == 0
        boxes = "Array.from(document.querySelectorAll('pre')).filter(box => box.scrollWidth > box.clientWidth).length"
        assert visit.page.evaluate(boxes) == 0, "a command longer than its box"


def test_a_window_that_shrinks_redraws_the_figures(browser, report):
    with Visit(browser, report) as visit:
        visit.page.set_viewport_size({"width": 360, "height": 800})
        visit.wait(
            "Array.from(document.querySelectorAll('.plot svg.main-svg'))"
            ".every(s => s.getBoundingClientRect().width < 360)"
        )


def test_print_is_light_whole_and_opens_the_tables(browser, report):
    with Visit(browser, report, scheme="dark") as visit:
        page = visit.page
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(17, 17, 17)"
        page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
        page.emulate_media(media="print")
        visit.wait("Array.from(document.querySelectorAll('.plot')).every(p => p.layout.width === 680)")
        assert page.evaluate("document.querySelectorAll('details:not([open])').length") == 0
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        boxes = page.evaluate(
            "Array.from(document.querySelectorAll('figure')).map(f => [f.getBoundingClientRect().width,"
            " f.getBoundingClientRect().height, getComputedStyle(f).breakInside])"
        )
        printable_height = (297 - 30) / 25.4 * 96
        assert all(height < printable_height and rule == "avoid" for _, height, rule in boxes)
        page.evaluate("window.dispatchEvent(new Event('afterprint'))")
        page.emulate_media(media="screen")
        visit.wait("document.querySelectorAll('details:not([open])').length > 0")


def test_the_pdf_has_pages_and_no_figure_is_cut(browser, report, tmp_path):
    with Visit(browser, report) as visit:
        pdf = visit.page.pdf(prefer_css_page_size=True)
        assert pdf.startswith(b"%PDF")
        assert 5 < pdf.count(b"/Type /Page\n") + pdf.count(b"/Type /Page ") + pdf.count(b"/Type /Page/") < 40


def test_the_theme_follows_the_system_live(browser, report):
    with Visit(browser, report) as visit:
        color = "document.querySelector('#plot-throughput .xtick text').style.fill"
        light = visit.page.evaluate(color)
        visit.page.emulate_media(color_scheme="dark")
        visit.wait(f"{color} !== '{light}'")


def test_the_keyboard_reaches_every_control_with_visible_focus(browser, report):
    with Visit(browser, report, width=640) as visit:
        visit.page.keyboard.press("Tab")
        assert visit.page.evaluate("document.activeElement.className") == "skip"
        assert visit.page.evaluate("document.activeElement.getBoundingClientRect().left") >= 0
        visit.page.keyboard.press("Enter")
        assert visit.page.url.endswith("#answer")
        unnamed = visit.page.evaluate(
            "Array.from(document.querySelectorAll('button, a[href], summary, .modebar-btn')).filter(e =>"
            " !(e.textContent.trim() || e.getAttribute('aria-label'))).length"
        )
        assert unnamed == 0


def test_the_command_is_copied_or_selected_as_shown(browser, report):
    with Visit(browser, report) as visit:
        visit.page.click("button.copy")
        visit.wait("document.getElementById('copy-status').textContent !== ''")
        assert visit.page.inner_text("#serve-command").startswith("vllm serve SmolLM2-135M-Instruct")


# The most dangerous ones, each alone in every place of text; all 33 together as runs of one report.
ALONE = tuple(HOSTILE_NAMES[index] for index in (1, 4, 8, 10, 18, 31))


@pytest.mark.parametrize("names", [HOSTILE_NAMES, *((name,) for name in ALONE)], ids=range(1 + len(ALONE)))
def test_hostile_names_open_no_dialog_ask_for_nothing_and_leave_the_title_alone(browser, tmp_path, names):
    runs = [
        with_text_everywhere(sample_record(num_steps=9, num_requests=3, run_id=f"r{index}"), name)
        for index, name in enumerate(names)
    ]
    chosen = recommend([], runs, what_if=lambda config: runs[0].plan)
    notices = [Notice(name, name) for name in names]
    path = write_report(tmp_path / "r.html", runs, [runs[0].plan], chosen, created=CREATED, notices=notices)
    with Visit(browser, path) as visit:
        title = visit.page.title()
        assert title.startswith("labkit report: ")
        assert title.endswith(CREATED)
        for plot in ("memory", "throughput", "requests"):
            visit.page.locator(f"#plot-{plot}").scroll_into_view_if_needed()
            box = visit.page.locator(f"#plot-{plot} .plot-container").bounding_box()
            visit.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
            visit.page.wait_for_timeout(50)
        assert (visit.requests, visit.dialogs, visit.messages) == ([], [], [])
        assert visit.page.title() == title
        inside = ", ".join(f".plot {tag}" for tag in ("img", "script", "iframe", "b", "a[href]", "foreignObject"))
        assert visit.page.locator(inside).count() == visit.page.locator(".modebar a[href]").count()
