"""Lines of a plain or gzip text file, one at a time, within stated limits."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

from labkit.errors import FileFormatError
from labkit.text import plain

MAX_DECOMPRESSED_BYTES = 256 * 2**20
MAX_LINE_BYTES = 2**20
_GZIP_MAGIC = b"\x1f\x8b"


def read_lines(path: str | os.PathLike[str]) -> Iterator[tuple[int, str]]:
    """Number (from 1) and text of each line that is not blank, without its end; a byte-order mark is skipped.

    Gzip is told by its first bytes, not by the name; files of several gzip members are read to the end.

    Raises:
        FileFormatError: missing, not UTF-8, a damaged or truncated gzip stream, a line over 1 MiB, or more than
            256 MiB decompressed. Readers that stop earlier never reach that limit.
    """
    path = Path(path)
    name = plain(path.name, 200)
    try:
        if not path.is_file():
            raise FileFormatError(f"there is no file {plain(path)}", works="a .csv, .csv.gz, .jsonl or .jsonl.gz file")
        with path.open("rb") as raw:
            is_gzip = raw.read(2) == _GZIP_MAGIC
            raw.seek(0)
            with cast("IO[bytes]", gzip.GzipFile(fileobj=raw) if is_gzip else raw) as file:
                yield from _decoded(file, name)
    except FileFormatError:
        raise
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise FileFormatError(
            f"{name} is a damaged or truncated gzip file: {plain(error)}", works="getting the whole file again"
        ) from error
    except OSError as error:
        raise FileFormatError(f"cannot read {plain(path)}: {error.strerror or plain(error)}") from error
    except ValueError as error:
        raise FileFormatError(f"{plain(path)} is no file name: {plain(error)}") from error


def _decoded(file: IO[bytes], name: str) -> Iterator[tuple[int, str]]:
    total = number = 0
    while line := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        total += len(line)
        if len(line) > MAX_LINE_BYTES:
            raise FileFormatError(f"line {number} of {name} is too long", needed="at most 1 MiB a line")
        if total > MAX_DECOMPRESSED_BYTES:
            raise FileFormatError(
                f"{name} holds too much text",
                needed="at most 256 MiB decompressed",
                works="limit= or duration_s=, which stop reading early",
            )
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise FileFormatError(
                f"line {number} of {name} is not UTF-8 at byte {error.start}", works="a CSV or JSON-lines file as text"
            ) from error
        if text.strip():
            yield number, text
