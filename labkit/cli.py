"""The command line: plan and explain, run, simulate and report, lists, checks, benchmarks.

Commands read options, call one function of a lower room and print; the knobs' options are made from `EngineConfig`,
so command line, panel and docs share one text.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import labkit
from labkit import format as shown
from labkit.calibrate_command import calibrate_command
from labkit.cli_options import (
    DEFAULT_MODEL,
    DEFAULT_TRACE,
    AsJson,
    Gpu,
    Limit,
    Model,
    Store,
    Trace,
    Vllm,
    takes_knobs,
    takes_traffic,
)  # fmt: skip
from labkit.errors import LabkitError
from labkit.runs_command import runs_command
from labkit.serve_commands import diff, explain_command
from labkit.simulation_commands import advise_command, simulate_command
from labkit.specs.engine_config import EngineConfig
from labkit.specs.workload import Workload
from labkit.terminal import (
    ProgressLine,
    accept_every_character,
    out,
    show_examination,
    show_explanation,
    show_json,
    show_plan,
    show_presets,
    show_record,
    show_summary,
    show_table,
    warn,
    warn_of_no_card,
    warn_of_other_machine,
)

if TYPE_CHECKING:
    from labkit.memory.records import MemoryPlan

app = typer.Typer(
    help="labkit: a laboratory for the memory of LLM serving.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
# Headings of `labkit --help`.
_PLAN, _RUN, _LISTS = "Plan and explain", "Run, simulate, report", "What there is"
_CHECKS = "Check labkit and this machine"
bench_app = typer.Typer(help="Benchmarks; each writes a file under results/.", no_args_is_help=True)
app.add_typer(bench_app, name="bench", rich_help_panel=_CHECKS)
Results = Annotated[Path, typer.Option("--out", help="Results file.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        out(f"labkit {labkit.__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    _: Annotated[
        bool, typer.Option("--version", help="Show labkit's version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """labkit: a laboratory for the memory of LLM serving."""


def main() -> None:
    """Run the command line; labkit's own errors become one message and exit code 2."""
    accept_every_character()
    try:
        app()
    except LabkitError as error:
        warn(f"labkit: {error}")
        sys.exit(2)
    except (KeyboardInterrupt, SystemExit) as end:
        if getattr(end, "code", 130) != 130:  # with which typer, that catches Ctrl-C itself, ends
            raise
        warn("labkit: interrupted; what was finished is kept (see `labkit runs`)")
        sys.exit(130)


@app.command(rich_help_panel=_PLAN)
@takes_knobs
def plan(
    knobs: dict[str, Any],
    model: Model = DEFAULT_MODEL,
    gpu: Gpu = "auto",
    num_gpus: Annotated[int | None, typer.Option(help="Cards; alone it means tensor parallelism.", min=1)] = None,
    vllm: Vllm = "0.33.0",
    engine: Annotated[str, typer.Option(help="Whose rules: vllm, labkit or sglang.")] = "vllm",
    total_gib: Annotated[float | None, typer.Option(help="The card's total as CUDA reports it, in GiB.")] = None,
    free_gib: Annotated[float | None, typer.Option(help="Free on the card at start, in GiB.")] = None,
    available_kv_gib: Annotated[float | None, typer.Option(help="KV memory that a log states, in GiB.")] = None,
    weights_gib: Annotated[float | None, typer.Option(help="Weights of one rank, in GiB.")] = None,
    log: Annotated[Path | None, typer.Option(help="A start-up log of the host, for its own constants.")] = None,
    workload: Annotated[str | None, typer.Option(help="A trace: how many of its requests hold KV at once.")] = None,
    as_json: AsJson = False,
) -> None:
    """What a configuration means for memory: parts, KV tokens, what fits, which limit binds, and why."""
    from labkit.memory.logs import read_log_file
    from labkit.memory.machine import answers_json, plan_json, question_for

    question = question_for(
        model, gpu, knobs, num_gpus=num_gpus, engine=engine, vllm=vllm, total_gib=total_gib, free_gib=free_gib,
        available_kv_gib=available_kv_gib, weights_gib=weights_gib, calibration=read_log_file(log) if log else None,
    )  # fmt: skip
    found = question.plan()
    at_once = requests_at_once(found, workload) if workload else {}
    if as_json:
        show_json({**plan_json(found), **answers_json(question), **at_once})
        return
    warn_of_no_card(gpu, found)
    show_plan(found)
    for value in at_once.values():
        out(f"requests of {workload} at once, by their own lengths: {shown.count(value)}")


