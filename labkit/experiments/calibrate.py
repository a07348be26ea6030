"""Level 3: constants corrected by one to three runs of the real engine, labkit's or a server's."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from labkit.engine.step_constants import StepConstants
from labkit.errors import OutOfRangeError
from labkit.experiments.fit_constants import fit_constants
from labkit.experiments.virtual_run import virtual_engine
from labkit.measure.run_record import RunRecord, StepRow

_SIGMAS = {
    "bandwidth_efficiency": 0.15, "flops_efficiency": 0.15, "kv_efficiency": 0.3, "step_s": 0.5, "request_s": 0.5,
    "layer_s": 0.5, "correction": 0.15,
}  # fmt: skip
_MOST_STEPS, _NOISE, _NORMAL_90 = 400, 0.05, 1.645


def calibrate(constants: StepConstants, records: Sequence[RunRecord]) -> StepConstants:
    """`constants` moved so that the step-time model meets the cycle times of `records`, and with the interval that
    their steps leave.

    A cycle is start to start of two steps, not the time of a step: what the host does between them counts.

    Raises:
        OutOfRangeError: no record has steps, or they are of different models or cards.
    """
    if len({(record.model, record.gpu) for record in records}) != 1:
        raise OutOfRangeError(
            "calibration needs runs of one model on one card", available=f"{len(records)} runs", works="1 to 3 runs"
        )
    parts = [_cycles(record) for record in records]
    measured = np.concatenate([seconds for _, seconds in parts])
    if not len(measured):
        raise OutOfRangeError("the runs have no steps to calibrate with", works="a finished run of 3 steps or more")

    def predict(found: StepConstants) -> np.ndarray:
        return np.concatenate([
            _predicted(record, rows, found) for record, (rows, _) in zip(records, parts, strict=True)
        ])  # fmt: skip

    found = fit_constants(constants, predict, measured, _SIGMAS, noise=_NOISE)
    rest = np.log(measured / predict(found))
    spread = max(float(np.std(rest)), _NOISE) * _NORMAL_90
    middle = float(np.median(rest))
    return found.replace(
        interval_low=float(np.exp(middle - spread)), interval_high=float(np.exp(middle + spread)), level="calibrated"
    )


def _cycles(record: RunRecord) -> tuple[list[StepRow], np.ndarray]:
    """Steps followed at once by another, thinned evenly, and their start-to-start times."""
    steps = record.steps
    pairs = [
        (step, after.start_s - step.start_s)
        for step, after in pairwise(steps[1:])
        if step.num_tokens and step.num_running and not step.num_swapped_blocks
        and after.start_s - step.start_s < 3 * max(step.duration_s, 1e-9)
    ]  # fmt: skip
    kept = pairs[:: max(1, len(pairs) // _MOST_STEPS)]
    return [step for step, _ in kept], np.array([seconds for _, seconds in kept])


def _predicted(record: RunRecord, rows: Sequence[StepRow], constants: StepConstants) -> np.ndarray:
    """Predicted seconds of steps of which only the counts are known: the stored tokens are spread evenly."""
    from labkit.engine.step_time import StepLoad

    model = virtual_engine(record.plan, constants).gpu.model
    decode = np.array([float(row.num_decode_tokens) for row in rows])
    prefill = np.array([float(row.num_prefill_tokens) for row in rows])
    running = np.array([float(row.num_running) for row in rows])
    each = np.array([float(row.num_tokens_stored) for row in rows]) / running
    kv, pairs = [], []
    for kind in model.cost.kv:
        seen = np.minimum(each, kind.window) if kind.window else each
        kv.append(decode * seen)
        pairs.append(prefill * seen / 2)
    advancing = np.minimum(running, decode + np.ceil(prefill / np.maximum(each, 1.0)))
    return model.seconds(StepLoad(decode + prefill, advancing, advancing, tuple(kv), tuple(pairs)))
