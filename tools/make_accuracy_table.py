"""Write the accuracy tables of README and two pages of docs from `results/`; `--check` fails when one is older.

Usage: .venv/bin/python tools/make_accuracy_table.py [--check]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import labkit

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
VIRTUAL_GPU, PLANNER = ROOT / "docs" / "virtual-gpu.md", ROOT / "docs" / "planner.md"
USUAL_LENGTH = 4096
START, END = "<!-- accuracy -->", "<!-- /accuracy -->"
SERVERS = (("h100_vllm_0_19", "vLLM 0.19, H100"), ("h200_vllm_0_25", "vLLM 0.25, H200, changed flags"))
PARTS = (
    ("pool_percent", "KV pool", "%"),
    ("tokens_percent", "KV tokens", "%"),
    ("weights_percent", "weights", "%"),
    ("activation_gib", "activation peak", "GiB"),
    ("graphs_gib", "CUDA graphs", "GiB"),
)


def table(results: dict[str, Any]) -> str:
    """The table in Markdown: mean absolute and largest error for each part, on fitted and on unseen runs."""
    lines = [
        "| servers | part | all runs fitted: mean, largest | model unseen | setting unseen |",
        "|---|---|---|---|---|",
    ]
    for key, title in SERVERS:
        fitted = results[key]
        unseen = [results[name][key] for name in ("leaving_out_whole_models", "leaving_out_whole_settings")]
        for part, words, unit in PARTS:
            if part not in fitted:
                continue
            cells = [_cell(group[part], unit) for group in (fitted, *unseen)]
            lines.append(f"| {title}, {fitted['num_runs']} runs | {words} | {' | '.join(cells)} |")
    reports, golden = results["public_reports"], results["golden_table"]
    verdicts = results["verdicts"]
    lines += [
        "",
        f"Public reports: {reports['exact_or_inside_print_rounding']} of {reports['numbers']} printed numbers exact or "
        f"inside print rounding; {len(reports['listed'])} reports beyond the planner are listed with the reason. "
        f"vLLM's own planner: {golden['exact_or_inside_print_rounding']} of {golden['numbers']} numbers exact. "
        f"Fits or not: {verdicts['right']} of {verdicts['cases']} right, "
        f'{len(verdicts["may_not_fit"])} "may not fit", {len(verdicts["false_fits"])} false "fits".',
    ]
    return "\n".join(lines)


def _cell(error: dict[str, float], unit: str) -> str:
    return f"{error['mean_absolute']:.2f} {unit}, {abs(error['largest']):.2f} {unit}"


def simulation_table(results: dict[str, Any]) -> str:
    """What the virtual GPU is held to, met or missed, in Markdown."""
    lines = ["| what | value | at least or most | aim | |", "|---|---|---|---|---|"]
    for what, entry in results["summary"].items():
        kind = "at least" if "at_least" in entry else "at most"
        bar = entry[kind.replace(" ", "_")]
        value = "not measured" if entry["value"] is None else f"{entry['value']:.3g}"
        lines.append(f"| {what} | {value} | {kind} {bar:g} | {entry['aim']:g} | {'met' if entry['ok'] else 'missed'} |")
    return "\n".join(lines)


def pools_table(results: dict[str, Any]) -> str:
    """Pools of labkit's engine on a card, planned beside measured, in Markdown."""
    lines = [
        "| model | tokens a step | requests | other settings | share of the card | blocks planned | measured | error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in results["rows"]:
        settings, layers = row["settings"], row["num_layers"]
        model = row["model"].rpartition("/")[2]
        whole = labkit.load_model(row["model"]).num_layers
        cells = (
            model if layers == whole else f"{model}, {layers} layers",
            f"{settings['max_num_batched_tokens']:,}", f"{settings['max_num_seqs']:,}", _other_settings(settings),
            f"{100 * row['pool_share']:.1f} %", f"{row['planned_blocks']:,}", f"{row['measured_blocks']:,}",
            f"{row['error_percent']:+.2f} %, {row['error_mib']:+.0f} MiB" if row["error_mib"] else "0",
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _other_settings(settings: dict[str, Any]) -> str:
    shown = {"max_num_batched_tokens", "max_num_seqs", "gpu_memory_utilization"}
    words = {"kv_cache_dtype": "KV", "block_size": "block"}
    others = {name: value for name, value in settings.items() if name not in shown}
    if others.get("max_model_len") == USUAL_LENGTH:
        del others["max_model_len"]
    said = (f"{value:,}" if isinstance(value, int) else str(value) for value in others.values())
    return ", ".join(f"{words.get(name, name)} {value}" for name, value in zip(others, said, strict=True))


def filled(text: str, wanted: str) -> str:
    """`text` with `wanted` between its marks."""
    before, rest = text.split(START, 1)
    after = rest.split(END, 1)[1]
    return f"{before}{START}\n{wanted}\n{END}{after}"


def main() -> int:
    """Write, or with `--check` compare; the exit code."""
    planner, simulation, pools = (
        json.loads((ROOT / "results" / f"{name}.json").read_text()) for name in ("planner", "simulation", "labkit-plan")
    )
    pages = {README: table(planner), VIRTUAL_GPU: simulation_table(simulation), PLANNER: pools_table(pools)}
    is_old = False
    for path, wanted in pages.items():
        text = path.read_text()
        new = filled(text, wanted)
        is_old = is_old or new != text
        if "--check" not in sys.argv:
            path.write_text(new)
    return int(is_old and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
