"""A notebook that opens the panel with given settings, and JupyterLab on it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from labkit.errors import UnsupportedError
from labkit.files import write_atomic
from labkit.specs.knob_text import config_from_text, config_to_text


def panel_notebook(settings: str, *, model: str, gpu: str, workload: str, limit: int) -> str:
    """The notebook as JSON: one cell that makes session and panel; every name stands in it as a Python string.

    Raises:
        LabkitError: a knob or value in `settings` that this version does not take; says which.
    """
    knobs = config_to_text(config_from_text(settings))
    lines = [
        "import labkit",
        "from labkit.widgets import Panel",
        "",
        f"traffic = labkit.load_workload({workload!r}, limit={limit})",
        f"session = labkit.Session(model={model!r}, gpu={gpu!r}, workload=traffic)",
        f"Panel.from_text(session, {knobs!r})" if knobs else "session.panel()",
    ]
    cell: dict[str, Any] = {"cell_type": "code", "execution_count": None, "id": "panel", "metadata": {}, "outputs": [],
            "source": [f"{line}\n" for line in lines[:-1]] + [lines[-1]]}  # fmt: skip
    kernel = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
    content = {"cells": [cell], "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def write_panel_notebook(path: Path, settings: str, *, model: str, gpu: str, workload: str, limit: int) -> Path:
    """Write `panel_notebook` to `path` and return the path.

    Raises:
        FileFormatError: the path cannot be written. LabkitError: as `panel_notebook`.
    """
    return write_atomic(path, panel_notebook(settings, model=model, gpu=gpu, workload=workload, limit=limit))


def open_notebook(path: Path) -> None:
    """JupyterLab on `path`, on this machine alone, until it is ended.

    Raises:
        UnsupportedError: JupyterLab does not start, for instance as it is not installed.
    """
    done = subprocess.run([sys.executable, "-m", "jupyterlab", "--ip=127.0.0.1", str(path.resolve())], check=False)
    if done.returncode:
        raise UnsupportedError("JupyterLab does not start here", works=f"pip install jupyterlab, then open {path.name}")
