"""A notebook that opens the panel with given settings, and JupyterLab on it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from labkit.errors import UnsupportedError
from labkit.files import write_atomic
from labkit.specs import load_gpu, load_model
from labkit.specs.knob_text import config_from_text, config_to_text


def panel_notebook(
    settings: str,
    *,
    model: str,
    gpu: str,
    workload: str,
    limit: int,
    run_ids: Sequence[str] = (),
    store: str | None = None,
) -> str:
    """The notebook as JSON: one cell that makes session and panel; every name stands in it as a Python string.

    Args:
        run_ids: stored runs that the session shows.
        store: where they are kept; None for the user's own store.

    Raises:
        LabkitError: a knob or value in `settings` that this version does not take; says which.
    """
    knobs = config_to_text(config_from_text(settings))
    kept = "" if store is None else f", store={store!r}"
    lines = [
        "import labkit",
        "from labkit.widgets import Panel",
        "",
        f"traffic = labkit.load_workload({workload!r}, limit={limit})",
        f"session = labkit.Session(model={model!r}, gpu={gpu!r}, workload=traffic{kept})",
        *([f"session.recall({list(run_ids)!r})"] if run_ids else []),
        f"Panel.from_text(session, {knobs!r})" if knobs else "session.panel()",
    ]
    cell: dict[str, Any] = {"cell_type": "code", "execution_count": None, "id": "panel", "metadata": {}, "outputs": [],
            "source": [f"{line}\n" for line in lines[:-1]] + [lines[-1]]}  # fmt: skip
    kernel = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
    content = {"cells": [cell], "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def write_panel_notebook(path: Path, settings: str, **session: Any) -> Path:
    """Write `panel_notebook` of the same arguments to `path` and return the path.

    Raises:
        FileFormatError: the path cannot be written. LabkitError: as `panel_notebook`; no such model or card.
    """
    for name, load in (("model", load_model), ("gpu", load_gpu)):
        load(session[name])
    return write_atomic(path, panel_notebook(settings, **session))


def open_notebook(path: Path) -> None:
    """JupyterLab on `path`, on this machine alone, until it is ended.

    Raises:
        UnsupportedError: JupyterLab does not start, for instance as it is not installed.
    """
    # Jupyter refuses root without a word of consent, and in a container the user is root.
    root = ["--allow-root"] if os.geteuid() == 0 else []
    command = [sys.executable, "-m", "jupyterlab", "--ip=127.0.0.1", *root, str(path.resolve())]
    done = subprocess.run(command, check=False)
    if done.returncode:
        raise UnsupportedError("JupyterLab does not start here", works=f"pip install jupyterlab, then open {path.name}")


def of_run(run_id: str, store: str | None) -> dict[str, Any]:
    """Settings, model, card and traffic of a stored run, as `panel_notebook` takes them.

    Raises:
        StoreError: there is no such run.
    """
    from labkit.experiments import RunStore

    run = RunStore(store, must_exist=True).get(run_id)
    in_catalogue = run.model.source in ("", "catalogue")
    return {
        "settings": config_to_text(run.config), "model": run.model.name if in_catalogue else run.model.source,
        "gpu": run.gpu.lookup, "workload": str(run.workload.get("name", "")),
        "limit": int(run.workload.get("num_requests", 100)), "run_ids": [run.run_id], "store": store,
    }  # fmt: skip
