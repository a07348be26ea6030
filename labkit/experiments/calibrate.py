"""Level 3: constants corrected by one to three runs of the real engine, labkit's or a server's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType

import numpy as np

from labkit.engine.step_constants import StepConstants
from labkit.engine.step_time import StepClock, StepLoad, StepTimeModel
from labkit.errors import OutOfRangeError
from labkit.experiments.fit_constants import fit_constants
from labkit.experiments.virtual_run import step_time_model
from labkit.measure.run_record import RunRecord, StepRow

# Log-normal widths of the prior around what is known already: of an engine whose host works in between …
SIGMAS = {
    "bandwidth_efficiency": 0.15, "flops_efficiency": 0.15, "kv_efficiency": 0.3, "step_s": 0.5, "request_s": 0.5,
    "layer_s": 0.5, "correction": 0.15,
}  # fmt: skip
# … and of one whose host works beside the card, so that both show.
_OVERLAPPED_SIGMAS = {
    "product_factor": 0.05, "sustained_factor": 0.15, "kv_efficiency": 0.1, "kv_efficiency_8bit": 0.1,
    "attention_efficiency": 0.2, "prompt_start_s": 0.2, "prompt_context_s": 0.2, "prompt_token_s": 0.2,
    "prompt_place_s": 0.2, "elementwise_passes": 0.2, "layer_s": 0.2, "step_s": 0.3, "request_s": 0.3,
    "eager_step_s": 0.5, "eager_layer_s": 0.5, "eager_prompt_layer_s": 0.5,
}  # fmt: skip
# Without measured products and attention their shares are known less well.
_UNMEASURED = {"bandwidth_efficiency": 0.15, "flops_efficiency": 0.15, "kv_efficiency": 0.2, "kv_efficiency_8bit": 0.2}
_MOST_STEPS, _NOISE = 1200, 0.05
# Steps of one run err together: they count as so many independent ones.
_INDEPENDENT = 12
_ENOUGH_WAITING = 8


def calibrate(
    constants: StepConstants, records: Sequence[RunRecord], widths: Mapping[str, float] = MappingProxyType({})
) -> StepConstants:
    """`constants` moved so that the step-time model meets the cycle times of `records`, and with the interval that
    other runs have shown after as many.

    A cycle is start to start of two steps, not the time of a step: what the host does between them counts.

    Args:
        widths: constant → log-normal width of the prior around it, where it is not the usual one; 0 keeps it as it is.

    Raises:
        OutOfRangeError: no record has steps, or they are of different models or cards.
    """
    if len({(record.model, record.gpu) for record in records}) != 1:
        raise OutOfRangeError(
            "calibration needs runs of one model on one card", available=f"{len(records)} runs", works="1 to 3 runs"
        )
    overlaps = step_time_model(records[0].plan, constants).launch.overlaps
    parts = [(_overlapped if overlaps else _cycles)(record, constants) for record in records]
    measured = np.concatenate([part.measured_s for part in parts])
    if not len(measured):
        raise OutOfRangeError("the runs have no steps to calibrate with", works="a finished run of 3 steps or more")

    def predict(found: StepConstants) -> np.ndarray:
        return np.concatenate([part.predicted_s(found) for part in parts])

    sigmas = _OVERLAPPED_SIGMAS | ({} if constants.products else _UNMEASURED) if overlaps else SIGMAS
    sigmas = {name: sigma for name, sigma in {**sigmas, **widths}.items() if sigma and getattr(constants, name) > 0}
    noise = _NOISE * max(1.0, len(measured) / _INDEPENDENT) ** 0.5
    found = fit_constants(
        constants, predict, measured, sigmas, noise=noise, starts=[_slow_host(constants)] if overlaps else []
    )
    found = _with_other_kv(found, constants, records).replace(admission_s=_admission_s(records, constants))
    return found.with_intervals(records[0].plan.engine, "calibrated", len(records))


def _admission_s(records: Sequence[RunRecord], constants: StepConstants) -> float:
    """Seconds for each request that had come before the first step began; what is known already where few had."""
    seconds = []
    for record in records:
        first_s = record.steps[0].start_s if record.steps else 0.0
        waiting = sum(row.arrival_s <= 0.0 for row in record.requests)
        if waiting >= _ENOUGH_WAITING:
            seconds.append(first_s / waiting)
    return float(np.median(seconds)) if seconds and record.plan.engine == "labkit" else constants.admission_s


def _slow_host(constants: StepConstants) -> StepConstants:
    """Where the host's time shows in every step."""
    changes = {name: 6 * getattr(constants, name) for name in ("step_s", "request_s", "eager_step_s", "eager_layer_s")}
    return constants.replace(**changes)


