"""`labkit bench labkit-plan`: pools of labkit's own engine, planned beside measured, written to
`results/labkit-plan.json`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from labkit.errors import FileFormatError
from labkit.memory.planner import plan
from labkit.memory.records import MemoryPlan
from labkit.memory.stages import Overrides
from labkit.results import at_most, write_results
from labkit.specs import load_gpu, load_model
from labkit.specs.engine_config import EngineConfig

MIB = 2**20
# A pool of this share of its card is held to one percent; of smaller ones the bytes are told.
LARGE_SHARE, LARGEST_PERCENT, SMALL_MIB = 0.1, 1.0, 13.0
# What the engine measures before its pool → what the planner takes instead of its formula.
PARTS: Mapping[str, str] = {
    "weights": "weights_bytes", "block_tables": "tables_bytes", "activation": "activation_bytes",
    "cuda_graphs": "cuda_graphs_bytes", "workspace": "non_torch_bytes",
}  # fmt: skip


def bench_labkit_plan(
    path: str | os.PathLike[str] = "results/labkit-plan.json",
    measured: str | os.PathLike[str] = "results/labkit-memory.json",
) -> dict[str, Any]:
    """Plan every row of `measured` (from `labkit.experiments.card_memory`), write both to `path` and return it.

    Raises:
        FileFormatError: there is no such file, or it is another one.
    """
    try:
        content = json.loads(Path(measured).read_text(encoding="utf-8"))
        found = [row for row in content["rows"] if "error" not in row]
        rows = [compare(row, content["card"]) for row in found]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FileFormatError(
            f"{measured} does not hold memory of labkit's engine", works="python -m labkit.experiments.card_memory FILE"
        ) from error
    return write_results(
        path, command="labkit bench labkit-plan", rows=rows, summary=_asked(rows),
        measured={"file": Path(measured).name, "card": content["card"], "made": content["made"]},
    )  # fmt: skip


def compare(row: Mapping[str, Any], card: str) -> dict[str, Any]:
    """One measured configuration beside its plan, and beside the plan from its measured parts."""
    spec = load_model(row["model"])
    if row["num_layers"] is not None:
        spec = spec.replace(layers=spec.layers[: row["num_layers"]])
    gpu, config = load_gpu(card), EngineConfig(**row["settings"], dtype="bfloat16")
    total, parts = row["total_bytes"], row["budget_parts"]
    planned = plan(spec, gpu, config, overrides=Overrides(total_bytes=total))
    stated = {PARTS[name]: size for name, size in parts.items()}
    exact = plan(spec, gpu, config, overrides=Overrides(total_bytes=total, **stated))
    blocks, block_bytes = row["num_gpu_blocks"], planned.block_bytes
    off = planned.num_gpu_blocks - blocks
    return {
        "model": row["model"], "num_layers": spec.num_layers, "settings": row["settings"], "measured_blocks": blocks,
        "planned_blocks": planned.num_gpu_blocks, "from_measured_parts": exact.num_gpu_blocks,
        "pool_share": round(blocks * block_bytes / total, 4), "error_percent": round(100 * off / blocks, 3),
        "error_mib": round(off * block_bytes / MIB, 2), "parts": _parts(planned, parts),
        "held_graphs_mib": [round(size / MIB, 2) for size in (
            planned.breakdown.cuda_graphs_bytes, row["memory_parts"]["cuda_graphs"]
        )],
    }  # fmt: skip


def _parts(planned: MemoryPlan, measured: Mapping[str, int]) -> dict[str, list[float]]:
    """Part → MiB planned and measured, before the pool."""
    rank = planned.details["ranks"][0]
    sizes = {
        "weights": rank["weights_bytes"], "block_tables": rank["tables_bytes"], "activation": rank["activation_bytes"],
        "cuda_graphs": rank["graphs_reserved_bytes"], "workspace": rank["non_torch_bytes"],
    }  # fmt: skip
    return {name: [round(size / MIB, 3), round(measured[name] / MIB, 3)] for name, size in sizes.items()}


def _asked(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Each number that was promised, beside what was measured; nothing measured is a miss."""
    large = [row for row in rows if row["pool_share"] >= LARGE_SHARE]
    small = [row for row in rows if row["pool_share"] < LARGE_SHARE]

    def worst(chosen: list[dict[str, Any]], name: str) -> float | None:
        return max((abs(row[name]) for row in chosen), default=None)

    def furthest(part: str) -> float | None:
        return max((abs(row["parts"][part][0] - row["parts"][part][1]) for row in rows), default=None)

    wrong = sum(row["from_measured_parts"] != row["measured_blocks"] for row in rows) if rows else None
    return {
        "pools from measured parts that differ": at_most(wrong, 0),
        "pools of a tenth of the card or more, largest error [%]": at_most(
            worst(large, "error_percent"), LARGEST_PERCENT
        ),
        "smaller pools, largest error [%]": at_most(worst(small, "error_percent"), LARGEST_PERCENT),
        "smaller pools, largest error [MiB]": at_most(worst(small, "error_mib"), SMALL_MIB),
        "weights, largest error [MiB]": at_most(furthest("weights"), 0),
        "block tables, largest error [MiB]": at_most(furthest("block_tables"), 0),
        "activation, largest error [MiB]": at_most(furthest("activation"), 2),
    }


def main() -> None:
    """The command line of this module: the path of the results, and of what was measured."""
    import sys

    bench_labkit_plan(*sys.argv[1:])


if __name__ == "__main__":
    main()
