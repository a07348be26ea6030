"""`make lab` as it is written: the server and its kernels listen on this machine alone, and ask for the token."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
import urllib.error
import urllib.request

import psutil
import pytest

from tests.browser.conftest import ROOT, Lab, free_port, wait_for_lab

TOKEN = "SENTINEL-of-the-lab"
# Shell, broadcast, input, control, heartbeat.
KERNEL_PORTS = 5


@pytest.fixture
def made_lab(tmp_path):
    """The server of the Makefile's own command line, on a port and in folders of this test."""
    recipe = subprocess.run(["make", "-n", "lab"], capture_output=True, text=True, cwd=ROOT, check=True).stdout
    words = shlex.split(next(line for line in recipe.splitlines() if "jupyter lab" in line))
    assert not any("token" in word or "password" in word for word in words), "the server makes its own token"
    port = free_port()
    command = [sys.executable, "-m", "jupyterlab", *words[2:], "--allow-root", "--no-browser", f"--port={port}"]
    folders = {name: str(tmp_path / name) for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR")}
    log = tmp_path / "lab.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT,
            env={**os.environ, **folders, "JUPYTER_TOKEN": TOKEN},
        )  # fmt: skip
        try:
            lab = Lab(f"http://127.0.0.1:{port}", TOKEN, ROOT / "notebooks")
            wait_for_lab(lab, process, log)
            yield lab, process
        finally:
            process.terminate()
            process.wait(20)


def listening(process: psutil.Process) -> list[str]:
    """The addresses on which a process listens, one for each port."""
    found = process.net_connections()
    return [connection.laddr.ip for connection in found if connection.status == psutil.CONN_LISTEN]


def test_it_listens_on_this_machine_alone_and_asks_for_its_token(made_lab):
    lab, process = made_lab
    kernel = lab.api("/api/kernels", "POST")
    parent, children = psutil.Process(process.pid), []
    for _ in range(200):
        children = [address for one in parent.children(recursive=True) for address in listening(one)]
        if len(children) >= KERNEL_PORTS:
            break
        time.sleep(0.1)
    assert len(children) >= KERNEL_PORTS
    assert {*children, *listening(parent)} <= {"127.0.0.1", "::1"}
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{lab.url}/api/kernels", timeout=10)
    assert refused.value.code == 403
    lab.api(f"/api/kernels/{kernel['id']}", "DELETE")
