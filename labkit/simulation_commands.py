"""`labkit simulate` and `labkit advise`: a traffic on a card that need not be here."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from labkit.cli_options import DEFAULT_MODEL, AsJson, Card, Model, Vllm, takes_knobs, takes_traffic
from labkit.errors import UnknownNameError
from labkit.specs.engine_config import EngineConfig
from labkit.specs.workload import Workload
from labkit.terminal import out, show_advice, show_notes, show_record
from labkit.text import plain

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
    card = labkit.load_gpu(gpu)
    record = simulate(
        labkit.load_model(model), card, traffic, EngineConfig(**knobs), engine=engine, engine_version=vllm
    )  # fmt: skip
    record = with_simulated_counters(record, card)
    if as_json:
        sys.stdout.write(to_json(record) + "\n")
    else:
        show_record(record)
        if record.counters is not None:
            out(l2_sentence(record.counters))
        show_notes(record.plan)
        out(record.note)
    if record.status == "failed" and not as_json:
        raise typer.Exit(2)


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
