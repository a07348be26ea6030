"""What the command line prints: tables, one progress line, and the summary of a run."""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from labkit import format as shown
from labkit.text import plain

if TYPE_CHECKING:
    from labkit.doctor.check import Examination
    from labkit.measure.run_record import RunRecord
    from labkit.memory.log_explanation import LogExplanation
    from labkit.memory.records import MemoryPlan
    from labkit.specs.gpu_spec import GpuSpec
    from labkit.specs.presets import Preset
    from labkit.specs.workload import Workload

QUIET_S = 5.0


def accept_every_character() -> None:
    """Let a terminal that is not UTF-8 show "?" for what it lacks, where Python would end with an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def out(text: str) -> None:
    """Print a line to standard output; nothing in it is taken for markup."""
    Console(highlight=False, soft_wrap=True).print(plain(text, 4000), markup=False)


def warn(text: str) -> None:
    """Print a line to standard error."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(plain(text, 4000), markup=False, style="red")


def show_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], whole: Sequence[str] = ()) -> None:
    """Print rows of text as a table; nothing in a cell is taken for markup, and columns in `whole` are not broken."""
    table = Table(title=Text(plain(title)), title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column in whole)
    for row in rows:
        table.add_row(*(Text(plain(cell)) for cell in row))
    Console(highlight=False).print(table)


def show_json(value: Any) -> None:
    """Print one JSON document, and nothing else, to standard output."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def show_plan(plan: MemoryPlan) -> None:
    """Print a plan: the answer, what would make it fit, the parts with their formulas, and what was assumed."""
    from labkit.advice.cures import cures
    from labkit.memory.records import PART_TITLES

    cards = plan.config.tensor_parallel_size * plan.config.pipeline_parallel_size
    on = f"{cards} × {plan.gpu.name}" if cards > 1 else plan.gpu.name
    engine = f"vLLM {plan.engine_version}" if plan.engine == "vllm" else f"{plan.engine}'s engine"
    out(f"{plan.model.name} on {on}, {engine}: {plan.verdict}")
    tokens = f"{shown.count(plan.kv_cache_tokens)} tokens of KV"
    requests = f"{shown.number(plan.max_concurrency)} requests of {shown.count(plan.config.max_model_len)}"
    out(f"  {tokens} = {requests}; longest that fits {shown.count(plan.max_model_len_that_fits)} tokens")
    out(f"  binds: {plan.binding_limit}")
    for cure in cures(plan):
        out(f"  would work: {cure.text}")
    for refusal in refusals(plan):
        out(f"  {refusal}")
    parts, errors = plan.breakdown.parts(), plan.breakdown.uncertainty_bytes
    rows = [
        [
            PART_TITLES[part] if size >= 0 else "missing",
            shown.memory(abs(size)),
            f"± {shown.memory(errors[part])}" if part in errors else "",
            plan.formulas.get(part, ""),
        ]
        for part, size in parts.items()
    ]
    show_table(
        f"Memory of {'each card' if cards > 1 else 'the card'}, {shown.memory(plan.breakdown.total_bytes)}, predicted",
        ["part", "size", "within", "how"],
        rows,
    )
    show_notes(plan, without=refusals(plan))


def refusals(plan: MemoryPlan) -> tuple[str, ...]:
    """Notes of settings with which vLLM does not start, whatever the memory."""
    from labkit.memory.explain import REFUSED

    return tuple(note for note in plan.notes if note.startswith(REFUSED))


def show_notes(plan: MemoryPlan, without: Sequence[str] = ()) -> None:
    """Print what was assumed."""
    for note in plan.notes:
        if note not in without:
            out(f"note: {note}")


def warn_of_other_machine(gpu: GpuSpec) -> None:
    """Say that a run for a card that is not here is the CPU's."""
    from labkit.experiments.card import runs_on

    if not gpu.is_cpu and not runs_on(gpu):
        warn(
            f"{gpu.name} is not here, so this machine's CPU runs it and says nothing of that card; labkit simulate "
            "serves the trace on a virtual one"
        )


def warn_of_no_card(asked: str, plan: MemoryPlan) -> None:
    """Say that a plan of a server is one for the CPU where "auto" found no card."""
    if asked == "auto" and plan.gpu.is_cpu and plan.engine == "vllm":
        warn(
            f"no card is here, so this is a plan for {shown.memory(plan.breakdown.total_bytes)} of the CPU's memory "
            "(cpu_memory_gib); --gpu A10 plans for that card, `labkit gpus` lists them"
        )


def show_explanation(found: LogExplanation) -> None:
    """Print what a log says: the answer, log beside plan part by part, and the cures."""
    out(found.answer)
    rows = [
        [row.title, shown.memory(row.log_bytes), shown.memory(row.plan_bytes), "off" if row.is_off else ""]
        for row in found.rows
    ]
    if rows:
        show_table("Part by part", ["part", "log (measured)", "plan (predicted)", "apart"], rows)
    for cure in found.cures:
        out(f"cure: {cure.text}")
    for note in found.notes:
        out(f"note: {note}")


