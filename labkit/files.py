"""Writing files so that a reader sees the old content or the new one, never a half."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from labkit.errors import FileFormatError


def write_atomic(path: str | os.PathLike[str], content: str | bytes) -> Path:
    """Write `content` to `path` by way of a temporary file in the same folder and a rename.

    Raises:
        FileFormatError: the folder cannot be made or written to, or `path` is a folder or device.
    """
    path = Path(path)
    data = content.encode() if isinstance(content, str) else content
    temporary: str | None = None
    if path.exists() and not path.is_file():
        raise FileFormatError(f"{path} is no ordinary file, it is not replaced", works="the name of a file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)
        raise FileFormatError(
            f"cannot write {path}: {error.strerror or error}",
            works="a folder that exists, has space and that you may write to",
        ) from error
    return path
