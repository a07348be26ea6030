"""The runs as rows: what each was, what it gave, and how far it is from the baseline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from labkit import format as fmt
from labkit.figures.next_steps import shown
from labkit.figures.runs import varied_knobs
from labkit.figures.tables import Table, make_table
from labkit.measure.run_record import RunRecord
from labkit.measure.summary import RunSummary, summarize
from labkit.specs.engine_config import EngineConfig
from labkit.text import plain

COLUMNS = ("run", "status", "output tok/s", "first token p95", "between tokens p95", "peak KV", "preemptions",
           "what differs")  # fmt: skip


@dataclass(frozen=True)
class RunRow:
    """One run: its numbers, the settings in which the runs differ, its distance to the baseline; `origin` is "" where
    no step gave a number."""

    run_id: str
    name: str
    status: str
    summary: RunSummary
    settings: str
    origin: str
    baseline: RunSummary | None = None


@dataclass(frozen=True)
class RunTableInfo:
    """Rows in the order of the records; `baseline_index` is None where none is pinned.

    Attributes:
        pinned: rows that stay on top under any sort, the baseline first.
    """

    rows: tuple[RunRow, ...]
    baseline_index: int | None = None
    pinned: tuple[int, ...] = ()


def get_run_table_info(
    records: Sequence[RunRecord],
    baseline_id: str | None = None,
    pinned_ids: Sequence[str] = (),
    *,
    deltas: bool = True,
) -> RunTableInfo:
    """The rows of `records`, with deltas to the run `baseline_id` where that is one of them.

    Args:
        pinned_ids: of further runs that stay on top, in their order.
        deltas: False leaves the deltas out.
    """
    places = {record.run_id: at for at, record in enumerate(records)}
    index = places.get(baseline_id) if baseline_id is not None else None
    base = summarize(records[index]) if index is not None and deltas else None
    on_top = [places[run_id] for run_id in pinned_ids if run_id in places and places[run_id] != index]
    varied = varied_knobs(records)
    rows = tuple(
        RunRow(record.run_id, record.name, record.status, summarize(record), settings_words(record.config, varied),
               record.origin if record.steps else "", base if at != index else None)
        for at, record in enumerate(records)
    )  # fmt: skip
    return RunTableInfo(rows, index, (*(() if index is None else (index,)), *on_top))


def settings_words(config: EngineConfig, knobs: Sequence[str]) -> str:
    """The values of `knobs`: "block_size 32, kv_cache_dtype fp8"."""
    return ", ".join(f"{name} {shown(getattr(config, name))}" for name in knobs) or "–"


def table(info: RunTableInfo) -> Table:
    """Texts of the rows; beside each number its change against the baseline, with sign and mark."""
    caption = "Runs" if info.baseline_index is None else "Runs; ▲ better, ▼ worse than the baseline"
    return make_table(COLUMNS, [_texts(row) for row in info.rows], caption)


def sort_keys(info: RunTableInfo) -> list[list[Any]]:
    """The values behind the texts of `table`, for sorting; what is missing sorts last."""
    return [[row.name, row.status, *(_missing_last(value) for value in _numbers(row.summary)), row.settings]
            for row in info.rows]  # fmt: skip


def _missing_last(value: float | None) -> float:
    return 1e300 if value is None else float(value)


def _numbers(summary: RunSummary) -> tuple[float | None, ...]:
    return (
        summary.output_tokens_per_s,
        summary.ttft_s.p95 if summary.ttft_s else None,
        summary.inter_token_s.p95 if summary.inter_token_s else None,
        summary.peak_kv_share,
        summary.num_preemptions,
    )


def _texts(row: RunRow) -> list[str]:
    rate, first, between, peak, preemptions = _numbers(row.summary)
    base = _numbers(row.baseline) if row.baseline else (None,) * 5
    return [
        plain(row.name, 60),
        f"{row.status}, {row.origin}" if row.origin else row.status,
        fmt.number(rate) + _delta(base[0], rate, fmt.number, higher_is_better=True),
        fmt.duration(first) + _delta(base[1], first, fmt.duration, higher_is_better=False),
        fmt.duration(between) + _delta(base[2], between, fmt.duration, higher_is_better=False),
        fmt.share(peak, 1),
        fmt.count(preemptions),
        row.settings,
    ]


def _delta(before: float | None, after: float | None, show: Callable[[float], str], *, higher_is_better: bool) -> str:
    """Mark, percent and amount of a change: " (▲ +18 %, +190)"."""
    if not before or after is None:
        return ""
    percent = 100 * (after - before) / before
    if abs(percent) < 0.05:
        return " (same)"
    better = (percent > 0) == higher_is_better
    sign = "+" if percent > 0 else "−"
    amount = f"{sign}{show(abs(after - before))}"
    return f" ({'▲' if better else '▼'} {sign}{fmt.share(abs(percent), 100)}, {amount})"
