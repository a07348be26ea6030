"""`build_report`: run data to one self-contained page that opens offline, prints, and asks the network for nothing."""

from __future__ import annotations

import base64
import functools
import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2
import markupsafe

from labkit import format as fmt
from labkit.advice import Recommendation, binding_limit, export_plan, headline, recommend
from labkit.advice.recommend import settings_words
from labkit.doctor.check import COLUMNS as MACHINE_COLUMNS
from labkit.doctor.check import Examination
from labkit.experiments.serialise import record_to_plain, to_plain
from labkit.figures.runs import distinctly_named
from labkit.files import write_atomic
from labkit.measure.run_record import RunRecord
from labkit.memory.records import MemoryPlan
from labkit.report.figure_sections import Evidence, figure_sections, script_json
from labkit.report.run_rows import COLUMNS, formula_rows, run_rows
from labkit.specs.engine_config import EngineConfig
from labkit.specs.knob_text import panel_command
from labkit.text import plain

DATA_FORMAT = "labkit-report"
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:%|[µm]?s|min|h|[KMG]?i?B|[GT]B/s|tok/s|req/s|m?J)\b|%)|(?<=s) (?=/ )")
DATA_VERSION = 1


@dataclass(frozen=True)
class Notice:
    """Something that the reader must know first: what is wrong or missing, and what to do."""

    cause: str
    next_step: str


def build_report(
    records: Sequence[RunRecord] = (),
    plans: Sequence[MemoryPlan] = (),
    recommendation: Recommendation | None = None,
    *,
    created: str,
    title: str = "",
    notices: Sequence[Notice] = (),
    machine: Examination | None = None,
    vllm_version: str = "0.33.0",
) -> str:
    """The report as one HTML page; equal arguments give equal bytes.

    Args:
        records: runs of any status; each appears in the table, with cause and next step where it did not finish.
        plans: plans of settings that were considered; needed where nothing ran.
        recommendation: by default made from `records` and `plans`, if there are any.
        created: when it was made, shown and embedded as given; the clock is never asked.
        title: by default model and card.
        notices: shown above the answer, such as runs of a newer schema that could not be read.
        machine: what `labkit.doctor.examine` found on the machine that ran; its own part of the method.
        vllm_version: of the exported commands, where `recommendation` is not given.
    """
    if recommendation is None and (records or plans):
        recommendation = recommend(plans, records, vllm_version=vllm_version)
    plan = recommendation.plan if recommendation else None
    named = distinctly_named(records)
    evidence = _evidence(named, plan, recommendation)
    heading = plain(title, 200) or (f"{plain(plan.model.name, 120)} on {plain(plan.gpu.name, 80)}" if plan else "Empty")
    scripts = {"plotly": _plotly_js(), "page": _asset("report.js")}
    template = _environment().get_template("report.html.j2")
    return template.render(
        heading=heading,
        created=plain(created, 80),
        traffic=_traffic(records),
        policy=_policy(scripts),
        scripts=scripts,
        style=_asset("report.css"),
        notices=notices,
        recommendation=recommendation,
        answer=headline(plan, recommendation.limit, _first(recommendation)) if plan and recommendation else "",
        export=_export(recommendation),
        plan=plan,
        sections=figure_sections(evidence),
        columns=COLUMNS,
        runs=run_rows(
            named,
            recommendation.run_id if recommendation else None,
            recommendation.baseline_run_id if recommendation else None,
        ),
        best=evidence.best,
        settings=_settings(recommendation),
        formulas=formula_rows(plan) if plan else (),
        versions=sorted(evidence.best.versions.items()) if evidence.best else [],
        reproduce=_reproduce(evidence.best, plan),
        seeds=_seeds(records),
        machine=machine,
        machine_columns=MACHINE_COLUMNS,
        data=script_json(_data(records, plans, created)),
        fmt=fmt,
        binding_limit=binding_limit,
    )


def write_report(path: str | os.PathLike[str], *args: Any, **keywords: Any) -> Path:
    """Write `build_report(*args, **keywords)` to `path`, whole or not at all, and return the path.

    Raises:
        FileFormatError: the path cannot be written.
    """
    return write_atomic(path, build_report(*args, **keywords))


def report_file_name(model: str, gpu: str, created: str) -> str:
    """A file name that says what the report is about: "labkit-report-SmolLM2-135M-cpu-2026-11-30.html"."""
    parts = (re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-.")[:60] for text in (model, gpu, created[:10]))
    return "-".join(["labkit-report", *(part for part in parts if part)]) + ".html"


@functools.lru_cache(maxsize=1)
def _plotly_js() -> str:
    from plotly.offline import get_plotlyjs

    return get_plotlyjs()


def _asset(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


@functools.lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_asset),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        finalize=_without_control_characters,
    )
    environment.filters["plain"] = plain
    environment.filters["together"] = _together
    return environment


