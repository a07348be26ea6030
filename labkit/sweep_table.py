"""What a simulated sweep found: its combinations as a table, the best first, and the command of the best."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from labkit import format as shown
from labkit.measure.run_record import RunRecord
from labkit.measure.summary import RunSummary, summarize
from labkit.specs.knob_text import knob_word
from labkit.terminal import out, show_json
from labkit.text import plain

MAX_ROWS, MAX_REASONS, WIDTHS = 30, 5, (13, 9, 9, 10, 10)
# Pairs of settings that lie further apart than this are put in the right order in nearly all public cases.
APART = 0.05


def show_sweep(records: Sequence[RunRecord], knobs: Sequence[str], vllm: str, *, as_json: bool = False) -> None:
    """Print the records of a sweep over `knobs`, those with the highest rate first; what was refused with its reason.

    Args:
        vllm: the version for which the best one's command is written.
        as_json: one JSON document with all of them instead.
    """
    ranked = sorted(((record, summarize(record)) for record in records), key=lambda each: -_rate(*each)[0])
    if as_json:
        show_json([_row_json(record, summary, knobs) for record, summary in ranked])
        return
    served = [each for each in ranked if each[0].status != "failed"]
    out(f"{shown.count(len(served))} of {shown.count(len(records))} combinations are served, the best first")
    if served:
        out(_line("output", "TTFT p99", "ITL p99", "KV tokens", "not served", "settings"))
    for record, summary in served[:MAX_ROWS]:
        out(_row(record, summary, knobs))
    if len(served) > MAX_ROWS:
        out(f"{shown.count(len(served) - MAX_ROWS)} more; --json has all")
    reasons = Counter(record.error.partition(" (needed: ")[0] for record in records if record.status == "failed")
    for reason, alike in reasons.most_common(MAX_REASONS):
        out(f"{shown.count(alike)} refused: {plain(reason, 300)}")
    if served:
        _show_best(served, knobs, vllm)


def _show_best(served: Sequence[tuple[RunRecord, RunSummary]], knobs: Sequence[str], vllm: str) -> None:
    from labkit.advice import export_command

    best, summary = served[0]
    alike = sum(_rate(*other)[0] >= (1 - APART) * _rate(best, summary)[0] for other in served) - 1
    tie = f"; {shown.count(alike)} more are within {shown.share(APART, 1)}, less than a simulation tells apart"
    out(f"the best: {_settings(best, knobs)}{tie if alike else ''}")
    out(" ".join(export_command(best.model.name, best.config, vllm).words))
    out(best.note)


def _rate(record: RunRecord, summary: RunSummary) -> tuple[float, str]:
    """What is to be large, with its unit: embeddings put out no tokens."""
    if record.model.is_embedding:
        return summary.requests_per_s or 0.0, "req/s"
    return summary.output_tokens_per_s or 0.0, "tok/s"


def _settings(record: RunRecord, knobs: Sequence[str]) -> str:
    """As `--sweep` takes them: "max_num_seqs=64 kv_cache_dtype=fp8"."""
    return " ".join(f"{knob}={knob_word(getattr(record.config, knob))}" for knob in knobs)


def _row(record: RunRecord, summary: RunSummary, knobs: Sequence[str]) -> str:
    first, between = summary.ttft_s, summary.inter_token_s
    return _line(
        shown.rate(*_rate(record, summary)),
        shown.duration(first.p99) if first else shown.MISSING,
        shown.duration(between.p99) if between else shown.MISSING,
        shown.count(record.plan.kv_cache_tokens),
        shown.count(summary.num_requests - summary.num_finished),
        _settings(record, knobs),
    )


def _line(*cells: str) -> str:
    """Five numbers under one another, then the settings, which may be long."""
    return " ".join([*(f"{cell:>{width}}" for cell, width in zip(cells, WIDTHS, strict=False)), f" {cells[-1]}"])


def _row_json(record: RunRecord, summary: RunSummary, knobs: Sequence[str]) -> dict[str, object]:
    first, between = summary.ttft_s, summary.inter_token_s
    return {
        "knobs": {knob: getattr(record.config, knob) for knob in knobs}, "status": record.status,
        "error": record.error, "output_tokens_per_s": summary.output_tokens_per_s,
        "requests_per_s": summary.requests_per_s, "ttft_p99_s": first.p99 if first else None,
        "inter_token_p99_s": between.p99 if between else None, "num_finished": summary.num_finished,
        "num_requests": summary.num_requests, "kv_cache_tokens": record.plan.kv_cache_tokens,
    }  # fmt: skip
