"""A JupyterLab server of its own and Chromium, for tests that look at real pages."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM_ARGUMENTS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
# Whatever labkit writes or shows, these must not be in it.
LAB_TOKEN, HUB_TOKEN = "SENTINEL-of-the-lab", "hf_SENTINEL-of-the-hub"


def pytest_collection_modifyitems(items) -> None:
    for item in items:
        if "browser" in Path(str(item.fspath)).parts:
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="session")
def chromium() -> Iterator:
    """A running Chromium; skipped with a reason where none is installed."""
    if chromium_path() is None:
        pytest.skip("Chromium is not installed: apt-get install chromium")
    pytest.importorskip("playwright.sync_api")
    with running_chromium() as browser:
        yield browser


def chromium_path() -> str | None:
    """Where Chromium is installed."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@contextmanager
def running_chromium() -> Iterator:
    """The installed Chromium, without a window."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium_path(), args=list(CHROMIUM_ARGUMENTS))
        yield browser
        browser.close()


@dataclass
class Watched:
    """A page, the requests it made to other hosts (they are refused), and the errors it threw."""

    page: object
    foreign: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def open_page(browser, *, own: str, width: int = 1440, height: int = 1000, **options) -> Watched:
    """A new page that may only ask for addresses beginning with `own`; everything else is recorded and refused."""
    context = browser.new_context(viewport={"width": width, "height": height}, **options)
    watched = Watched(context.new_page())

    def judge(route) -> None:
        url = route.request.url
        if url.startswith((own, "data:", "blob:", "about:")):
            route.continue_()
        else:
            watched.foreign.append(url)
            route.abort()

    context.route("**/*", judge)

    def threw(error) -> None:
        # anywidget says so of a module that took more than 2 s, as on a busy machine; it goes on and draws it.
        if str(error) != "[anywidget] Failed to initialize model.":
            watched.errors.append(str(error))

    watched.page.on("pageerror", threw)
    watched.page.on("dialog", lambda dialog: (watched.errors.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    return watched


@dataclass(frozen=True)
class Lab:
    """A running JupyterLab: its address with the token, and the folder of its notebooks."""

    url: str
    token: str
    folder: Path

    def api(self, path: str, method: str = "GET") -> object:
        """Answer of the server's REST interface; None where it has no body."""
        request = urllib.request.Request(f"{self.url}{path}", method=method)
        request.add_header("Authorization", f"token {self.token}")
        with urllib.request.urlopen(request, timeout=10) as answer:
            body = answer.read()
        return json.loads(body) if body else None

    def end_sessions(self) -> None:
        """End every kernel, so that the next test begins with a fresh one."""
        for session in self.api("/api/sessions"):
            self.api(f"/api/sessions/{session['id']}", "DELETE")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _settle_lab(folder: Path) -> Path:
    """Jupyter's own folders inside `folder`, with the news dialog off."""
    settings = folder / "lab-settings"
    settings.mkdir()
    overrides = {"@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False}}
    (settings / "overrides.json").write_text(json.dumps(overrides))
    return settings


@pytest.fixture(scope="session")
def lab(tmp_path_factory) -> Iterator[Lab]:
    with running_lab(tmp_path_factory.mktemp("lab")) as running:
        yield running


@contextmanager
def running_lab(folder: Path) -> Iterator[Lab]:
    """JupyterLab on a free port of 127.0.0.1, with a token and its own `folder`, ended by its process id."""
    settings, notebooks = _settle_lab(folder), folder / "notebooks"
    notebooks.mkdir()
    port, token = free_port(), LAB_TOKEN
    environment = {
        **os.environ,
        "JUPYTER_CONFIG_DIR": str(folder / "config"),
        "JUPYTER_DATA_DIR": str(folder / "data"),
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
        "JUPYTERLAB_SETTINGS_DIR": str(folder / "user-settings"),
        "LABKIT_HOME": str(folder / "labkit-home"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "OMP_NUM_THREADS": "1",
        "HF_TOKEN": HUB_TOKEN,
    }
    command = [
        sys.executable, "-m", "jupyterlab", "--allow-root", "--no-browser", "--ip=127.0.0.1", f"--port={port}",
        "--ServerApp.port_retries=0", f"--IdentityProvider.token={token}", "--LabApp.expose_app_in_browser=True",
        f"--LabApp.app_settings_dir={settings}", f"--ServerApp.root_dir={notebooks}",
        "--KernelManager.transport=ipc",
    ]  # fmt: skip
    log = (folder / "lab.log").open("wb")
    process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, cwd=notebooks)
    made = Lab(f"http://127.0.0.1:{port}", token, notebooks)
    try:
        wait_for_lab(made, process, folder / "lab.log")
        yield made
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
        log.close()


def wait_for_lab(lab: Lab, process: subprocess.Popen, log: Path) -> None:
    for _ in range(240):
        if process.poll() is not None:
            pytest.fail(f"JupyterLab ended at once:\n{log.read_text()[-2000:]}")
        try:
            lab.api("/api/status")
        except (urllib.error.URLError, OSError):
            time.sleep(0.25)
        else:
            return
    pytest.fail(f"JupyterLab did not answer in a minute:\n{log.read_text()[-2000:]}")


def make_notebook(path: Path, *cells: str) -> Path:
    """A notebook of code cells for the python3 kernel."""
    code = [{"cell_type": "code", "id": str(index), "metadata": {}, "outputs": [], "execution_count": None,
             "source": cell} for index, cell in enumerate(cells)]  # fmt: skip
    kernel = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
    path.write_text(json.dumps({"cells": code, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}))
    return path


KERNEL_READY = """() => {
  const context = globalThis.jupyterapp?.shell?.currentWidget?.context?.sessionContext;
  const kernel = context?.session?.kernel;
  return !!kernel && kernel.connectionStatus === 'connected' && kernel.status === 'idle';
}"""


def open_notebook(browser, lab: Lab, name: str, **options) -> Watched:
    """The notebook `name` open in a page of its own, its kernel idle."""
    watched = open_page(browser, own=lab.url, **options)
    watched.page.goto(f"{lab.url}/lab/tree/{name}?reset&token={lab.token}", timeout=60_000)
    watched.page.wait_for_function(KERNEL_READY, timeout=60_000)
    return watched


def run_all(watched: Watched) -> None:
    """Run every cell of the open notebook."""
    watched.page.evaluate("() => { globalThis.jupyterapp.commands.execute('notebook:run-all-cells'); }")
