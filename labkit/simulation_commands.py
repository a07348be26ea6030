"""`labkit simulate` and `labkit advise`: a traffic on a card that need not be here."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from labkit.cli_options import (
    DEFAULT_MODEL,
    DEFAULT_TRACE,
    AsJson,
    Limit,
    MaxInput,
    MaxOutput,
    Model,
    Trace,
    Vllm,
    takes_knobs,
)
from labkit.specs.engine_config import EngineConfig
from labkit.terminal import out, show_advice, show_record

Card = Annotated[str, typer.Option("--gpu", help="A card of `labkit gpus`; it need not be here.")]


@takes_knobs
def simulate_command(
    knobs: dict[str, Any],
    model: Model = DEFAULT_MODEL,
    gpu: Card = "H100 SXM",
    workload: Trace = DEFAULT_TRACE,
    limit: Limit = 1000,
    max_input_tokens: MaxInput = None,
    max_output_tokens: MaxOutput = None,
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

    sizes: dict[str, Any] = {"max_input_tokens": max_input_tokens, "max_output_tokens": max_output_tokens}
    traffic, card = labkit.load_workload(workload, limit=limit, **sizes), labkit.load_gpu(gpu)
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
        out(record.note)
    if record.status == "failed" and not as_json:
        raise typer.Exit(2)


@takes_knobs
def advise_command(
    knobs: dict[str, Any],
    model: Model = DEFAULT_MODEL,
    gpu: Card = "H100 SXM",
    workload: Trace = DEFAULT_TRACE,
    limit: Limit = 48,
    max_input_tokens: MaxInput = None,
    max_output_tokens: MaxOutput = None,
    vllm: Vllm = "0.33.0",
) -> None:
    """Which limit binds on a traffic, and what each change would buy there: GiB, tokens, tok/s, p99; simulated."""
    import labkit

    traffic = labkit.load_workload(
        workload, limit=limit, max_input_tokens=max_input_tokens, max_output_tokens=max_output_tokens
    )
    card = labkit.load_gpu(gpu)
    engine = "labkit" if card.is_cpu else "vllm"
    found = labkit.plan(labkit.load_model(model), card, EngineConfig(**knobs), engine=engine, engine_version=vllm)
    show_advice(found, traffic)
