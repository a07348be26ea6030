"""`bench_session`: how long a change of settings, a Cancel and a restart of the worker take, on this machine."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from labkit.errors import OutOfRangeError, WorkerError
from labkit.experiments.lab_session import LabSession
from labkit.experiments.run import RunOptions
from labkit.experiments.runner import Runner
from labkit.results import at_most, write_results
from labkit.specs import synthetic_workload
from labkit.specs.engine_config import EngineConfig

SETTINGS = (
    {"block_size": 32},
    {"kv_cache_dtype": "fp8"},
    {"max_num_batched_tokens": 256},
    {"max_model_len": 1024},
    {"block_size": 16},
)


def bench_session(
    path: str | os.PathLike[str] = "results/session.json",
    *,
    model: str = "SmolLM2-135M-Instruct",
    repeats: int = 2,
    runner: Runner | None = None,
) -> dict[str, Any]:
    """Seconds from asking to running for the first run, for other settings on loaded weights, and after a kill; and
    from Cancel to the end of the run. Written to `path` and returned.

    Raises:
        OutOfRangeError: `repeats` under 1.
        LabkitError: as `LabSession.run`.
    """
    if repeats < 1:
        raise OutOfRangeError(f"repeats cannot be {repeats}", works="1 or more", knob="repeats")
    with tempfile.TemporaryDirectory(prefix="labkit-bench-") as folder:
        short = synthetic_workload(1, 4, 1)
        with LabSession(model, "cpu", short, store=Path(folder) / "runs.sqlite3", runner=runner) as session:
            first_s = _until_running(session, EngineConfig())
            settings = [EngineConfig(**changes) for changes in SETTINGS] * repeats
            reconfigured_s = [_until_running(session, config) for config in settings]
            cancelled_s = [_cancel(session) for _ in range(2 * repeats)]
            restarted_s = [_after_kill(session) for _ in range(repeats)]
    rows = [
        {"what": "first run, weights included", **_spread([first_s])},
        {"what": "other settings on loaded weights", **_spread(reconfigured_s)},
        {"what": "from Cancel to the end of the run", **_spread(cancelled_s)},
        {"what": "run after the worker was killed, weights included", **_spread(restarted_s)},
    ]
    return write_results(
        path,
        command="labkit bench session",
        rows=rows,
        summary={
            "new settings on loaded weights, median [s]": at_most(rows[1]["median_s"], 2.0, 1.0),
            "Cancel, slowest [s]": at_most(rows[2]["max_s"], 1.0),
        },
        what="seconds from run() to the first step, by what had to be done; and from Cancel to the run's end",
        model=model,
        load_average=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    )


def _spread(seconds: list[float]) -> dict[str, Any]:
    return {
        "median_s": round(statistics.median(seconds), 3),
        "max_s": round(max(seconds), 3),
        "count": len(seconds),
    }


def _until_running(session: LabSession, config: EngineConfig) -> float:
    start = time.monotonic()
    seen: list[float] = []

    def note(event: dict[str, Any]) -> None:
        if event["type"] == "status" and event["phase"] == "run":
            seen.append(time.monotonic() - start)

    session.run(config, note, keep=False)
    return seen[-1]


def _cancel(session: LabSession) -> float:
    asked: list[float] = []

    def stop(event: dict[str, Any]) -> None:
        if event["type"] == "step" and event["num_output_tokens"] > 8 and not asked:
            asked.append(time.monotonic())
            session.cancel()

    long = synthetic_workload(4, 64, 400)
    session.run(EngineConfig(), stop, workload=long, options=RunOptions(report_every_s=0.02), keep=False)
    return time.monotonic() - asked[0]


def _after_kill(session: LabSession) -> float:
    def kill(event: dict[str, Any]) -> None:
        pid = session.worker_pid
        if event["type"] == "status" and event["phase"] == "run" and pid:
            os.kill(pid, 9)

    try:
        session.run(EngineConfig(), kill, keep=False)
    except WorkerError:
        return _until_running(session, EngineConfig())
    raise WorkerError("the worker survived a kill", works="a machine where processes can be ended")
