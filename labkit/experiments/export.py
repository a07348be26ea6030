"""Runs as files for other programs: JSON (complete, can be read back) and Parquet (the tables)."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from labkit.errors import FileFormatError
from labkit.experiments.serialise import loads, record_from_plain, record_to_plain
from labkit.files import write_atomic
from labkit.measure.run_record import RunRecord
from labkit.text import plain

if TYPE_CHECKING:
    import pandas as pd

MAX_JSON_BYTES = 512 * 2**20


def to_json(record: RunRecord) -> str:
    """The whole run as JSON text; equal runs give equal bytes."""
    return json.dumps(record_to_plain(record), sort_keys=True, indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def export_json(record: RunRecord, path: str | os.PathLike[str]) -> Path:
    """Write the whole run to `path`.

    Raises:
        FileFormatError: the file cannot be written.
    """
    return write_atomic(path, to_json(record))


def import_json(path: str | os.PathLike[str]) -> RunRecord:
    """The run in a file that `export_json` wrote.

    Raises:
        FileFormatError: no such file, over 512 MiB, no JSON, another format, a newer version, an unknown or broken
            field; the message names it.
    """
    path = Path(path)
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise FileFormatError(
                f"{plain(path)} is too large", needed=f"{size:,} bytes", available=f"{MAX_JSON_BYTES:,} bytes"
            )
        data = path.read_bytes()
    except OSError as error:
        raise FileFormatError(f"cannot read {plain(path)}: {error.strerror or error}", works="a run's JSON") from error
    return record_from_plain(loads(data, plain(path)), plain(path))


def export_parquet(record: RunRecord, folder: str | os.PathLike[str]) -> tuple[Path, Path, Path]:
    """Write `requests.parquet`, `steps.parquet` and the complete `run.json` to `folder`.

    Raises:
        FileFormatError: the folder cannot be made or written to.
    """
    folder = Path(folder)
    requests = write_atomic(folder / "requests.parquet", _parquet(record.requests_frame()))
    steps = write_atomic(folder / "steps.parquet", _parquet(record.steps_frame()))
    return requests, steps, export_json(record, folder / "run.json")


def _parquet(frame: pd.DataFrame) -> bytes:
    buffer = io.BytesIO()
    frame.to_parquet(buffer, index=False)
    return buffer.getvalue()
