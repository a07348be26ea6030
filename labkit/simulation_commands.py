"""`labkit simulate` and `labkit advise`: a traffic on a card that need not be here."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from labkit.cli_options import DEFAULT_MODEL, AsJson, Card, Model, Vllm, takes_knobs, takes_traffic
from labkit.errors import UnknownNameError
from labkit.specs.engine_config import EngineConfig
from labkit.specs.knob_text import read_grid
from labkit.specs.workload import Workload
from labkit.sweep_table import show_sweep
from labkit.terminal import ProgressLine, out, show_advice, show_notes, show_record
from labkit.text import plain

if TYPE_CHECKING:
    from labkit.specs.gpu_spec import GpuSpec
    from labkit.specs.model_spec import ModelSpec

ENGINES = ("vllm", "labkit")


@takes_knobs
@takes_traffic(limit=1000)
def simulate_command(
    knobs: dict[str, Any],
    traffic: Workload,
    model: Model = DEFAULT_MODEL,
    gpu: Card = "H100 SXM",
    engine: Annotated[str, typer.Option(help="Whose rules: vllm or labkit.")] = "vllm",
    vllm: Vllm = "0.33.0",
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            help="A knob's values, such as max_num_seqs=64,128,256; given again, every combination is served."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Serve a trace on a virtual GPU: the real scheduler and block pool, step times from a model."""
    import labkit
    from labkit.experiments.export import to_json
    from labkit.experiments.virtual_run import simulate
    from labkit.figures.l2 import sentence as l2_sentence
    from labkit.measure.l2_step import with_simulated_counters

    if engine not in ENGINES:
        raise UnknownNameError(
            f"the steps of {plain(engine, 40)!r} are not known", works=" or ".join(ENGINES), knob="--engine"
        )
    spec, card, config = labkit.load_model(model), labkit.load_gpu(gpu), EngineConfig(**knobs)
    if sweep:
        _sweep(read_grid(sweep), spec, card, traffic, config, engine, vllm, as_json)
        return
    record = simulate(spec, card, traffic, config, engine=engine, engine_version=vllm)
    record = with_simulated_counters(record, card)
    if as_json:
        sys.stdout.write(to_json(record) + "\n")
    else:
        show_record(record)
        if record.counters is not None and not spec.is_embedding:
            out(l2_sentence(record.counters))
        show_notes(record.plan)
        out(record.note)
    if record.status == "failed" and not as_json:
        raise typer.Exit(2)


def _sweep(
    grid: Mapping[str, list[Any]], model: ModelSpec, gpu: GpuSpec, traffic: Workload, base: EngineConfig, engine: str,
    vllm: str, as_json: bool,
) -> None:  # fmt: skip
    """Serve every combination, show them the best first and the command of the best; Ctrl-C shows what is done."""
    from labkit.experiments import virtual_sweep

    records, was_ended = [], False
    with ProgressLine() as progress:
        try:
            for record in virtual_sweep.simulate_sweep(
                model, gpu, traffic, grid, base, on_event=progress, engine=engine, engine_version=vllm
            ):  # fmt: skip
                records.append(record)
        except KeyboardInterrupt:
            was_ended = True
    show_sweep(records, list(grid), vllm, as_json=as_json)
    if was_ended:
        raise typer.Exit(130)


@takes_knobs
@takes_traffic(limit=128)
def advise_command(
    knobs: dict[str, Any],
    traffic: Workload,
    model: Model = DEFAULT_MODEL,
    gpu: Card = "H100 SXM",
    vllm: Vllm = "0.33.0",
) -> None:
    """Which limit binds on a traffic, and what each change would buy there: GiB, tokens, tok/s, p99; simulated."""
    import labkit

    card = labkit.load_gpu(gpu)
    engine = "labkit" if card.is_cpu else "vllm"
    found = labkit.plan(labkit.load_model(model), card, EngineConfig(**knobs), engine=engine, engine_version=vllm)
    show_advice(found, traffic)
