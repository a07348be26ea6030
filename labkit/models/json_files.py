"""Reading the JSON files of a model folder within stated limits."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from labkit.errors import FileFormatError
from labkit.text import plain


def read_json_object(path: str | os.PathLike[str], *, max_bytes: int) -> dict[str, Any]:
    """The JSON object in `path`.

    Raises:
        FileFormatError: missing, over `max_bytes`, no UTF-8, no JSON, nested too deep, or no object.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except (OSError, ValueError) as error:
        raise FileFormatError(f"cannot read {plain(path, 200)}: {plain(error)}") from error
    if len(data) > max_bytes:
        raise FileFormatError(f"{plain(path, 200)} is too large", needed=f"at most {max_bytes} bytes")
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FileFormatError(f"{plain(path, 200)} is no JSON that labkit reads: {plain(error)}") from error
    if not isinstance(values, dict):
        raise FileFormatError(f"{plain(path, 200)} holds a {type(values).__name__}, not a JSON object")
    return values
