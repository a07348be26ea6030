"""The figures of a report: each with its sentence, its data table, and both themes as JSON; or why it is missing."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from labkit.figures import (
    block_map,
    kv_over_time,
    l2,
    latency,
    memory_breakdown,
    pareto,
    requests,
    step_roofline,
    throughput,
)
from labkit.figures.runs import comparable
from labkit.figures.tables import Table
from labkit.measure.run_record import RunRecord
from labkit.memory.records import MemoryPlan

# Trace types that plotly draws without WebGL; WebGL needs eval, which the page's policy forbids.
ALLOWED_TRACES = frozenset({"bar", "scatter", "heatmap", "box", "histogram"})


@dataclass(frozen=True)
class FigureSection:
    """One figure of the page.

    Attributes:
        anchor: of the section; the plot's element is `plot-<anchor>`.
        caption: the sentence computed from the data.
        light, dark: the figure as plotly JSON, "" where it is missing.
        missing: cause and next step where there is nothing to draw, else "".
        height: of the drawn figure in pixels.
    """

    anchor: str
    title: str
    caption: str
    table: Table
    light: str
    dark: str
    missing: str
    height: int


@dataclass(frozen=True)
class Evidence:
    """What the figures are drawn from: `best` and `baseline` are among `records`, or None."""

    plan: MemoryPlan | None
    records: Sequence[RunRecord]
    best: RunRecord | None
    baseline: RunRecord | None

    @property
    def compared(self) -> Sequence[RunRecord]:
        """The finished runs: a run cut short has other rates. Where none finished, all that there are."""
        return comparable(self.records)


@dataclass(frozen=True)
class _Kind:
    anchor: str
    title: str
    module: ModuleType
    info: Callable[[Evidence], Any]
    is_empty: Callable[[Any], bool]
    missing: str


def _other_baseline(evidence: Evidence) -> RunRecord | None:
    return evidence.baseline if evidence.baseline is not evidence.best else None


def _ordered(evidence: Evidence) -> Sequence[RunRecord]:
    """The recommended run first: the distribution figure shows the first few."""
    first = [run for run in (evidence.best, _other_baseline(evidence)) if run is not None]
    return [*first, *(run for run in evidence.records if run not in first)]


_KINDS = (
    _Kind(
        "memory",
        "Memory of the card",
        memory_breakdown,
        lambda evidence: memory_breakdown.get_memory_breakdown_info(
            evidence.plan, evidence.best, _other_baseline(evidence)
        ),
        lambda info: not info.bars,
        "There is no plan. Make one with labkit.plan(model, gpu, config) and pass it to the report.",
    ),
    _Kind(
        "throughput",
        "Throughput",
        throughput,
        lambda evidence: throughput.get_throughput_info(evidence.compared),
        lambda info: not info.points,
        "No run has given a token. Run a configuration: session.run(config), or labkit tune.",
    ),
    _Kind(
        "latency",
        "Latency",
        latency,
        lambda evidence: latency.get_latency_info(evidence.compared),
        lambda info: not info.points,
        "No run has given a first token. Run a configuration, or let an interrupted run go on for longer.",
    ),
    _Kind(
        "pareto",
        "Throughput against latency",
        pareto,
        lambda evidence: pareto.get_pareto_info(evidence.compared, baseline=evidence.baseline),
        lambda info: not info.points,
        "No run has both a rate and a latency. Run at least one configuration to its end.",
    ),
    _Kind(
        "limits",
        "What binds the steps",
        step_roofline,
        lambda evidence: step_roofline.get_step_roofline_info([evidence.best]),
        lambda info: info.bound is None,
        "The run was on a CPU, or on a card whose figures are not known. Run on a card, or simulate one.",
    ),
    _Kind(
        "kv",
        "KV use over time",
        kv_over_time,
        lambda evidence: kv_over_time.get_kv_over_time_info(evidence.best),
        lambda info: not info.reserved.y,
        "The run has no steps: it ended before its first one, or nothing ran. Run the configuration again.",
    ),
    _Kind(
        "blocks",
        "Who owns the KV blocks",
        block_map,
        lambda evidence: block_map.get_block_map_info(evidence.best),
        lambda info: not info.owners,
        "The run recorded no block map: it ended before its fullest step. Run the configuration again.",
    ),
    _Kind(
        "requests",
        "Distribution over requests",
        requests,
        lambda evidence: requests.get_requests_info(_ordered(evidence)),
        lambda info: not info.runs,
        "No request got its first token. Look at the status of the runs for the cause.",
    ),
    _Kind(
        "l2",
        "L2 cache and bandwidth",
        l2,
        lambda evidence: l2.get_l2_info(evidence.compared),
        lambda info: not info.bars,
        "No run has counters: they need a card, or its model in simulation. Choose a GPU for the session.",
    ),
)


def figure_sections(evidence: Evidence) -> tuple[FigureSection, ...]:
    """Every figure of the page in reading order; none is left out, a missing one says why."""
    return tuple(_section(kind, evidence) for kind in _KINDS)


def _section(kind: _Kind, evidence: Evidence) -> FigureSection:
    info = kind.info(evidence)
    caption, table = kind.module.caption(info), kind.module.table(info)
    if kind.is_empty(info):
        return FigureSection(kind.anchor, kind.title, "", table, "", "", kind.missing, 0)
    draw = getattr(kind.module, f"draw_{kind.module.__name__.rsplit('.', 1)[-1]}")
    light, dark = draw(info, theme="light"), draw(info, theme="dark")
    height = int(light.layout.height or 360)
    return FigureSection(
        kind.anchor, kind.title, caption, table, _figure_json(light), _figure_json(dark), "", height
    )  # fmt: skip


def _figure_json(figure: Any) -> str:
    """A figure as JSON with sorted keys and without the parts of the template that it does not use."""
    plain = json.loads(figure.to_json(validate=False, engine="json"))
    kinds = {trace.get("type", "scatter") for trace in plain["data"]}
    if not kinds <= ALLOWED_TRACES:
        raise ValueError(f"a report cannot draw {', '.join(sorted(kinds - ALLOWED_TRACES))}: it needs WebGL or maps")
    return script_json(plain)


def script_json(value: Any) -> str:
    """`value` as JSON that cannot end or open a script element, equal values giving equal bytes."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.translate({ord(char): f"\\u{ord(char):04x}" for char in "<>&"})
