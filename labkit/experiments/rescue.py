"""`kept_elsewhere`: a run whose store refuses it goes to a store of its own, so that none that was computed is lost."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from labkit.errors import StoreError
from labkit.experiments.store import RunStore
from labkit.experiments.store_tables import STORE_NAME
from labkit.measure.run_record import RunRecord
from labkit.text import plain


def kept_elsewhere(refusal: StoreError, record: RunRecord) -> StoreError:
    """The refusal with where the run is now: in the folder for temporary files, or in the session's memory alone."""
    folder = None
    try:
        folder = Path(tempfile.mkdtemp(prefix="labkit-run-"))
        path = folder / STORE_NAME
        RunStore(path).save(record)
    except (StoreError, OSError) as error:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
        return StoreError(
            f"{refusal.message}; the run is {record.status} and nowhere but in this session's records(), since the "
            f"folder for temporary files took it neither: {plain(error, 200)}",
            works="session.save(record) once there is room, before the session ends",
            knob=refusal.knob,
        )
    return StoreError(
        f"{refusal.message}; the run is {record.status}, and kept in {path} until temporary files are removed, and in "
        "this session's records()",
        works=f"labkit runs --store {path}; session.save(record) once there is room",
        knob=refusal.knob,
    )
