"""Make the pictures of README and docs from the panel as it is: JupyterLab and Chromium, a minute or two.

Usage: .venv/bin/python tools/make_pictures.py [name …]; all of them without a name. Needs what `make test` installs.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.browser.conftest import Lab, make_notebook, open_notebook, run_all, running_chromium, running_lab  # noqa: E402

FOLDER = ROOT / "docs" / "images"
WIDTH, HEIGHT = 1280, 2600
MEASURED = """import labkit

traffic = labkit.load_workload("azure-2023-conv", limit=8, max_input_tokens=128, max_output_tokens=24, rate_scale=6)
session = labkit.Session(model="HuggingFaceTB/SmolLM2-135M-Instruct", gpu="cpu", workload=traffic, store="sqlite://")
panel = session.panel()
panel.knobs["max_model_len"].value, panel.knobs["cpu_memory_gib"].value = 2048, 0.75
panel"""
SIMULATED = """import labkit

session = labkit.Session.for_task("chat", "Qwen/Qwen3-8B", "A10", store="sqlite://")
panel = session.panel()
panel"""
COMMAND = "vllm serve Qwen/Qwen3-8B --max-model-len 8k --max-num-seqs 64 --kv-cache-dtype fp8 --enable-prefix-cache"


def press(page, text: str) -> None:
    """Press the panel's button `text`."""
    page.locator(".lk-panel .jupyter-button").filter(has_text=text).first.click()


def tab(page, title: str) -> None:
    """Open a tab of the panel."""
    page.locator(".lk-panel .widget-toggle-button").filter(has_text=title).click()
    page.wait_for_timeout(1500)


def draw_panel(page) -> None:
    """A measured sweep beside its baseline."""
    press(page, "Run")
    page.get_by_text("1 run finished").wait_for(timeout=180_000)
    press(page, "Pin as baseline")
    press(page, "Sweep")
    page.get_by_text("4 runs finished").wait_for(timeout=600_000)
    page.locator(".lk-runs tbody tr").nth(2).click()
    tab(page, "KV over time")


def draw_limits(page) -> None:
    """A simulated traffic on a card's roofline, and what each change would buy."""
    page.get_by_text("What each change would buy on this traffic").wait_for(timeout=120_000)
    press(page, "Run")
    page.get_by_text("1 simulation finished").wait_for(timeout=120_000)
    tab(page, "Limits")


def draw_paste(page) -> None:
    """A pasted command with a flag that vLLM refuses."""
    press(page, "Paste")
    page.locator(".lk-panel textarea").fill(COMMAND)
    press(page, "Read it")
    page.get_by_text("Taken over").wait_for(timeout=20_000)
    page.wait_for_timeout(2000)


PICTURES: Mapping[str, tuple[str, Callable, int]] = MappingProxyType(
    {"panel": (MEASURED, draw_panel, 1640), "limits": (SIMULATED, draw_limits, 1290),
     "paste": (SIMULATED, draw_paste, 560)}
)  # fmt: skip


def make_picture(browser, lab: Lab, name: str) -> Path:
    """Draw one picture; its file, in `docs/images`."""
    cell, draw, height = PICTURES[name]
    make_notebook(lab.folder / f"{name}.ipynb", cell)
    watched = open_notebook(browser, lab, f"{name}.ipynb", width=WIDTH, height=HEIGHT)
    page = watched.page
    page.evaluate("() => globalThis.jupyterapp.shell.collapseLeft()")
    run_all(watched)
    page.wait_for_function("() => document.querySelectorAll('.lk-plot .main-svg').length >= 2", timeout=120_000)
    draw(page)
    page.mouse.move(0, 0)
    box = page.locator(".lk-panel").first.bounding_box()
    clip = {"x": box["x"] - 8, "y": box["y"] - 8, "width": box["width"] + 16, "height": min(height, box["height"] + 16)}
    path = FOLDER / f"{name}.png"
    page.screenshot(path=str(path), clip=clip)
    page.context.close()
    lab.end_sessions()
    return path


def main() -> None:
    """Draw the pictures that the command line names, all without a name."""
    names = sys.argv[1:] or list(PICTURES)
    unknown = [name for name in names if name not in PICTURES]
    if unknown:
        raise SystemExit(f"there is no picture {unknown[0]!r}; there are {', '.join(PICTURES)}")
    with tempfile.TemporaryDirectory() as folder, running_lab(Path(folder)) as lab, running_chromium() as browser:
        for name in names:
            print(make_picture(browser, lab, name), flush=True)


if __name__ == "__main__":
    main()
