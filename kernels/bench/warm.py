"""Compiling in several processes before anything is timed: they share the compilers' caches on disk."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable

import torch


def _run(task: Callable[[], object]) -> str | None:
    try:
        task()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{task}: {type(error).__name__}: {str(error)[:200]}"
    return None


def warm(tasks: Iterable[Callable[[], object]], processes: int = 0) -> list[str]:
    """Calls each task (a `functools.partial`, so that it can travel) in one of several processes; what failed.

    processes: 0 for one less than the cores, at most 15.
    """
    count = processes or max(1, min(15, (os.cpu_count() or 2) - 1))
    with multiprocessing.get_context("spawn").Pool(count) as workers:
        return [message for message in workers.imap_unordered(_run, tasks) if message]
