"""Writes docs/l2-table.md from results/counters.json and results/counters-held-out.json; --check only says whether the
page is up to date."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "l2-table.md"
ERRORS = {
    "hit_rate_mean_error_points": "hit rate, mean error (points)",
    "hit_rate_worst_error_points": "hit rate, worst error (points)",
    "dram_bytes_mean_error_percent": "DRAM bytes, mean error (%)",
}
NAMES = {
    "points": ("launches", "{:.0f}"),
    **{key: (name, "{:.2f}") for key, name in ERRORS.items()},
    **{f"unseen_{key}": (f"launches drawn at random: {name}", "{:.2f}") for key, name in ERRORS.items()},
    "methods_hit_rate_differ_points": ("CUPTI and ncu, hit rate apart (points)", "{:.2f}"),
    "methods_dram_bytes_differ_percent": ("CUPTI and ncu, DRAM bytes apart (%)", "{:.3f}"),
    "simulated_decode_64x4096_cpu_s": ("simulation of a decode step of 64 × 4096 (s of one core)", "{:.3f}"),
    "counted_launch_median_s": ("counting a launch, median (s)", "{:.2f}"),
}


def page(results: dict[str, Any], held_out: dict[str, Any]) -> str:
    """The page as Markdown."""
    fit = results["calibration"]
    ways = "one set" if fit["ways"] is None else f"sets of {fit['ways']} lines"
    lines = [
        "# The simulated L2 against a card's counters",
        "",
        f"Counted on an NVIDIA {results['card']} with `{results['command']}` ({results['made'][:10]}); made by "
        "`tools/make_l2_table.py`. Fitted to the same launches: "
        f"{100 * fit['capacity_share']:.0f} % of the L2 count, in {ways}; of reads of one tile in the same step "
        "1 − exp(−c·√(pace/(1 + step))) meet before the L2 where the programs start at once, with c "
        f"{fit['lockstep_next']:g} side by side in a cluster of SMs, {fit['lockstep_further']:g} further along such a "
        f"row and {fit['lockstep_cluster']:g} for others in the cluster, and {100 * fit['coalesced_later']:.0f} % of "
        "neighbours that start later; where a row of K is shorter than a line of 128 bytes these go with "
        f"(row/128)^{fit['coalesced_row_power']:g}. The last {len(results['unseen'])} launches were "
        "drawn at random, and the fit has not seen them.",
        "",
        "| | value | bar | |",
        "|---|---|---|---|",
    ]
    lines += [_bar(results["summary"][key], name, form) for key, (name, form) in NAMES.items()]
    lines += [_bar(held_out["summary"][key], f"series left out of the fit: {name}", "{:.2f}")
              for key, name in ERRORS.items()]  # fmt: skip
    lines += ["", *_held_out(held_out)]
    lines += ["", "| both methods | CUPTI hits | ncu hits | CUPTI DRAM | ncu DRAM |", "|---|---|---|---|---|"]
    lines += [_both(row) for row in results["both_methods"] if row["cupti"]]
    lines += [
        "",
        "Time is that of a CUDA graph's replay with a cold L2; *of it* is the time that the card's measured "
        "ceilings allow over it, for the ceiling that binds.",
        "",
        "| launch | hits counted | simulated | apart (points) | DRAM counted | apart | time | bound by | of it |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [_row(row) for row in (*results["rows"], *results["unseen"])]
    lines += [f"| {row['name']} | not counted: {row['error'][:120]} | | | | | | | |" for row in results["refused"]]
    return "\n".join(lines) + "\n"


def _bar(entry: dict[str, Any], name: str, form: str) -> str:
    bar = f"at least {entry['at_least']:g}" if "at_least" in entry else f"at most {entry['at_most']:g}"
    value = "not measured" if entry["value"] is None else form.format(entry["value"])
    return f"| {name} | {value} | {bar} | {'met' if entry['ok'] else 'missed'} |"


def _held_out(results: dict[str, Any]) -> list[str]:
    """What the fit is worth beyond its own launches."""
    lines = [
        f"The fit has seen the launches that it is held against. Each series by the fit to all others (`"
        f"{results['command']}`):",
        "",
        "| left out | launches | hit rate, mean error (points) | worst | DRAM bytes, mean error (%) |",
        "|---|---|---|---|---|",
    ]
    return lines + [
        f"| {row['left_out']} | {row['launches']} | " + " | ".join(f"{row[key]:.2f}" for key in ERRORS) + " |"
        for row in results["rows"]
    ]


def _row(row: dict[str, Any]) -> str:
    counted, simulated, roof = row["counted"], row["simulated"], row["roofline"]
    return (
        f"| {row['name']} | {100 * counted['l2_hit_rate']:.2f} % | {100 * simulated['l2_hit_rate']:.2f} % | "
        f"{row['hit_error_points']:+.2f} | {counted['dram_bytes'] / 1e6:,.1f} MB | "
        f"{row['dram_bytes_error_percent']:+.2f} % | {1e6 * counted['kernel_time_s']:,.0f} µs | {roof['bound']} | "
        f"{100 * roof['share_reached']:.0f} % |"
    ).replace("| -", "| −")


def _both(row: dict[str, Any]) -> str:
    hits = " | ".join(f"{100 * row[method]['l2_hit_rate']:.2f} %" for method in ("cupti", "ncu"))
    volumes = " | ".join(f"{row[method]['dram_bytes'] / 1e6:,.1f} MB" for method in ("cupti", "ncu"))
    return f"| {row['name']} | {hits} | {volumes} |"


def main() -> int:
    """Write the page, or check it; 1 where it is out of date."""
    counters, held_out = (
        json.loads((ROOT / "results" / name).read_text(encoding="utf-8"))
        for name in ("counters.json", "counters-held-out.json")
    )
    text = page(counters, held_out)
    if "--check" in sys.argv[1:]:
        return 0 if PAGE.read_text(encoding="utf-8") == text else 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
