"""Fits the constants of `labkit.memory.budget` on the run files and says how far off each part is.

`python -m labkit.memory.fit` writes `vllm_constants.json`. Few constants, each with a physical reason (see
`Constants`); the error that a user will see is the one with whole models, or whole settings, left out of the fit.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from labkit.files import write_atomic
from labkit.memory.budget import Constants, activation_with, graph_features, graphs_with
from labkit.memory.dtypes import compute_dtype
from labkit.memory.rules import parse_version, vllm_rules
from labkit.memory.run_files import GIB, Run, load_runs
from labkit.memory.weights import StageLayers, pipeline_stages

# Where the search begins, and what the files cannot tell. Gate, up and their product are 3 rows by construction.
START = Constants(
    sampler_bytes=14.5,
    hidden_copies=1.2,
    forward_hidden=3.0,
    forward_mlp=3.0,
    fixed_gib=0.04,
    graph_launch_mib=0.1,
    graph_split=2.0,
    graph_rows=0.5,
    graph_estimate_share=0.87,
    non_torch_gib=0.24,
    non_torch_tp_gib=2.09,
    non_torch_pcie_gib=0.39,
    non_torch_pp_gib=0.07,
    activation_uncertainty=0.1,
    graph_uncertainty_gib=0.3,
    # Cases R09 (0.5 GiB on one card); D05 and N59 (2.8 and 1.4 GiB unaccounted for with gpt-oss).
    late_growth_gib=0.5,
    late_growth_mxfp4_bytes=12.5,
)
# By construction: the logits in 16 bit and their float32 copy. A first compilation adds up to 0.25 GiB to some rows
# of `runs/vllm-0.25-h200-runs.csv`, which a free constant would absorb.
SECOND_RUNNER_SAMPLER_BYTES = 6.0
_NEWTON_STEPS, _NUDGE = 4, 0.01


@dataclasses.dataclass(frozen=True)
class Fit:
    """Constants of the first and the second model runner."""

    first: Constants
    second: Constants

    def of(self, run: Run) -> Constants:
        """Those that hold for `run`."""
        return self.second if runner_of(run) == 2 else self.first


def runner_of(run: Run) -> int:
    """The model runner of a run's version and model."""
    return vllm_rules(run.version).model_runner(run.model)


def first_stage(run: Run) -> StageLayers:
    """The stage whose rank prints the log: rank 0."""
    return pipeline_stages(run.model.num_layers, run.config.pipeline_parallel_size)[0]


def predicted_activation(run: Run, constants: Constants) -> float:
    """Activation peak of rank 0, in GiB."""
    dtype = compute_dtype(run.model, run.config)
    return activation_with(constants, run.model, run.config, first_stage(run), dtype) / GIB


def predicted_graphs(run: Run, constants: Constants) -> float:
    """CUDA graphs of rank 0, in GiB."""
    return graphs_with(constants, run.model, run.config, first_stage(run)) / GIB


def fit_constants(runs: Sequence[Run]) -> Fit:
    """Least absolute error for activations (two moments, so not linear), least fourth powers for graphs."""
    captured = [run for run in runs if run.graphs_gib is not None]
    launch, split, rows = _fit_graphs(captured)
    plain = [run for run in runs if not run.model.extra_weights]
    singles = [run for run in runs if run.config.tensor_parallel_size == 1]
    start = dataclasses.replace(
        START, graph_launch_mib=launch, graph_split=split, graph_rows=rows,
        graph_estimate_share=_median(
            run.graph_estimate_gib / run.graphs_gib for run in captured if run.graph_estimate_gib and run.graphs_gib
        ),
        non_torch_gib=_median(run.non_torch_gib for run in singles if run.config.pipeline_parallel_size == 1),
        non_torch_tp_gib=_median(run.non_torch_gib for run in runs if run.config.tensor_parallel_size > 1) or 2.09,
    )  # fmt: skip
    first = _search(
        start, ("sampler_bytes", "hidden_copies", "fixed_gib"), [run for run in plain if runner_of(run) == 1]
    )
    second = dataclasses.replace(first, sampler_bytes=SECOND_RUNNER_SAMPLER_BYTES)
    second = _search(second, ("forward_hidden",), [run for run in plain if runner_of(run) == 2])
    return Fit(dataclasses.replace(first, forward_hidden=second.forward_hidden), second)


