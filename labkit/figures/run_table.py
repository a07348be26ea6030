"""The runs as rows: what each was, what it gave, and how far it is from the baseline."""

from __future__ import annotations

from collections.abc import Sequence
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
    """One run: its numbers, the settings in which the runs differ, its distance to the baseline."""

    run_id: str
    name: str
    status: str
    summary: RunSummary
    settings: str
    baseline: RunSummary | None = None


@dataclass(frozen=True)
class RunTableInfo:
    """Rows in the order of the records; `baseline_index` is None where none is pinned."""

    rows: tuple[RunRow, ...]
    baseline_index: int | None = None


def get_run_table_info(records: Sequence[RunRecord], baseline_id: str | None = None) -> RunTableInfo:
    """The rows of `records`, with deltas to the run `baseline_id` where that is one of them."""
    index = next((at for at, record in enumerate(records) if record.run_id == baseline_id), None)
    base = summarize(records[index]) if index is not None else None
    varied = varied_knobs(records)
    rows = tuple(
        RunRow(record.run_id, record.name, record.status, summarize(record), settings_words(record.config, varied),
               base if at != index else None)
        for at, record in enumerate(records)
    )  # fmt: skip
    return RunTableInfo(rows, index)


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
        row.status,
        fmt.number(rate) + _delta(base[0], rate, higher_is_better=True),
        fmt.duration(first) + _delta(base[1], first, higher_is_better=False),
        fmt.duration(between) + _delta(base[2], between, higher_is_better=False),
        fmt.share(peak, 1),
        fmt.count(preemptions),
        row.settings,
    ]


def _delta(before: float | None, after: float | None, *, higher_is_better: bool) -> str:
    if not before or after is None:
        return ""
    percent = 100 * (after - before) / before
    if abs(percent) < 0.05:
        return " (same)"
    better = (percent > 0) == higher_is_better
    sign = "+" if percent > 0 else "−"
    return f" ({'▲' if better else '▼'} {sign}{fmt.share(abs(percent), 100)})"
