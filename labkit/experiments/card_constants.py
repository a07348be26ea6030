"""Constants of the step-time model from a microbenchmark of a card."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from labkit.engine.step_constants import StepConstants
from labkit.engine.step_time import smooth_max
from labkit.errors import OutOfRangeError
from labkit.experiments.microbench import Microbenchmark, Timing
from labkit.specs.gpu_spec import GpuSpec

# A layer launches so many small kernels between its products: two norms and the rotation with its cache write, and
# the gated activation.
_NORM_LIKE, _GATED = 3, 1
# Rows from which small kernels are bound by the bandwidth.
_MANY_ROWS = 2048
_KV_BYTES = {"bfloat16": 2, "fp8": 1}


def constants_of(found: Microbenchmark, gpu: GpuSpec, prior: StepConstants) -> StepConstants:
    """`prior` with what the microbenchmark measured; what it lacks stays.

    Args:
        found: of the card `gpu`, whose data-sheet figures the shares refer to.
        prior: constants of labkit's engine; host times and small kernels are its own.

    Raises:
        OutOfRangeError: nothing was measured, or the card has no data-sheet figures.
    """
    bandwidth, peak = gpu.mem_bandwidth_bytes_per_s, gpu.bf16_flops or gpu.fp16_flops
    if not found.timings or not bandwidth or not peak:
        raise OutOfRangeError("no constants can be made: nothing was measured", works="labkit calibrate on a card")
    by_kind: dict[str, list[Timing]] = {}
    for timing in found.timings:
        by_kind.setdefault(timing.kind, []).append(timing)
    changes: dict[str, object] = {}
    if "gemm" in by_kind:
        changes |= _products(by_kind["gemm"], bandwidth, peak)
    if "decode" in by_kind:
        changes |= _decode_attention(by_kind["decode"], bandwidth)
    if "prefill" in by_kind:
        changes |= _prefill_attention(by_kind["prefill"], peak)
    if "places" in by_kind:
        times = {float(timing.sizes["places"]): timing.seconds for timing in by_kind["places"]}
        few, many = min(times), max(times)
        changes["prompt_place_s"] = max(0.0, (times[many] - times[few]) / max(1.0, many - few))
    if "norm" in by_kind and "activation" in by_kind:
        changes |= _small_kernels(by_kind["norm"], by_kind["activation"], bandwidth)
    if "sample" in by_kind:
        changes |= _sampling(by_kind["sample"], bandwidth)
    if "swap" in by_kind:
        rates = [float(timing.sizes["bytes"]) / timing.seconds for timing in by_kind["swap"]]
        changes["host_link_bytes_per_s"] = float(np.mean(rates))
    if "host" in by_kind:
        changes |= _host(by_kind["host"], by_kind.get("launch decode", []), by_kind.get("launch", []))
    if "admission" in by_kind:
        changes["admission_s"] = min(timing.seconds for timing in by_kind["admission"])
    return prior.replace(**changes).with_intervals("labkit", "microbenchmark")


def _column(timings: Sequence[Timing], name: str) -> np.ndarray:
    return np.array([float(timing.sizes[name]) for timing in timings])


def _seconds(timings: Sequence[Timing]) -> np.ndarray:
    return np.array([timing.seconds for timing in timings])


def _products(timings: Sequence[Timing], bandwidth: float, peak: float) -> dict[str, object]:
    outputs, inputs = _column(timings, "outputs"), _column(timings, "inputs")
    elements = outputs * inputs
    rows, seconds = _column(timings, "rows"), _seconds(timings)
    for shape in np.unique(np.stack([outputs, inputs], axis=1), axis=0):
        # Fewer rows take no longer than more: what says so was disturbed.
        own = np.flatnonzero((outputs == shape[0]) & (inputs == shape[1]))
        own = own[np.argsort(rows[own])]
        seconds[own] = np.minimum.accumulate(seconds[own][::-1])[::-1]
    largest = elements == elements.max()
    few, many = (largest & (rows == edge) for edge in (rows[largest].min(), rows[largest].max()))
    return {
        "products": tuple(zip(outputs.tolist(), inputs.tolist(), rows.tolist(), seconds.tolist(), strict=True)),
        "bandwidth_efficiency": min(1.0, float((2 * elements / seconds / bandwidth)[few][0])),
        "flops_efficiency": min(1.0, float((2 * elements * rows / seconds / peak)[many][0])),
    }


def _decode_attention(timings: Sequence[Timing], bandwidth: float) -> dict[str, object]:
    found: dict[str, object] = {}
    for kv, name in (("bfloat16", "kv_efficiency"), ("fp8", "kv_efficiency_8bit")):
        own = [timing for timing in timings if timing.sizes["kv"] == kv]
        if not own:
            continue
        heads, size = _column(own, "kv_heads"), _column(own, "head_dim")
        num_bytes = 2 * _KV_BYTES[kv] * _column(own, "requests") * _column(own, "context") * heads * size
        start_s, floor_s, read_s = _start_floor_slope(num_bytes / bandwidth, _seconds(own))
        found[name] = 1 / read_s
        found.setdefault("attention_start_s", start_s)
        found.setdefault("attention_floor_s", floor_s)
    return found


def _prefill_attention(timings: Sequence[Timing], peak: float) -> dict[str, object]:
    wide = [timing for timing in timings if timing.sizes["kv"] == "bfloat16"] or list(timings)
    columns = _prompt_columns(wide, peak)
    start_s, context_s, token_s, slope = weights = _nonnegative(columns, _seconds(wide))
    found: dict[str, object] = {
        "prompt_start_s": float(start_s), "prompt_context_s": float(context_s), "prompt_token_s": float(token_s)
    }  # fmt: skip
    if not slope:
        return found
    found["attention_efficiency"] = min(1.0, float(1 / slope))
    narrow = [timing for timing in timings if timing.sizes["kv"] == "fp8"]
    if narrow and narrow != wide:
        columns = _prompt_columns(narrow, peak)
        # The rest is the same work: what an 8-bit cache costs more goes with its products.
        products = _nonnegative(columns[:, 3:], _seconds(narrow) - columns[:, :3] @ weights[:3])
        found["prompt_factor_8bit"] = max(1.0, float(products[0] / slope))
    return found


def _prompt_columns(timings: Sequence[Timing], peak: float) -> np.ndarray:
    """What prompt attention's time is made of, [timings, 4]: once, by mean context, by tokens, by products."""
    queries, contexts, requests = (_column(timings, name) for name in ("queries", "context", "requests"))
    pairs = requests * (queries * contexts - queries * (queries - 1) / 2)
    tokens, flops_s = requests * queries, 4 * pairs * _column(timings, "heads") * _column(timings, "head_dim") / peak
    return np.stack([np.ones_like(tokens), pairs / tokens, tokens, flops_s], axis=1)


