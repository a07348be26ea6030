"""The table of runs: what each gave, and for one that did not finish the cause and the next step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from labkit import format as fmt
from labkit.measure.run_record import RunRecord
from labkit.measure.summary import Percentiles, summarize
from labkit.memory.records import MemoryPlan
from labkit.text import plain


@dataclass(frozen=True)
class RunRow:
    """One line of the table; all cells are finished text, not escaped.

    Attributes:
        role: "baseline", "recommended" or "".
        cells: one for each of `COLUMNS`.
        problem: cause and next step of a run that did not finish, else "".
    """

    run_id: str
    role: str
    cells: tuple[str, ...]
    problem: str


COLUMNS = (
    "run",
    "status",
    "output",
    "first token p50 / p95",
    "between tokens p50 / p95",
    "KV peak",
    "preemptions",
    "energy per token",
    "finished requests",
    "verdict of the plan",
)


def run_rows(records: Sequence[RunRecord], best_id: str | None, baseline_id: str | None) -> tuple[RunRow, ...]:
    """Rows in the order of `records`."""
    return tuple(_row(record, best_id, baseline_id) for record in records)


def _row(record: RunRecord, best_id: str | None, baseline_id: str | None) -> RunRow:
    numbers = summarize(record)
    roles = [name for name, run_id in (("baseline", baseline_id), ("recommended", best_id)) if record.run_id == run_id]
    cells = (
        plain(record.name, 120) or record.run_id,
        status_words(record),
        fmt.rate(numbers.output_tokens_per_s),
        _two(numbers.ttft_s),
        _two(numbers.inter_token_s),
        fmt.MISSING if numbers.peak_kv_share is None else fmt.share(numbers.peak_kv_share, 1),
        fmt.count(numbers.num_preemptions),
        fmt.energy(numbers.energy_per_token_j),
        f"{fmt.count(numbers.num_finished)} of {fmt.count(numbers.num_requests)}",
        record.plan.verdict,
    )
    return RunRow(record.run_id, " and ".join(roles), cells, problem_of(record))


def _two(times: Percentiles | None) -> str:
    return fmt.MISSING if times is None else f"{fmt.duration(times.p50)} / {fmt.duration(times.p95)}"


def status_words(record: RunRecord) -> str:
    """Status with the kind of time: "finished, measured"."""
    words = {"running": "still running", "unfinished": "interrupted"}.get(record.status, record.status)
    return f"{words}, {record.origin}" if record.steps else words


def is_out_of_memory(record: RunRecord) -> bool:
    """The run failed for want of memory."""
    text = record.error.casefold()
    return record.status == "failed" and ("out of memory" in text or "outofmemory" in text or "cannot allocate" in text)


def problem_of(record: RunRecord) -> str:
    """Cause and next step of a run that is not finished; "" for a finished one."""
    if record.status == "finished":
        return ""
    steps = f"{fmt.count(len(record.steps))} steps were kept" if record.steps else "it ended before its first step"
    cause = plain(record.error, 300).rstrip(".")
    if is_out_of_memory(record):
        return (
            f"Out of memory ({cause}); {steps}. Next: lower gpu_memory_utilization, max_num_batched_tokens or "
            "max_num_seqs, which leave more room outside the KV cache."
        )
    if record.status == "failed":
        following = "Next: labkit run with the same settings shows the worker's own messages."
        return f"Failed: {cause or 'no cause was recorded'}; {steps}. {following}"
    if record.status == "cancelled":
        return f"Cancelled by the user; {steps}. Next: run it again for a result that can be compared."
    if record.status == "running":
        return f"Still running when the report was made; {steps}. Next: make the report again when it has ended."
    return (
        f"The process ended in the middle of the run{f' ({cause})' if cause else ''}; {steps}. Next: run it again; "
        "the other runs are not affected."
    )


def formula_rows(plan: MemoryPlan) -> tuple[tuple[str, str], ...]:
    """Part or quantity and its formula in words."""
    return tuple((name.replace("_", " "), text) for name, text in plan.formulas.items())