def show_advice(plan: MemoryPlan, traffic: Workload) -> None:
    """Print the limit on `traffic` and what each change would buy there; from the plan alone where that is all."""
    from labkit.advice import advise, binding_limit, headline, study_load
    from labkit.advice.cures import cures
    from labkit.memory.explain import DOUBT

    study = study_load(plan, traffic)
    found = study.advice if study else advise(plan)
    out(headline(plan, study.limit if study else binding_limit(plan), found[0] if found else None))
    # One change is in the list below; several at once are not.
    for cure in cures(plan) if not any(advice.cures for advice in found) else ():
        out(f"would work: {cure.text}")
    if study:
        out(f"on {traffic.name}, {study.speed.basis}: at most {shown.rate(study.speed.rate, study.speed.unit)}")
        show_refused(study.speed.record)
    for advice in found:
        out(f"- {advice.title}: {advice.gain}")
        for entry in advice.evidence:
            out(f"    {entry.label}: {entry.value}")
        out(f"    risk: {advice.risk}")
    show_notes(plan, without=[note for note in plan.notes if note.startswith(DOUBT)])


def show_presets(presets: Sequence[Preset]) -> None:
    """Print each task with its flags, traffic and goal."""
    for entry in presets:
        out(f"{entry.name}: {entry.title}; {entry.reason}")
        out("    flags: " + " ".join(f"{knob}={value}" for knob, value in entry.knobs.items()))
        out(f"    traffic: {entry.workload}, " + ", ".join(f"{knob} {size}" for knob, size in entry.take.items()))
        out(f"    goal: {entry.goal_words}")


def show_examination(found: Examination) -> None:
    """Print checks: what is wrong with cause and fix first, then a line for each that is well, then the answer."""
    releases = found.facts.get("releases")
    if releases:
        columns = [name for name in releases[0] if name not in ("glibc", "transformers")]
        show_table("Recorded releases", columns, [[row[name] for name in columns] for row in releases])
    for status, name, evidence, cause, fix in found.rows():
        out(f"{status:8} {name}: {evidence}")
        for word, text in (("cause" if status != "ok" else "note", cause), ("fix", fix)):
            if text:
                out(f"         {word}: {text}")
    out(found.sentence)


def show_summary(results: Mapping[str, Any], path: Path) -> None:
    """Print the `summary` of a results file that was just written."""
    rows = []
    for name, entry in results["summary"].items():
        bar = f"≥ {entry['at_least']}" if "at_least" in entry else f"≤ {entry['at_most']}"
        rows.append([name, shown.number(entry["value"]), bar, "met" if entry["ok"] else "missed"])
    show_table(str(path), ["number", "value", "bar", ""], rows)


def show_record(record: RunRecord) -> None:
    """Print a run: status, speed, latency, and predicted beside measured memory."""
    from labkit.measure.summary import summarize
    from labkit.memory.records import PART_TITLES

    summary = summarize(record)
    run = "" if record.origin == "simulated" else f", run {record.run_id}"
    out(f"{record.name}: {record.status}{run} ({record.origin})")
    if record.error:
        out(f"  why: {record.error}")
    if not summary.num_requests:
        return
    served = f"{summary.num_finished} of {summary.num_requests} requests"
    latencies = {"time to first token": summary.ttft_s, "between tokens": summary.inter_token_s}
    if record.model.is_embedding:
        out(f"  {shown.rate(summary.requests_per_s, 'req/s')}, {served}")
        latencies = {"whole request": summary.e2e_s}
    else:
        out(f"  {shown.rate(summary.output_tokens_per_s)} output, {served}")
    show_refused(record)
    for title, times in latencies.items():
        if times is not None:
            out(f"  {title}: p50 {shown.duration(times.p50)}, p95 {shown.duration(times.p95)}")
    if record.measured is None:
        return
    predicted, measured = record.plan.breakdown.parts(), record.measured.parts()
    rows = [[PART_TITLES[part], shown.memory(predicted[part]), shown.memory(measured[part])] for part in measured]
    show_table("Memory", ["part", "predicted", "measured"], rows)


def show_refused(record: RunRecord) -> None:
    """Print how many requests were not served, and why the longest was not."""
    refused = [row for row in record.requests if row.finish_reason.startswith("refused")]
    if refused:
        longest = max(refused, key=lambda row: row.input_tokens)
        out(f"  {shown.count(len(refused))} not served, the longest prompt for one: {longest.finish_reason}")


class ProgressLine:
    """Shows the events of a run: phase, count, elapsed, remaining; a bar on a terminal, else a line now and then."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self._start = time.monotonic()
        self._last_line = 0.0
        columns = TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.fields[times]}")
        quiet = not self._console.is_terminal
        self._bar = Progress(*columns, console=self._console, transient=True, disable=quiet)
        self._task = self._bar.add_task("starting", total=None, times="")

    def __enter__(self) -> ProgressLine:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def __call__(self, event: dict[str, Any]) -> None:
        """Show one event; unknown types are passed over."""
        if event["type"] == "progress":
            self._progress(event)
        elif event["type"] == "status":
            self._say(plain(event["message"]))
        elif event["type"] == "log" and event.get("level") in ("warning", "error"):
            self._console.print(plain(event["message"]), markup=False, style="yellow")

    def _progress(self, event: dict[str, Any]) -> None:
        times = f"{shown.duration(event.get('elapsed_s', time.monotonic() - self._start))} elapsed"
        if event.get("remaining_s") is not None:
            times += f", about {shown.duration(event['remaining_s'])} left"
        text, unit = plain(event["phase"]), plain(event.get("unit", ""), 40)
        text += f": {shown.progress(event['done'], event['total'], unit)}" if unit else ""
        self._bar.update(self._task, description=text, total=event["total"], completed=event["done"], times=times)
        if not self._console.is_terminal and time.monotonic() - self._last_line > QUIET_S:
            self._say(f"{text} · {times}")

    def _say(self, text: str) -> None:
        if self._console.is_terminal:
            self._bar.update(self._task, description=text)
            return
        self._last_line = time.monotonic()
        self._console.print(text, markup=False)
