"""Counters from the `ncu` binary: a command runs under it and its CSV is read strictly."""

from __future__ import annotations

import csv
import io
import math
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from labkit.errors import FileFormatError, OutOfRangeError
from labkit.measure.cupti import CURES, CountersUnavailable
from labkit.text import plain

COLUMNS = ("ID", "Kernel Name", "Metric Name", "Metric Unit", "Metric Value")
MAX_OUTPUT_BYTES = 64 * 2**20
MAX_ROWS = 1_000_000
# ncu scales values for people unless told otherwise; all become bytes, seconds, shares of 1 or plain counts.
_UNITS: Mapping[str, float] = MappingProxyType(
    {
        "": 1.0, "sector": 1.0, "inst": 1.0, "warp": 1.0, "cycle": 1.0, "block": 1.0, "thread": 1.0, "request": 1.0,
        "byte": 1.0, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "Tbyte": 1e12,
        "s": 1.0, "second": 1.0, "msecond": 1e-3, "ms": 1e-3, "usecond": 1e-6, "us": 1e-6, "nsecond": 1e-9, "ns": 1e-9,
        "%": 1e-2,
    }
)  # fmt: skip


@dataclass(frozen=True)
class NcuKernel:
    """One profiled launch: its number, kernel name, and metric → value in bytes, seconds, shares or counts."""

    launch: int
    name: str
    metrics: Mapping[str, float]


def parse_ncu_csv(text: str) -> tuple[NcuKernel, ...]:
    """The launches of `ncu --csv`'s output, in order; lines before the header are messages.

    Raises:
        FileFormatError: no header, a row with missing cells, a unit or number that is not known, a metric twice.
        CountersUnavailable: ncu says that it may not or cannot count.
    """
    lines = text.splitlines()
    start = next((index for index, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise _refusal(text)
    rows = csv.reader(io.StringIO("\n".join(lines[start:])), strict=True)
    try:
        header = next(rows)
        missing = [column for column in COLUMNS if column not in header]
        if missing:
            raise FileFormatError(f"ncu's table has no column {missing[0]!r}")
        at = [header.index(column) for column in COLUMNS]
        found: dict[int, tuple[str, dict[str, float]]] = {}
        for number, row in enumerate(rows):
            if number >= MAX_ROWS:
                raise FileFormatError("ncu's table is too long", needed=f"at most {MAX_ROWS:,} rows")
            if row and not row[0].startswith("=="):
                _add(found, row, at, len(header))
    except csv.Error as error:
        raise FileFormatError(f"ncu's table is broken: {plain(error, 120)}") from error
    return tuple(NcuKernel(key, name, MappingProxyType(metrics)) for key, (name, metrics) in found.items())


def _add(found: dict[int, tuple[str, dict[str, float]]], row: list[str], at: list[int], width: int) -> None:
    if len(row) != width:
        raise FileFormatError(f"a row of ncu's table has {len(row)} cells", needed=f"{width} cells")
    launch, name, metric, unit, value = (row[index] for index in at)
    if not launch.isdecimal():
        raise FileFormatError(f"{plain(repr(launch), 40)} is no launch number of ncu")
    metrics = found.setdefault(int(launch), (plain(name, 200), {}))[1]
    if metric in metrics:
        raise FileFormatError(f"ncu's table has {plain(metric, 80)} twice for launch {int(launch)}")
    metrics[metric] = _value(value, unit)


def _value(text: str, unit: str) -> float:
    """A number in its base unit; ncu writes thousands commas."""
    if unit not in _UNITS:
        raise FileFormatError(f"ncu's unit {plain(repr(unit), 40)} is not known", works=", ".join(filter(None, _UNITS)))
    try:
        number = float(text.replace(",", ""))
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise FileFormatError(f"{plain(repr(text), 40)} is no value of ncu")
    return number * _UNITS[unit]


def _refusal(text: str) -> CountersUnavailable | FileFormatError:
    """What ncu's messages mean where it printed no table."""
    if "ERR_NVGPUCTRPERM" in text:
        return CountersUnavailable("ncu may not read the counters", works=CURES[35])
    if "No kernels were profiled" in text:
        return CountersUnavailable("ncu saw no kernel of that name", works="a command that launches the kernel")
    if "another profiler" in text or "driver resource was unavailable" in text:
        return CountersUnavailable("another profiler holds the counters", works=CURES[39])
    errors = [line for line in text.splitlines() if line.startswith("==ERROR==")]
    if errors:
        return CountersUnavailable(f"ncu: {plain(errors[0].removeprefix('==ERROR=='), 160)}", works="the next method")
    return FileFormatError("ncu printed no table", works="ncu --csv")


def find_ncu() -> str:
    """Path of the `ncu` binary.

    Raises:
        CountersUnavailable: there is none.
    """
    for name in ("ncu", "/usr/local/cuda/bin/ncu", "/opt/nvidia/nsight-compute/ncu"):
        path = shutil.which(name)
        if path:
            return path
    raise CountersUnavailable("the ncu binary was not found", works="Nsight Compute, which CUDA's toolkit brings")


def run_ncu(
    command: Sequence[str], metrics: Sequence[str], *, kernel: str | None = None, timeout_s: float = 120.0,
    card_uuid: str | None = None, ncu: str | None = None,
) -> tuple[NcuKernel, ...]:  # fmt: skip
    """Run `command` under ncu and return its profiled launches.

    Args:
        kernel: name, or "regex:…", of the kernels to profile; None is all.
        card_uuid: NVML's identity of the only card that the command sees; None leaves it those of this process.

    Raises:
        CountersUnavailable: no ncu, it may not count, or it took longer than `timeout_s`.
        FileFormatError: its table is broken.
        OutOfRangeError: no metric or no command.
    """
    if not metrics or not command:
        raise OutOfRangeError("ncu needs a command and one metric at least")
    full = [ncu or find_ncu(), "--csv", "--clock-control", "none", "--print-units", "base",
            "--metrics", ",".join(metrics)]  # fmt: skip
    full += ["-k", kernel] if kernel else []
    try:
        done = subprocess.run(
            [*full, *command], capture_output=True, timeout=timeout_s, check=False,
            env=None if card_uuid is None else {**os.environ, "CUDA_VISIBLE_DEVICES": card_uuid},
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise CountersUnavailable(f"ncu took longer than {timeout_s:g} s", works="a shorter command") from error
    except OSError as error:
        raise CountersUnavailable(f"ncu does not start: {plain(error, 120)}", works="Nsight Compute") from error
    if len(done.stdout) > MAX_OUTPUT_BYTES:
        raise FileFormatError("ncu printed too much", needed="at most 64 MiB")
    text = done.stdout.decode("utf-8", "replace")
    if '"ID"' not in text:
        text += "\n" + done.stderr.decode("utf-8", "replace")
    return parse_ncu_csv(text)