def _together(text: str) -> str:
    """`text` in which no line ends between a number and its unit, or before the slash of two numbers."""
    return _BEFORE_UNIT.sub("\u00a0", text)


def _without_control_characters(value: Any) -> Any:
    """Every value on its way into the page, line by line; what is marked safe is the page's own."""
    if not isinstance(value, str) or isinstance(value, markupsafe.Markup):
        return value
    return "\n".join(plain(line, len(line) + 1) for line in value.split("\n"))


def _policy(scripts: dict[str, str]) -> str:
    """Content security policy: only the page's own two scripts, by their hashes, and nothing from anywhere else.

    Inline styles stay allowed: plotly.js sets them (plotly.js#2355).
    """
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in scripts.values()
    )
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def _evidence(records: Sequence[RunRecord], plan: MemoryPlan | None, chosen: Recommendation | None) -> Evidence:
    by_id = {record.run_id: record for record in records}
    best = by_id.get(chosen.run_id or "") if chosen else None
    if best is None:  # nothing finished: the fullest run still shows what it has
        best = max(records, key=lambda record: len(record.steps), default=None)
    baseline = by_id.get(chosen.baseline_run_id or "") if chosen else None
    return Evidence(plan, records, best, baseline)


def _first(recommendation: Recommendation) -> Any:
    return recommendation.next_changes[0] if recommendation.next_changes else None


def _traffic(records: Sequence[RunRecord]) -> str:
    return plain(records[0].workload.get("name", ""), 160) if records else ""


def _export(recommendation: Recommendation | None) -> Any:
    if recommendation is None:
        return None
    return export_plan(recommendation.plan, recommendation.vllm_version)


def _settings(recommendation: Recommendation | None) -> list[tuple[str, str, str, str, str]]:
    """Knob, baseline, recommended, flag, help: every knob of the configuration."""
    if recommendation is None:
        return []
    before, after = recommendation.baseline.to_dict(), recommendation.config.to_dict()
    rows = []
    for knob in EngineConfig.knobs():
        old, new = (_setting(values[knob.name]) for values in (before, after))
        rows.append((knob.name, old, new, knob.flag or "labkit only", knob.help))
    return rows


def _setting(value: object) -> str:
    return settings_words({"": (value, value)}).rsplit(" → ", 1)[-1]


def _seeds(records: Sequence[RunRecord]) -> str:
    seeds = sorted({(record.seed, record.workload.get("seed", 0)) for record in records}, key=str)
    return "; ".join(f"engine {own}, traffic {traffic}" for own, traffic in seeds)


def _reproduce(best: RunRecord | None, plan: MemoryPlan | None) -> str:
    """Python that makes the plan and the run again; names are quoted as Python strings."""
    if plan is None:
        return ""
    changed = {name: pair[1] for name, pair in EngineConfig().differences(plan.config).items()}
    settings = ", ".join(f"{name}={value!r}" for name, value in changed.items())
    in_catalogue = plan.model.source in ("", "catalogue")
    model = plain(plan.model.name if in_catalogue else plan.model.source, 400)
    gpu = plain(plan.gpu.lookup, 400)
    lines = [f"# {panel_command(plan.config, model=model, gpu=gpu)}", "import labkit",
             f"config = labkit.EngineConfig({settings})"]  # fmt: skip
    if best is None:
        return "\n".join(
            [*lines, f"print(labkit.plan(labkit.load_model({model!r}), labkit.load_gpu({gpu!r}), config))"]
        )
    return "\n".join(
        [
            "import json, re",
            *lines,
            "from labkit.specs import RequestSpec, Workload",
            'page = open("tuning-report.html", encoding="utf-8").read()',
            "data = json.loads(re.search(r'id=\"labkit-data\">(.*?)</script', page, re.S)[1])",
            f'run = next(run["record"] for run in data["runs"] if run["record"]["run_id"] == {best.run_id!r})',
            'lengths = [(row["arrival_s"], row["input_tokens"], row["output_tokens"]) for row in run["requests"]]',
            'traffic = Workload("as in the report", tuple(RequestSpec(*row) for row in lengths), seed=run["seed"])',
            f"with labkit.Session(model={model!r}, gpu={gpu!r}, workload=traffic) as session:",
            f"    record = session.{'simulate' if best.origin == 'simulated' else 'run'}(config)",
        ]
    )


def _data(records: Sequence[RunRecord], plans: Sequence[MemoryPlan], created: str) -> dict[str, Any]:
    return {
        "format": DATA_FORMAT,
        "version": DATA_VERSION,
        "created": created,
        "runs": [record_to_plain(record) for record in records],
        "plans": [to_plain(plan) for plan in plans],
    }