def requests_at_once(found: MemoryPlan, workload: str) -> dict[str, int]:
    """How many requests of a trace hold KV at once, by their own lengths instead of the longest."""
    from labkit.memory.questions import concurrent_requests
    from labkit.specs import load_workload

    requests = load_workload(workload, limit=10_000).requests
    lengths = [request.input_tokens + request.output_tokens for request in requests]
    longest = found.config.max_model_len or max(lengths)
    return {"concurrent_requests_of_workload": concurrent_requests(found, [min(size, longest) for size in lengths])}


@app.command("explain-log", rich_help_panel=_PLAN)
def explain_log(
    file: Annotated[Path, typer.Argument(help="vLLM's own output, from its start to the error or first request.")],
    model: Annotated[str | None, typer.Option(help="The model, where the log's name says too little.")] = None,
    gpu: Annotated[str | None, typer.Option(help="The card, where its total says too little.")] = None,
    as_json: AsJson = False,
) -> None:
    """Read a start-up or out-of-memory log: which part is off, why, and the smallest change that cures it."""
    from labkit.doctor.error_text import explain_error_text
    from labkit.doctor.run import read_error_text
    from labkit.memory.log_explanation import explain_log_file, explanation_json

    found = explain_log_file(file, model=model, gpu=gpu)
    if as_json:
        show_json(explanation_json(found))
    elif found.cause == "not_vllm":
        # No start-up numbers in it, but perhaps an error whose text is known: a bare out-of-memory line, say.
        show_examination(explain_error_text(read_error_text(str(file))))
    else:
        show_explanation(found)


@app.command(rich_help_panel=_PLAN)
@takes_knobs
def export(
    knobs: dict[str, Any],
    model: Model = DEFAULT_MODEL,
    vllm: Vllm = "0.33.0",
    form: Annotated[str, typer.Option("--as", help="serve, docker or compose.")] = "serve",
    check: Annotated[bool, typer.Option(help="Ask the installed vLLM's own parser as well.")] = False,
) -> None:
    """The command that carries a configuration to one vLLM version: only flags that it has."""
    from labkit.advice import export_command
    from labkit.advice.vllm_check import check_with_vllm
    from labkit.specs.model_catalogue import find_name

    is_path = Path(model).expanduser().exists()
    command = export_command((not is_path and find_name(model)) or model, EngineConfig(**knobs), vllm)
    sys.stdout.write(command.text(form))
    if check:
        answer = check_with_vllm(command.words[2:])
        said = "no vLLM is installed here" if answer is None else answer.error or f"vLLM {answer.version} takes it"
        warn(f"parser: {said}")


@app.command(rich_help_panel=_CHECKS)
@takes_knobs
def doctor(
    knobs: dict[str, Any],
    which_vllm: Annotated[bool, typer.Option("--which-vllm", help="Which vLLM releases run here.")] = False,
    model_folder: Annotated[str | None, typer.Option(help="Look through a model folder or .gguf file.")] = None,
    write_missing: Annotated[
        bool, typer.Option("--write-missing", help="Write a minimal tokenizer_config.json into that folder.")
    ] = False,
    error_text: Annotated[str | None, typer.Option(help="A line, a log, its path, or - for standard input.")] = None,
    preflight: Annotated[bool, typer.Option("--preflight", help="The daily checklist for these knobs.")] = False,
    model: Model = DEFAULT_MODEL,
    gpu: Gpu = "auto",
    workload: Annotated[str | None, typer.Option(help="Traffic for the preflight.")] = None,
    vllm: Annotated[str | None, typer.Option(help="A vLLM release that is wanted here, 0.6 to 0.33.")] = None,
    server: Annotated[str | None, typer.Option(help="A running server's address, for the preflight.")] = None,
    test: Annotated[bool, typer.Option(help="Compute something as well.")] = True,
    as_json: AsJson = False,
) -> None:
    """What is wrong with this machine, model folder, error or configuration, and what mends it. Exit code 0, 1 or 2."""
    from labkit.doctor.machine import Machine
    from labkit.doctor.preflight import preflight_of
    from labkit.doctor.run import Request
    from labkit.doctor.run import doctor as examine

    if preflight:
        version = vllm or "0.33.0"
        found = preflight_of(model, gpu, knobs, Machine(), trace=workload, vllm=version, server=server, test=test)
    else:
        found = examine(Request(which_vllm, model_folder, write_missing, error_text, test, vllm))
    if as_json:
        show_json(found.to_dict())
    else:
        show_examination(found)
    raise typer.Exit(found.exit_code)


