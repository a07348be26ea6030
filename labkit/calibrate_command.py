"""`labkit calibrate`: constants of the step-time model from this machine's card, or from runs that were measured."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from labkit import format as shown
from labkit.errors import OutOfRangeError
from labkit.terminal import out, show_json, show_table

if TYPE_CHECKING:
    from labkit.engine.step_constants import StepConstants
    from labkit.measure.run_record import RunRecord

_SHOWN = (
    ("bandwidth_efficiency", "weights, of the bandwidth", 1.0, ""),
    ("flops_efficiency", "products, of the peak", 1.0, ""),
    ("kv_efficiency", "KV, of the bandwidth", 1.0, ""), ("kv_efficiency_8bit", "8-bit KV, of the bandwidth", 1.0, ""),
    ("attention_efficiency", "prompt attention, of the peak", 1.0, ""),
    ("step_s", "host, a step", 1e6, "µs"), ("request_s", "host, a request", 1e6, "µs"),
    ("layer_s", "between kernels, a layer", 1e6, "µs"),
    ("eager_layer_s", "launches without graphs, a layer", 1e6, "µs"),
    ("product_factor", "over measured products", 1.0, ""),
    ("host_link_bytes_per_s", "swap", 1e-9, "GB/s"),
)  # fmt: skip


def calibrate_command(
    run: Annotated[list[str] | None, typer.Option("--run", help="Id of a measured run, 1 to 3 of them.")] = None,
    seconds: Annotated[float, typer.Option(help="Seconds for the microbenchmark.", min=5, max=600)] = 60.0,
    store: Annotated[str | None, typer.Option(help="File or SQLAlchemy URL of the run store.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")] = False,
) -> None:
    """Measure this machine's card for a minute, or learn from measured runs; simulations use it from then on."""
    answer = from_runs(run, store) if run else from_card(seconds, quiet=as_json)
    if as_json:
        show_json(answer)
        return
    rows = [
        [words, f"{shown.number(before * scale)} {unit}".strip(), f"{shown.number(after * scale)} {unit}".strip()]
        for (name, words, scale, unit), before, after in (
            (entry, answer["before"][entry[0]], answer["constants"][entry[0]]) for entry in _SHOWN
        )
    ]
    show_table(f"{answer['card']}: {answer['level']}", ["constant", "before", "now"], rows)
    out(answer["interval_words"])
    for kind, why in answer.get("missing", {}).items():
        out(f"not measured: {kind}, {why}")
    out(f"kept in {answer['path']}")


def from_card(seconds: float, *, quiet: bool = False) -> dict[str, Any]:
    """Level 2: measure the card that is here and keep it.

    Raises:
        UnsupportedError: no card, or no Triton; says what works without.
    """
    from labkit.engine.step_constants import load_constants
    from labkit.experiments.card_constants import constants_of
    from labkit.experiments.card_files import keep_microbenchmark
    from labkit.experiments.microbench import Bench, check_card, run_microbenchmark

    check_card()
    bench = Bench()
    found = run_microbenchmark(seconds, bench=bench, on_progress=(lambda text: None) if quiet else out, made=_now())
    before = load_constants(engine="labkit")
    constants = constants_of(found, bench.gpu, before)
    path = keep_microbenchmark(bench.gpu, found)
    return {**_answer(bench.gpu.name, before, constants), "missing": dict(found.missing), "path": str(path)}


def from_runs(run_ids: list[str], store: str | None) -> dict[str, Any]:
    """Level 3: learn from measured runs of one model on one card and keep it.

    Raises:
        OutOfRangeError: more than three runs, runs that were simulated, or of different models, cards or engines.
        UnsupportedError: runs on a CPU, whose step times are not modelled.
        StoreError: no such run.
    """
    from labkit.experiments import RunStore
    from labkit.experiments.calibrate import calibrate
    from labkit.experiments.card_files import RunCalibration, base_constants, keep_calibration
    from labkit.experiments.measured_memory import memory_of

    if len(run_ids) > 3:
        raise OutOfRangeError("calibration takes few runs", available=f"{len(run_ids)} runs", works="1 to 3 runs")
    opened = RunStore(store, must_exist=True)
    try:
        records = [opened.get(run_id) for run_id in run_ids]
    finally:
        opened.close()
    first = check_measured(records)
    engine, version = first.plan.engine, first.plan.engine_version if first.plan.engine == "vllm" else ""
    before = base_constants(
        first.gpu, engine=engine, engine_version=first.plan.engine_version, is_moe=first.model.moe is not None
    )
    constants = calibrate(before, records)
    measured = next((record for record in records if record.measured is not None and engine == "labkit"), None)
    memory = None
    if measured is not None and measured.measured is not None:
        memory = memory_of(measured.measured.parts(), measured.plan)
    kept = RunCalibration(first.model.name, engine, version, _now(), tuple(run_ids), constants, memory)
    path = keep_calibration(first.gpu, kept)
    return {**_answer(first.gpu.name, before, constants), "model": first.model.name, "path": str(path)}


def check_measured(records: list[RunRecord]) -> RunRecord:
    """The first of records that calibration can learn from.

    Raises:
        OutOfRangeError: a simulated run, or runs of different engines.
        UnsupportedError: a run on a CPU.
    """
    from labkit.errors import UnsupportedError

    for record in records:
        if record.origin == "simulated":
            raise OutOfRangeError(f"run {record.run_id} was simulated itself", works="a measured run (`labkit runs`)")
        if record.gpu.is_cpu or not record.gpu.mem_bandwidth_bytes_per_s:
            raise UnsupportedError(
                f"run {record.run_id} is of a CPU, whose step times are not modelled", works="a run on a card"
            )
    if len({(record.plan.engine, record.plan.engine_version) for record in records}) > 1:
        raise OutOfRangeError("calibration needs runs of one engine and version", works="runs of the same engine")
    return records[0]


def _answer(card: str, before: StepConstants, constants: StepConstants) -> dict[str, Any]:
    from labkit.engine.step_constants import CONSTANT_NAMES
    from labkit.experiments.virtual_run import interval_words

    return {
        "card": card, "level": constants.level, "interval": [constants.interval_low, constants.interval_high],
        "interval_words": interval_words(constants),
        "before": {name: getattr(before, name) for name in CONSTANT_NAMES},
        "constants": {name: getattr(constants, name) for name in CONSTANT_NAMES},
    }  # fmt: skip


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
