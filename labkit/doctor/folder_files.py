"""Files of a model folder that are not what their names say: pointers, empty ones, halves, dead links."""

from __future__ import annotations

from pathlib import Path

from labkit.doctor.check import Check
from labkit.text import plain

_LFS = b"version https://git-lfs"
MAX_FILES = 10_000


def is_lfs_pointer(path: Path) -> bool:
    """Whether a file is Git LFS's placeholder instead of its content."""
    try:
        with path.open("rb") as file:
            return file.read(len(_LFS)) == _LFS
    except OSError:
        return False


def unfinished_files(folder: Path) -> list[Check]:
    """Dead links, empty files and what an interrupted download leaves."""
    entries = sorted(folder.iterdir())[:MAX_FILES]
    dead = [entry.name for entry in entries if entry.is_symlink() and not entry.exists()]
    empty = [entry.name for entry in entries if entry.is_file() and entry.stat().st_size == 0]
    halves = [entry.name for entry in entries if entry.name.endswith((".incomplete", ".part", ".aria2", ".crdownload"))]
    halves += [str(found.relative_to(folder)) for found in sorted(folder.glob(".cache/huggingface/**/*.incomplete"))]
    again = "hf download <model> --local-dir . fetches only what is missing"
    found = []
    if dead:
        found.append(Check(
            "dead-links", "problem", f"links to nothing: {_names(dead)}",
            "the hub cache's blobs were deleted, or only the snapshot folder was copied or mounted",
            "mount the whole model folder of the cache (blobs and snapshots), or download again",
        ))  # fmt: skip
    if empty:
        found.append(
            Check("empty-files", "problem", f"0 bytes: {_names(empty)}", "a full disk or a broken copy", again)
        )
    if halves:
        found.append(Check("unfinished", "problem", f"unfinished: {_names(halves)}", "the download stopped", again))
    return found


def _names(names: list[str]) -> str:
    shown = ", ".join(plain(name, 80) for name in names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} more"
