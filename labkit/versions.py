"""Which packages and which machine a number was made with."""

from __future__ import annotations

import os
import platform
import sqlite3
from importlib import metadata

import psutil

from labkit.format import memory
from labkit.text import plain

PACKAGES = (
    "labkit",
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "numpy",
    "pandas",
    "plotly",
    "ipywidgets",
    "vllm",
)


def versions(num_threads: int | None = None) -> dict[str, str]:
    """Package → version for those that are installed, and under "machine" the processor, cores and memory.

    Args:
        num_threads: compute threads of the run, said beside the machine.
    """
    found = {"python": platform.python_version(), "sqlite": sqlite3.sqlite_version}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    found["machine"] = machine(num_threads)
    return dict(sorted(found.items()))


def machine(num_threads: int | None = None) -> str:
    """The machine in one line, such as "x86_64, 2 cores, 24.0 GiB, Linux 6.1, 1 thread"."""
    parts = [
        _processor(),
        f"{len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()} cores",
        memory(psutil.virtual_memory().total),
        f"{platform.system()} {platform.release().split('-')[0]}",
    ]
    if num_threads:
        parts.append(f"{num_threads} thread{'s' if num_threads > 1 else ''}")
    return ", ".join(parts)


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.machine()


def cuda_of_version_file(text: str | None) -> str | None:
    """`cuda = '12.8'` of torch/version.py."""
    for line in (text or "").splitlines():
        name, _, value = line.partition("=")
        if name.partition(":")[0].strip() == "cuda":
            word = plain(value.strip().strip("'\""), 20)
            return None if word == "None" else word
    return None
