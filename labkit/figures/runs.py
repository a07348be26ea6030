"""Which runs are compared, how they are told apart, which knob they vary, and in what order they stand on an axis."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from labkit.errors import UnknownNameError
from labkit.measure.run_record import RunRecord
from labkit.specs.engine_config import EngineConfig
from labkit.text import nearest, plain


@dataclass(frozen=True)
class KnobAxis:
    """`runs` in the order of the knob's values; `values` are those as text; `knob` is None where nothing varies."""

    knob: str | None
    title: str
    runs: tuple[RunRecord, ...]
    values: tuple[str, ...]


def distinctly_named(records: Sequence[RunRecord]) -> tuple[RunRecord, ...]:
    """`records`, those that share a name numbered in their order ("#2 block 16"): legend, table and sentence then mean
    one run. The number stands in front, as long names are cut at their end."""
    shared = {name for name, number in Counter(record.name for record in records).items() if number > 1}
    seen: Counter[str] = Counter()
    named = []
    for record in records:
        if record.name in shared:
            seen[record.name] += 1
            record = dataclasses.replace(record, name=f"#{seen[record.name]} {record.name}")
        named.append(record)
    return tuple(named)


def comparable(records: Sequence[RunRecord]) -> tuple[RunRecord, ...]:
    """The finished runs: a run that was cut short has other rates. All of them where none finished."""
    return tuple(record for record in records if record.status == "finished") or tuple(records)


def varied_knob(records: Sequence[RunRecord]) -> str | None:
    """The knob with the most different values over the runs' resolved settings; None where all are equal."""
    names = varied_knobs(records)
    return max(names, key=lambda name: _num_values(records, name)) if names else None


def varied_knobs(records: Sequence[RunRecord]) -> tuple[str, ...]:
    """Every knob in which the runs' resolved settings differ, in the order of the fields."""
    return tuple(entry.name for entry in dataclasses.fields(EngineConfig) if _num_values(records, entry.name) > 1)


def _num_values(records: Sequence[RunRecord], knob: str) -> int:
    return len({getattr(record.config, knob) for record in records})


def knob_axis(records: Sequence[RunRecord], knob: str | None = None) -> KnobAxis:
    """The runs along `knob`, by default the only one that varies; by name where none or several vary.

    Runs that differ in several knobs have no common axis: two of them would stand on one value of any knob.

    Raises:
        UnknownNameError: `knob` is no knob.
    """
    known = {entry.name: entry for entry in EngineConfig.knobs()}
    if knob is not None and knob not in known:
        close = nearest(knob, known)
        raise UnknownNameError(f"there is no knob {plain(knob, 80)!r}", works=close)
    varied = varied_knobs(records)
    knob = knob or (varied[0] if len(varied) == 1 else None)
    if knob is None:
        return KnobAxis(None, "run", tuple(records), tuple(plain(record.name, 40) for record in records))
    runs = sorted(records, key=lambda record: _order(getattr(record.config, knob)))
    unit = known[knob].unit
    title = f"{knob} ({unit})" if unit else knob
    return KnobAxis(knob, title, tuple(runs), tuple(_shown(getattr(run.config, knob)) for run in runs))


def _order(value: object) -> tuple[int, float, str]:
    if isinstance(value, (bool, int, float)):
        return 0, float(value), ""
    return 1, 0.0, str(value)


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int):
        return f"{value:,}"
    return plain(value, 40)
