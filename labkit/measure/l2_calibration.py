"""What is known of a card's L2 beside its size: `l2_calibration.json`, or a file that was fitted on the card."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.errors import FileFormatError, OutOfRangeError
from labkit.specs.gpu_spec import GpuSpec
from labkit.text import plain

DEFAULT_FILE = Path(__file__).with_name("l2_calibration.json")
MAX_FILE_BYTES = 1_000_000
LINE_BYTES = 128


@dataclass(frozen=True)
class L2Calibration:
    """How the simulation takes a card's L2.

    Attributes:
        capacity_share: share of the L2's bytes that keep different lines, over 0 and up to 1.
        ways: lines of a hashed set; None is fully associative.
        partitions: 2 where SMs of each half ask their own half of the L2 first.
        lockstep_next, lockstep_further, lockstep_cluster: how long reads of one tile meet before the L2 where programs
            start at once, in square roots of steps: of programs side by side in one cluster of SMs, of those further
            along such a row, of others in the cluster.
        coalesced_later: the share that meets of programs side by side of which one starts later.
        coalesced_row_power: all these go down with this power of rows that are shorter than a line of `LINE_BYTES`.
        read_bandwidth_share: share of the data sheet's bandwidth that a reading kernel reaches, over 0 and up to 1.
        calibrated: the values were fitted to counters of this card.
        source: where they come from, to be shown.
    """

    capacity_share: float = 1.0
    ways: int | None = 16
    partitions: int = 1
    lockstep_next: float = 0.0
    lockstep_further: float = 0.0
    lockstep_cluster: float = 0.0
    coalesced_later: float = 0.0
    coalesced_row_power: float = 0.0
    read_bandwidth_share: float = 0.9
    calibrated: bool = False
    source: str = "uncalibrated"

    def __post_init__(self) -> None:
        for name in ("capacity_share", "read_bandwidth_share"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
                raise OutOfRangeError(f"{name} is {plain(repr(value), 80)}", needed="more than 0, at most 1", knob=name)
        limits = {"lockstep_next": 100, "lockstep_further": 100, "lockstep_cluster": 100, "coalesced_later": 1}
        for name, most in limits.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= most:
                raise OutOfRangeError(f"{name} is {plain(repr(value), 80)}", needed=f"0 to {most}", knob=name)
        power = self.coalesced_row_power
        if isinstance(power, bool) or not isinstance(power, (int, float)) or not 0 <= power <= 4:
            raise OutOfRangeError(
                f"coalesced_row_power is {plain(repr(power), 80)}", needed="0 to 4", knob="coalesced_row_power"
            )
        if type(self.partitions) is not int or self.partitions not in (1, 2):
            raise OutOfRangeError(
                f"partitions is {plain(repr(self.partitions), 80)}", needed="1 or 2", knob="partitions"
            )
        if self.ways is not None and (type(self.ways) is not int or not 1 <= self.ways <= 1024):
            raise OutOfRangeError(f"ways is {plain(repr(self.ways), 80)}", needed="1 to 1024, or null", knob="ways")


def load_l2_calibration(gpu: GpuSpec, path: str | os.PathLike[str] | None = None) -> L2Calibration:
    """The calibration of `gpu`: its own entry, else that of the same chip, of cards built alike, or the default.

    Args:
        path: a file of the same form as `l2_calibration.json`.

    Raises:
        FileFormatError: the file cannot be read or is of another form.
        OutOfRangeError: a value out of range.
    """
    content = _read(Path(path) if path is not None else DEFAULT_FILE)
    cards = _table(content, "cards")
    if gpu.name in cards:
        return _calibration(cards[gpu.name])
    for name in ("same_chip", "two_partitions"):
        alike = _table(content, name)
        if gpu.compute_capability in alike.get("compute_capabilities", ()):
            return _calibration(alike)
    return _calibration(content.get("default", {}))


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise FileFormatError(f"{plain(path, 200)} is too large for a calibration", needed="at most 1 MB")
        content = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, FileFormatError):
            raise
        raise FileFormatError(f"{plain(path, 200)} is no calibration: {plain(error, 200)}") from error
    if not isinstance(content, dict):
        raise FileFormatError(f"{plain(path, 200)} is no calibration: an object was expected")
    return content


def _table(content: dict[str, Any], name: str) -> dict[str, Any]:
    table = content.get(name, {})
    if not isinstance(table, dict):
        raise FileFormatError(f"{name} of a calibration is an object")
    return table


def _calibration(entry: Any) -> L2Calibration:
    if not isinstance(entry, dict):
        raise FileFormatError("an entry of a calibration is an object")
    known = [field.name for field in dataclasses.fields(L2Calibration)]
    return L2Calibration(**{name: entry[name] for name in known if name in entry})