def _with_other_kv(found: StepConstants, prior: StepConstants, records: Sequence[RunRecord]) -> StepConstants:
    """What runs of one KV width say of the kernels holds for the width that none of them had as well."""
    wide, narrow = "kv_efficiency", "kv_efficiency_8bit"
    seen = {step_time_model(record.plan, prior).cost.kv_is_quantized for record in records}
    if len(seen) > 1:
        return found
    known, other = (narrow, wide) if seen.pop() else (wide, narrow)
    return found.replace(**{other: getattr(prior, other) * getattr(found, known) / getattr(prior, known)})


@dataclass(frozen=True)
class _Steps:
    """Steps of one record in order.

    Attributes:
        model: of step times, with some constants. load: the work of all steps.
        measured_s: seconds of those that count, [counted]. counted: which they are.
        begins: which steps come after a pause.
    """

    model: StepTimeModel
    load: StepLoad
    measured_s: np.ndarray
    counted: np.ndarray
    begins: np.ndarray

    def predicted_s(self, constants: StepConstants) -> np.ndarray:
        """Predicted seconds of the counted steps, [counted]."""
        model = replace(self.model, constants=constants)
        if not model.launch.overlaps:
            return model.seconds(self.load)[self.counted]
        seconds = model.overlapped(self.load)
        clock, pending, before = StepClock(), 0.0, 0.0
        cycles = np.empty(len(self.begins))
        starts = self.begins.tolist()
        for step, parts in enumerate(zip(seconds.host, seconds.launching, seconds.device, strict=True)):
            if starts[step]:
                clock.host_s = pending = max(clock.host_s, clock.card_s)
            done_s = clock.submit(*parts)
            after = clock.collect(pending)
            cycles[step] = after - before
            pending, before = done_s, after
        return np.maximum(cycles[self.counted], 1e-9)


def _cycles(record: RunRecord, constants: StepConstants) -> _Steps:
    """Steps followed at once by another, thinned evenly, and their start-to-start times."""
    pairs = [
        (step, after.start_s - step.start_s)
        for step, after in pairwise(record.steps[1:])
        if step.num_tokens and step.num_running and not step.num_swapped_blocks
        and after.start_s - step.start_s < 3 * max(step.duration_s, 1e-9)
    ]  # fmt: skip
    kept = pairs[:: max(1, 3 * len(pairs) // _MOST_STEPS)]
    rows, seconds = [step for step, _ in kept], np.array([seconds for _, seconds in kept])
    model = step_time_model(record.plan, constants)
    load = load_of(model, rows, record.plan.block_bytes)
    return _Steps(model, load, seconds, np.arange(len(rows)), np.zeros(len(rows), dtype=bool))


def _overlapped(record: RunRecord, constants: StepConstants) -> _Steps:
    """Steps of an engine that returns from a step when the card is done with the one before: from end to end."""
    rows = record.steps[:_MOST_STEPS]
    ends = np.array([row.start_s + row.duration_s for row in rows])
    # Behind a step that left nothing to do the engine waited for a request.
    begins = np.array([True, *(row.num_running + row.num_waiting == 0 for row in rows[:-1])][: len(rows)])
    # The first step after a pause returns at once, and a step without tokens only waits.
    counted = np.array([
        index for index in range(1, len(rows))
        if not begins[index] and not begins[index - 1] and rows[index].num_tokens and rows[index - 1].num_tokens
    ], dtype=int)  # fmt: skip
    model = step_time_model(record.plan, constants)
    load = load_of(model, rows, record.plan.block_bytes)
    return _Steps(model, load, ends[counted] - ends[counted - 1], counted, begins)


def load_of(model: StepTimeModel, rows: Sequence[StepRow], block_bytes: int) -> StepLoad:
    """The work of steps of which only the counts are known: the stored tokens are spread evenly over requests."""

    def column(name: str) -> np.ndarray:
        return np.array([float(getattr(row, name)) for row in rows])

    decode, prefill, running = (column(name) for name in ("num_decode_tokens", "num_prefill_tokens", "num_running"))
    each = column("num_tokens_stored") / np.maximum(running, 1.0)
    kv, pairs = [], []
    for kind in model.cost.kv:
        seen = np.minimum(each, kind.window) if kind.window else each
        kv.append(decode * seen)
        pairs.append(prefill * seen / 2)
    advancing = np.minimum(np.maximum(running, decode), decode + np.ceil(prefill / np.maximum(each, 1.0)))
    return StepLoad(
        decode + prefill, advancing, advancing, tuple(kv), tuple(pairs), column("num_swapped_blocks") * block_bytes,
        prefill, np.minimum(prefill, np.maximum(running - decode, 1.0)),
    )  # fmt: skip