def _median(values: Iterable[float]) -> float:
    found = list(values)
    return round(statistics.median(found), 3) if found else 0.0


def _fit_graphs(runs: Sequence[Run]) -> tuple[float, float, float]:
    """Least fourth powers: what counts is the worst run, whose graphs may not find room (by reweighted squares)."""
    features = np.array([graph_features(run.model, run.config, first_stage(run)) for run in runs])
    observed = np.array([run.graphs_gib for run in runs], dtype=float)
    found = np.linalg.lstsq(features, observed, rcond=None)[0]
    for _ in range(60):
        weights = np.abs(features @ found - observed) + 1e-3
        step = np.linalg.lstsq(features * weights[:, None], observed * weights, rcond=None)[0] - found
        found = found + step / 3  # full steps would swing around the minimum
    return round(float(found[0]) * 1024, 4), round(float(found[1]), 3), round(float(found[2]), 3)


def _search(start: Constants, names: Sequence[str], runs: Sequence[Run]) -> Constants:
    """Least absolute error of the activation peak, by Newton steps on its linear pieces.

    The peak is the larger of two linear functions of the constants; each step fits the pieces that are the larger
    ones at the constants so far, by reweighted least squares.
    """
    best = start
    if not runs:
        return best
    observed = np.array([run.activation_gib for run in runs])
    for _ in range(_NEWTON_STEPS):
        base = np.array([predicted_activation(run, best) for run in runs])
        columns = []
        for name in names:
            moved = dataclasses.replace(best, **{name: getattr(best, name) * (1 + _NUDGE)})
            columns.append((np.array([predicted_activation(run, moved) for run in runs]) - base) / _NUDGE)
        shares = _least_absolute(np.stack(columns, axis=1), observed - base)
        values = [round(getattr(best, name) * (1 + share), 3) for name, share in zip(names, shares, strict=True)]
        best = dataclasses.replace(best, **dict(zip(names, values, strict=True)))
    return best


def _least_absolute(features: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The coefficients with the least sum of absolute errors."""
    found = np.zeros(features.shape[1])
    for _ in range(50):
        weights = 1 / np.sqrt(np.abs(features @ found - wanted) + 1e-4)
        found = np.linalg.lstsq(features * weights[:, None], wanted * weights, rcond=None)[0]
    return found


def cross_validate(runs: Sequence[Run], group: Callable[[Run], str]) -> list[tuple[Run, Constants]]:
    """Each run with the constants that were fitted without its group."""
    held: list[tuple[Run, Constants]] = []
    for name in sorted({group(run) for run in runs}):
        fit = fit_constants([run for run in runs if group(run) != name])
        held += [(run, fit.of(run)) for run in runs if group(run) == name]
    return held


def write_constants(path: Path) -> Fit:
    """Fit on every run and write the JSON that the planner reads."""
    runs = load_runs()
    fit = fit_constants(runs)
    source = f"{len(runs)} start-ups of vLLM 0.19.0 on an H100 and 0.25.1 on an H200 (labkit/memory/runs)"
    first = dataclasses.asdict(dataclasses.replace(fit.first, source=source))
    second = {name: getattr(fit.second, name) for name in ("sampler_bytes", "non_torch_gib")}
    old = {
        # Same formula on logs of 0.6 to 0.14 (cases N02, N62): 2.5 times the sampler's memory of 0.17 (case N43).
        "sampler_bytes": 36.0, "activation_uncertainty": 0.3, "non_torch_gib": 0.35,
        "source": "sampler: cases N02, N43 and N62; non-torch: N07, N23 and N56; the rest as fitted on 0.19.0",
    }  # fmt: skip
    entries = [
        {"since": [0, 0, 0], "runner": 0, "values": {**first, **old}},
        {"since": [0, 17, 0], "runner": 0, "values": {name: first[name] for name in old}},
        {"since": list(parse_version("0.23")), "runner": 2, "values": second},
    ]  # fmt: skip
    about = (
        "Constants of the formulas in labkit/memory/budget.py, by version; runner 0 holds for both model runners. "
        "Written by `python -m labkit.memory.fit`."
    )
    write_atomic(path, json.dumps({"_about": about, "constants": entries}, indent=1) + "\n")
    return fit


if __name__ == "__main__":
    write_constants(Path(__file__).with_name("vllm_constants.json"))