def _small_kernels(norms: Sequence[Timing], gates: Sequence[Timing], bandwidth: float) -> dict[str, object]:
    both = [*norms, *gates]
    large = [timing for timing in both if float(timing.sizes["rows"]) >= _MANY_ROWS]
    shortest = [min(timing.seconds for timing in group) for group in (norms, gates)]
    found: dict[str, object] = {"layer_s": _NORM_LIKE * shortest[0] + _GATED * shortest[1]}
    if large:
        found["elementwise_passes"] = float(np.median(_seconds(large) * bandwidth / _column(large, "bytes")))
    return found


def _sampling(timings: Sequence[Timing], bandwidth: float) -> dict[str, object]:
    greedy = [timing for timing in timings if not timing.sizes["temperature"]] or list(timings)
    logits_bytes = 4 * _column(greedy, "rows") * _column(greedy, "vocab_size")
    floor_s, passes = _floor_and_slope(logits_bytes / bandwidth, _seconds(greedy))
    return {"sampling_floor_s": floor_s, "sampling_passes": passes}


def _host(steps: Sequence[Timing], decodes: Sequence[Timing], prompts: Sequence[Timing]) -> dict[str, object]:
    """Host time by requests from the thinnest network; by layers, where steps are launched kernel by kernel: those that
    decode, and what one with a prompt takes more."""
    thinnest = min(float(timing.sizes["layers"]) for timing in steps)
    own = [timing for timing in steps if float(timing.sizes["layers"]) == thinnest]
    step_s, request_s = _line(_column(own, "requests"), _seconds(own))
    found: dict[str, object] = {"step_s": step_s, "request_s": request_s}
    lines = [
        _line(_column(launches, "layers"), _seconds(launches))
        for launches in (decodes, prompts)
        if len({timing.sizes["layers"] for timing in launches}) > 1
    ]
    if lines:
        first_s, layer_s = lines[0]
        found |= {"eager_layer_s": layer_s, "eager_step_s": max(1e-6, first_s - step_s - request_s)}
    if len(lines) > 1:
        found["eager_prompt_layer_s"] = max(0.0, lines[1][1] - lines[0][1])
    return found


def _line(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Intercept and slope of y over x by relative least squares, both above zero."""
    if len(x) < 2:
        return float(y[0]), 1e-9
    matrix = np.stack([np.ones_like(x), x], axis=1) / y[:, None]
    intercept, slope = np.linalg.lstsq(matrix, np.ones_like(y), rcond=None)[0]
    return max(1e-6, float(intercept)), max(1e-9, float(slope))


def _nonnegative(columns: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Weights of 0 or more for which columns · weights is nearest to y, relatively: the best of all subsets."""
    best, chosen = np.inf, np.zeros(columns.shape[1])
    for count in range(1, columns.shape[1] + 1):
        for subset in map(list, combinations(range(columns.shape[1]), count)):
            part = np.linalg.lstsq(columns[:, subset] / y[:, None], np.ones_like(y), rcond=None)[0]
            loss = float(((columns[:, subset] @ part / y - 1) ** 2).sum())
            if (part >= 0).all() and loss < best:
                best, chosen = loss, np.zeros(columns.shape[1])
                chosen[subset] = part
    return chosen


def _floor_and_slope(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """(floor, slope) for which smooth_max(floor, slope·x) is nearest to y."""
    return _start_floor_slope(x, y, starts=np.zeros(1))[1:]


def _start_floor_slope(x: np.ndarray, y: np.ndarray, starts: np.ndarray | None = None) -> tuple[float, float, float]:
    """(start, floor, slope) for which start + smooth_max(floor, slope·x) is nearest to y, relatively."""
    starts = y.min() * np.linspace(0.0, 0.9, 19) if starts is None else starts
    floors = y.min() * np.geomspace(0.1, 1.5, 40)
    slopes = np.median((y / x)[x >= np.median(x)]) * np.geomspace(0.3, 1.5, 240)
    busy = smooth_max(floors[:, None, None], slopes[None, :, None] * x)
    loss = ((np.log(starts[:, None, None, None] + busy[None]) - np.log(y)) ** 2).sum(axis=3)
    best = np.unravel_index(int(np.argmin(loss)), loss.shape)
    return float(starts[best[0]]), float(floors[best[1]]), float(slopes[best[2]])
