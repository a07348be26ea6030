"""Two runs side by side: only the settings that differ, and each metric with its change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from labkit import format as fmt
from labkit.figures.next_steps import shown
from labkit.figures.tables import Table, make_table
from labkit.measure.run_record import RunRecord
from labkit.measure.summary import RunSummary, summarize
from labkit.text import plain

# Metric → attribute path of the summary, how it is shown, whether more is better.
METRICS = (
    ("output tokens a second", "output_tokens_per_s", fmt.rate, True),
    ("first token, p50", "ttft_s.p50", fmt.duration, False),
    ("first token, p95", "ttft_s.p95", fmt.duration, False),
    ("between tokens, p95", "inter_token_s.p95", fmt.duration, False),
    ("end to end, p95", "e2e_s.p95", fmt.duration, False),
    ("energy for each output token", "energy_per_token_j", fmt.energy, False),
)


@dataclass(frozen=True)
class MetricChange:
    """One metric of both runs; None where a run gave none."""

    title: str
    before: float | None
    after: float | None
    before_text: str
    after_text: str
    more_is_better: bool

    @property
    def percent(self) -> float | None:
        """Growth in percent of the baseline's value."""
        return 100 * (self.after - self.before) / self.before if self.before and self.after is not None else None

    @property
    def words(self) -> str:
        """Sign, percent and whether that is better: "▲ +12 % better"."""
        percent = self.percent
        if percent is None:
            return fmt.MISSING
        if abs(percent) < 0.05:
            return "same"
        better = (percent > 0) == self.more_is_better
        sign = "+" if percent > 0 else "−"
        return f"{'▲' if better else '▼'} {sign}{fmt.share(abs(percent), 100)} {'better' if better else 'worse'}"


@dataclass(frozen=True)
class CompareInfo:
    """`knobs` are (name, baseline's value, other's value) where the resolved settings differ."""

    baseline: str
    other: str
    knobs: tuple[tuple[str, Any, Any], ...]
    metrics: tuple[MetricChange, ...]
    baseline_origin: str = "measured"
    other_origin: str = "measured"

    @property
    def names(self) -> tuple[str, str]:
        """Baseline and other run, each with how it was got."""
        sides = ((self.baseline, self.baseline_origin), (self.other, self.other_origin))
        first, second = (f"{plain(name, 40)} ({origin})" for name, origin in sides)
        return first, second


def get_compare_info(baseline: RunRecord, other: RunRecord) -> CompareInfo:
    """The two runs, `other` measured against `baseline`; a metric that neither has is left out."""
    differing = baseline.plan.config.differences(other.plan.config)
    first, second = summarize(baseline), summarize(other)
    metrics = tuple(
        MetricChange(
            title, _get(first, path), _get(second, path), show(_get(first, path)), show(_get(second, path)), more
        )
        for title, path, show, more in METRICS
        if (_get(first, path), _get(second, path)) != (None, None)
    )
    knobs = tuple((name, before, after) for name, (before, after) in differing.items())
    return CompareInfo(baseline.name, other.name, knobs, tuple(metrics), baseline.origin, other.origin)


def _get(summary: RunSummary, path: str) -> float | None:
    value: Any = summary
    for name in path.split("."):
        value = getattr(value, name) if value is not None else None
    return value


def caption(info: CompareInfo) -> str:
    """What differs, and what it did to the output rate; for equal settings, how far two equal runs are apart."""
    rate = info.metrics[0]
    baseline, other = info.names
    names = f"{other} against {baseline}"
    if not info.knobs:
        noise = f"±{fmt.share(abs(rate.percent), 100)}" if rate.percent is not None else "unknown"
        return f"{names}: same settings, so the difference is noise: {noise} of output tokens a second."
    differing = ", ".join(f"{name} {shown(before)} → {shown(after)}" for name, before, after in info.knobs)
    return f"{names}: {differing}; output {fmt.change(rate.before, rate.after, 'tok/s')}."


def table(info: CompareInfo) -> Table:
    """Differing settings first, then the metrics."""
    rows = [[name, shown(before), shown(after), ""] for name, before, after in info.knobs]
    rows += [[metric.title, metric.before_text, metric.after_text, metric.words] for metric in info.metrics]
    columns = ("", *info.names, "change")
    return make_table(columns, rows, "Baseline and chosen run")