@app.command(rich_help_panel=_RUN)
@takes_knobs
@takes_traffic(limit=16)
def run(
    knobs: dict[str, Any],
    traffic: Workload,
    model: Model = DEFAULT_MODEL,
    gpu: Gpu = "auto",
    store: Store = None,
    as_json: AsJson = False,
) -> None:
    """Run one configuration on one trace with labkit's engine, and keep the record."""
    import labkit
    from labkit.experiments.export import to_json

    with labkit.Session(model=model, gpu=gpu, workload=traffic, store=store) as session, ProgressLine() as progress:
        warn_of_other_machine(session.gpu)
        record = session.run(EngineConfig(**knobs), on_event=progress)
    if as_json:
        sys.stdout.write(to_json(record) + "\n")
    else:
        show_record(record)


app.command("explain-command", rich_help_panel=_PLAN)(explain_command)
app.command("diff", rich_help_panel=_PLAN)(diff)
app.command("simulate", rich_help_panel=_RUN)(simulate_command)
app.command("advise", rich_help_panel=_RUN)(advise_command)
app.command("calibrate", rich_help_panel=_RUN)(calibrate_command)


@app.command(rich_help_panel=_CHECKS)
def claims(
    ids: Annotated[list[str] | None, typer.Argument(help="C01 to C30, CASE-A; all thirty if none.")] = None,
    out_file: Annotated[Path | None, typer.Option("--out", help="Also write a results file.")] = None,
    as_json: AsJson = False,
) -> None:
    """What tuning guides say, put to the test: verdict, numbers, when it turns, how to run it again."""
    from labkit.advice.claims import judge_all, write_claims

    verdicts = judge_all(ids)
    if as_json:
        show_json([verdict.to_dict() for verdict in verdicts])
    else:
        for line in (line for verdict in verdicts for line in verdict.text().splitlines()):
            out(line)
    if out_file is not None:
        write_claims(out_file, ids)


@app.command(rich_help_panel=_RUN)
def panel(
    settings: Annotated[str, typer.Argument(help="Knobs, such as 'block_size=32 kv_cache_dtype=fp8'.")] = "",
    model: Model = DEFAULT_MODEL,
    gpu: Gpu = "auto",
    workload: Trace = DEFAULT_TRACE,
    limit: Limit = 100,
    out_file: Annotated[Path, typer.Option("--out", help="The notebook.")] = Path("labkit-panel.ipynb"),
    start: Annotated[bool, typer.Option(help="Open it in JupyterLab as well.")] = True,
    run: Annotated[
        str | None, typer.Option("--run", help="Id of a stored run: its settings, and it in the table.")
    ] = None,
    store: Store = None,
) -> None:
    """Open the panel with settings as text, or with a stored run; its button Copy settings gives this command."""
    from labkit.panel_notebook import of_run, open_notebook, write_panel_notebook

    session: dict[str, Any] = {"settings": settings, "model": model, "gpu": gpu, "workload": workload, "limit": limit}
    path = write_panel_notebook(out_file, **(session if run is None else of_run(run, store)))
    out(f"notebook: {path.resolve()}")
    if start:
        open_notebook(path)


@app.command(rich_help_panel=_RUN)
def tune(
    model: Model = DEFAULT_MODEL,
    gpu: Gpu = "auto",
    workload: Trace = DEFAULT_TRACE,
    budget_s: Annotated[float, typer.Option(help="Seconds for the runs.", min=5)] = 120.0,
    out_file: Annotated[Path, typer.Option("--out", help="The report.")] = Path("tuning-report.html"),
    vllm: Vllm = "0.33.0",
    store: Store = None,
    demo: Annotated[bool, typer.Option("--demo", help="A short session on the CPU with SmolLM2-135M.")] = False,
) -> None:
    """Plan, run a handful of configurations, recommend one, and write the report."""
    from labkit.tune import DEMO
    from labkit.tune import tune as tune_session

    warn_of_other_machine(labkit.load_gpu("cpu" if demo else gpu))
    options = {"model": model, "gpu": gpu, "workload": workload, "budget_s": budget_s, **(DEMO if demo else {})}
    with ProgressLine() as progress:
        result = tune_session(**options, out=out_file, engine_version=vllm, store=store, on_event=progress)
    out(result.recommendation.sentence)
    for line in result.recommendation.command.splitlines():
        out(line)
    out(f"report: {result.report_path.resolve()}")


@app.command(rich_help_panel=_RUN)
def report(
    run_ids: Annotated[
        list[str] | None, typer.Argument(help="Runs of the store; the newest session's if none.")
    ] = None,
    out_file: Annotated[Path, typer.Option("--out", help="The report.")] = Path("tuning-report.html"),
    store: Store = None,
) -> None:
    """Write the report of stored runs."""
    from labkit.tune import report_of_runs

    path = report_of_runs(run_ids, out=out_file, store=store, on_event=lambda event: warn(event["message"]))
    out(f"report: {path.resolve()}")


app.command("runs", rich_help_panel=_LISTS)(runs_command)


