"""`simulate_session`: the session's traffic on its card as a virtual one, kept like a run."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from labkit.errors import DoesNotFitError, WorkerError
from labkit.experiments.refusals import does_not_fit
from labkit.experiments.virtual_run import simulate
from labkit.measure.l2_step import with_simulated_counters
from labkit.measure.run_record import RunRecord
from labkit.specs.engine_config import EngineConfig

if TYPE_CHECKING:
    from labkit.experiments.lab_session import LabSession


def simulate_session(
    session: LabSession,
    config: EngineConfig,
    *,
    name: str,
    on_event: Callable[[dict[str, Any]], None],
    is_cancelled: Callable[[], bool],
) -> RunRecord:
    """Serve the session's traffic on a virtual card under `config`; the record has origin "simulated".

    Raises:
        DoesNotFitError: the plan refuses the settings.
        UnsupportedError: the card has no data-sheet bandwidth and compute figures, such as a CPU.
        WorkerError: the session has no traffic.
    """
    if session.workload is None:
        raise WorkerError("there is no traffic to simulate", works="a workload, such as workload='azure-2023-conv'")
    on_event({"type": "status", "phase": "simulate", "message": "simulating"})
    plan = session.plan(config)
    if plan.verdict == "does not fit":
        raise does_not_fit(plan)
    now = datetime.now(UTC)
    record = simulate(
        session.model, session.gpu, session.workload, config, engine=plan.engine, engine_version=plan.engine_version,
        is_cancelled=is_cancelled, run_id=f"{now:%Y%m%dT%H%M%S}-{secrets.token_hex(4)}", name=name,
        created=now.isoformat(timespec="seconds").replace("+00:00", "Z"),
    )  # fmt: skip
    if record.status == "failed":
        raise DoesNotFitError(record.error)
    versions = dict(record.versions)
    if plan.engine == "labkit":
        # The plan's version is vLLM's, whose defaults labkit's engine takes on a card.
        versions = {"labkit": version("labkit"), "defaults of vLLM": versions.pop("labkit"), **versions}
    return replace(with_simulated_counters(record, session.gpu), name=name, versions=versions)
