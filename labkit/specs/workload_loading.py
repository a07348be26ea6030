"""`load_workload`: a traffic from a trace that comes with labkit or from a file of the user's."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

from labkit.errors import FileFormatError, UnknownNameError
from labkit.specs.datasets import Dataset, dataset_names, dataset_path, find_dataset
from labkit.specs.synthetic import Arrivals, with_arrivals
from labkit.specs.trace_lines import read_lines
from labkit.specs.trace_rows import TraceForm, read_rows
from labkit.specs.workload import RequestSpec, Workload
from labkit.specs.workload_steps import check_count, check_number, clip_lengths, first_requests, scale_rate, slice_time
from labkit.text import nearest, plain

MAX_REQUESTS = 500_000


def load_workload(
    name_or_path: str | os.PathLike[str] | Workload,
    *,
    limit: int | None = None,
    start_s: float = 0.0,
    duration_s: float | None = None,
    rate_scale: float = 1.0,
    max_input_tokens: int | None = None,
    max_output_tokens: int | None = None,
    seed: int = 0,
    arrivals: Arrivals | str | None = None,
) -> Workload:
    """A traffic from a trace. In order: slice by time, keep the first `limit`, clip, new arrivals, scale the rate.

    Args:
        name_or_path: one of `dataset_names()`; or a csv or JSON-lines file, plain or gzip, as labkit, Azure (2023 and
            2024), BurstGPT or Mooncake write it.
        limit: most requests.
        start_s, duration_s: the slice, in seconds from the trace's first arrival.
        rate_scale: 2 doubles the requests a second.
        max_input_tokens, max_output_tokens: longer ones are cut to this.
        seed: of the token ids that stand in for the text, and of new arrivals.
        arrivals: new arrival times for traces that hold lengths only or come in batches: "poisson:4", "gamma:4:2".

    Raises:
        UnknownNameError: neither a trace of that name nor a file.
        FileFormatError: a corrupt row (with line, column and value), a limit exceeded, or nothing left after slicing.
        OutOfRangeError: a setting out of its range.
    """
    seed = check_count("seed", seed, minimum=0, maximum=2**63)
    start = check_number("start_s", start_s, 0.0)
    duration = None if duration_s is None else check_number("duration_s", duration_s, 0.0, above=True)
    if isinstance(name_or_path, Workload):
        workload = name_or_path
    else:
        stop_s = None if duration is None else start + duration
        most = None if limit is None or start > 0 else check_count("limit", limit)
        workload = _read(name_or_path, stop_s, most, seed)
    span = workload.duration_s
    if start > 0 or duration is not None:
        workload = slice_time(workload, start, duration)
    if limit is not None:
        workload = first_requests(workload, limit)
    if not workload.requests:
        raise FileFormatError(
            f"{plain(workload.name)} has no request in that slice",
            available=f"arrivals from 0 to {span:g} s",
            works="start_s=0",
        )
    workload = clip_lengths(workload, max_input_tokens, max_output_tokens)
    if arrivals is not None:
        workload = with_arrivals(workload, arrivals, seed)
    return workload if rate_scale == 1 else scale_rate(workload, rate_scale)


def _read(name_or_path: str | os.PathLike[str], stop_s: float | None, most: int | None, seed: int) -> Workload:
    entry = find_dataset(name_or_path) if isinstance(name_or_path, str) else None
    path = dataset_path(entry) if entry is not None else _file(name_or_path)
    name = plain(path.name, 200)
    form, rows = read_rows(read_lines(path), name)
    collected = _Collected(stop_s, most)
    requests = collected.take(rows, name)
    steps = list(collected.steps)
    if any(later.arrival_s < earlier.arrival_s for earlier, later in itertools.pairwise(requests)):
        requests.sort(key=lambda request: request.arrival_s)
        steps.append("sorted by arrival")
    if form.arrival is None:
        steps.append("the file has no times: every request arrives at 0 s")
    return _described(entry, path, form, tuple(_from_zero(requests)), steps, seed)


def _from_zero(requests: list[RequestSpec]) -> list[RequestSpec]:
    """`requests` with arrivals counted from the first one, to the microsecond."""
    first = requests[0].arrival_s if requests else 0.0
    if first == 0.0:
        return requests
    return [
        RequestSpec(round(entry.arrival_s - first, 6), entry.input_tokens, entry.output_tokens, entry.prefix_blocks)
        for entry in requests
    ]


def _described(
    entry: Dataset | None, path: Path, form: TraceForm, requests: tuple[RequestSpec, ...], steps: list[str], seed: int
) -> Workload:
    has_prefixes = any(request.prefix_blocks for request in requests)
    return Workload(
        name=entry.name if entry is not None else plain(path.name, 200),
        requests=requests,
        prefix_block_tokens=form.block_tokens if has_prefixes else 0,
        source=entry.source if entry is not None else f"{form.name} file {plain(path.name, 200)}",
        licence=entry.licence if entry is not None else "",
        steps=(*([entry.step] if entry is not None and entry.step else []), *steps),
        seed=seed,
    )


class _Collected:
    """Requests of a trace up to a moment or a number, with a record of what was left out."""

    def __init__(self, stop_s: float | None, most: int | None) -> None:
        self._stop_s = stop_s
        self._most = most
        self._dropped = 0
        self._stopped = ""

    def take(self, rows: Iterator[RequestSpec], name: str) -> list[RequestSpec]:
        """The requests, in the file's order.

        Raises:
            FileFormatError: more than `MAX_REQUESTS`, or none at all.
        """
        kept: list[RequestSpec] = []
        is_rising = True
        for row in rows:
            if row.input_tokens < 1 or row.output_tokens < 1:
                self._dropped += 1
                continue
            is_rising = is_rising and (not kept or row.arrival_s >= kept[-1].arrival_s)
            if kept and self._stop_s is not None and is_rising and row.arrival_s - kept[0].arrival_s >= self._stop_s:
                self._stopped = "reading stopped at the first arrival after the slice"
                break
            kept.append(row)
            if self._most is not None and len(kept) >= self._most:
                break
            if len(kept) > MAX_REQUESTS:
                raise FileFormatError(
                    f"{name} has too many requests",
                    needed=f"at most {MAX_REQUESTS:,}",
                    works="limit= or duration_s=, which stop reading early",
                )
        if not kept:
            raise FileFormatError(
                f"{name} has no request with prompt and output",
                available=f"{self._dropped} rows, all with 0 tokens" if self._dropped else "a header alone",
                works="a row with prompt and output tokens for each request, or a trace of `labkit traces`",
                knob="workload",
            )
        return kept

    @property
    def steps(self) -> tuple[str, ...]:
        """What was left out, one sentence each."""
        dropped = f"dropped {self._dropped:,} rows without prompt or output tokens" if self._dropped else ""
        return tuple(step for step in (dropped, self._stopped) if step)


def _file(name_or_path: str | os.PathLike[str]) -> Path:
    text = str(name_or_path)
    is_path = isinstance(name_or_path, os.PathLike) or "/" in text or text.endswith((".csv", ".gz", ".jsonl"))
    try:
        exists = bool(text.strip()) and Path(text).expanduser().is_file()
    except (OSError, ValueError):
        exists = False
    if exists or (is_path and "\0" not in text):
        return Path(text).expanduser()
    raise UnknownNameError(
        f"there is no traffic called {plain(text, 120)!r}",
        available=", ".join(dataset_names()),
        works=nearest(text, dataset_names()),
        knob="workload",
    )