@app.command(rich_help_panel=_LISTS)
def models() -> None:
    """List the models of the catalogue."""
    from labkit.memory import count_parameters
    from labkit.specs import load_model, model_names

    rows = []
    for spec in (load_model(name) for name in model_names()):
        kinds = ", ".join(sorted({layer.kind for layer in spec.layers}))
        size = f"{shown.number(count_parameters(spec) / 1e9)} B"
        rows.append([spec.name, size, str(spec.num_layers), kinds, shown.count(spec.max_position_embeddings)])
    show_table("Models", ["name", "parameters", "layers", "attention", "longest [tokens]"], rows)


@app.command(rich_help_panel=_LISTS)
def gpus() -> None:
    """List the cards of this machine and of the catalogue."""
    from labkit.specs import gpu_names, load_gpu, read_gpus

    rows = []
    for card in (*read_gpus(), *(load_gpu(name) for name in gpu_names())):
        bandwidth = shown.bandwidth(card.mem_bandwidth_bytes_per_s)
        capability = card.compute_capability or shown.MISSING
        rows.append([card.name, shown.memory(card.total_bytes), bandwidth, capability, card.origin])
    show_table("Cards", ["name", "memory as CUDA sees it", "bandwidth", "capability", "origin"], rows)


@app.command(rich_help_panel=_LISTS)
def traces() -> None:
    """List the traffic traces that come with labkit."""
    from labkit.specs.datasets import dataset_names, find_dataset

    entries = [entry for name in dataset_names() if (entry := find_dataset(name)) is not None]
    show_table(
        "Traces", ["name", "traffic", "licence"], [[entry.name, entry.title, entry.licence] for entry in entries]
    )


@app.command(rich_help_panel=_LISTS)
def presets() -> None:
    """List the tasks that `--preset` knows: their flags, traffic and goal."""
    from labkit.specs.presets import presets as known

    show_presets(known())


@bench_app.command("engine")
def bench_engine_command(path: Results = Path("results/engine-cpu.json"), rounds: int = 3) -> None:
    """The CPU engine against transformers, same weights, one thread, one run."""
    from labkit.engine.bench import bench_engine

    show_summary(bench_engine(path, rounds=rounds, on_progress=out), path)


@bench_app.command("engine-gpu")
def bench_engine_gpu_command(path: Results = Path("results/engine-gpu.json")) -> None:
    """Throughput, latency and change of a knob on this machine's card, against vLLM's recorded numbers."""
    from labkit.engine.bench_gpu import bench_engine_gpu

    show_summary(bench_engine_gpu(path, on_progress=out), path)


@bench_app.command("tensor-parallel")
def bench_tensor_parallel_command(path: Results = Path("results/tensor-parallel.json")) -> None:
    """One model on two cards against one: the same tokens, decode's speed, and a rank that is killed."""
    from labkit.experiments.tensor_parallel_bench import bench_tensor_parallel

    show_summary(bench_tensor_parallel(path, on_progress=out), path)


@bench_app.command("claims")
def bench_claims_command(note: str = "") -> None:
    """What some claims need a card for; `labkit claims` then shows these numbers with card and date."""
    from labkit.advice.claims.on_card import measure_all

    measure_all(say=out, note=note)


@bench_app.command("planner")
def bench_planner_command(path: Results = Path("results/planner.json")) -> None:
    """The planner against vLLM's own planner, public reports and real start-ups."""
    from labkit.memory.planner_bench import bench_planner

    show_summary(bench_planner(path), path)


@bench_app.command("labkit-plan")
def bench_labkit_plan_command(path: Results = Path("results/labkit-plan.json")) -> None:
    """Planned pools of labkit's own engine against those that it took on a card."""
    from labkit.memory.labkit_plan_bench import bench_labkit_plan

    show_summary(bench_labkit_plan(path), path)


@bench_app.command("simulation")
def bench_simulation_command(
    path: Results = Path("results/simulation.json"),
    fit: Annotated[bool, typer.Option("--fit", help="Also fit the shipped constants anew.")] = False,
) -> None:
    """The virtual GPU against public runs, with whole models and whole cards left out."""
    from labkit.experiments.simulation_bench import bench_simulation

    show_summary(bench_simulation(path, fit=fit), path)


@bench_app.command("session")
def bench_session_command(path: Results = Path("results/session.json")) -> None:
    """New settings on loaded weights, Cancel, and a restart after a kill."""
    from labkit.experiments.session_bench import bench_session

    show_summary(bench_session(path), path)


@bench_app.command("panel")
def bench_panel_command(path: Results = Path("results/panel.json")) -> None:
    """From a knob's change to the redrawn memory bar."""
    from labkit.widgets.bench import bench_panel

    show_summary(bench_panel(path), path)
