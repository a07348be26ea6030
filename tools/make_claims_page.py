"""Writes docs/claims.md from results/claims.json, so that page and results cannot differ.

labkit claims --out results/claims.json && python tools/make_claims_page.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
INTRODUCTION = """# What tuning guides say

Thirty sentences that guides repeat, each put to the test with the planner, the virtual GPU, simulated counters or
vLLM's own rules, some on a card; each says how its numbers were got. `labkit claims C04` tests one again. At the end
stands the guides' [reference case](#case-a), under every reading of what it leaves open. *Simulation* means the real
scheduler and block pool with predicted step times (see [method](method.md)); *counters, simulated* means a model of the
L2, not a profiler.
"""


def page(results: dict[str, Any]) -> str:
    """The page as Markdown."""
    rows = results["rows"]
    words = [row["verdict"] for row in rows]
    count = ", ".join(f"{words.count(word)} {word}" for word in ("holds", "depends", "wrong", "not tested"))
    parts = [INTRODUCTION, f"{len(rows)} claims: {count}.\n", "| | claim | verdict |", "|---|---|---|"]
    parts += [
        f"| [{row['claim']}](#{row['claim'].lower()}) | {_cell(row['statement'])} | {row['verdict']} |" for row in rows
    ]
    for row in [*rows, *results["reference_cases"]]:
        parts += [
            "",
            f"## {row['claim']}",
            "",
            f"> {row['statement']}",
            "",
            f"**{row['verdict'].capitalize()}**, by {row['method']}.",
        ]
        parts += [f"{row['conditions']}", "", "| quantity | value |", "|---|---|"]
        parts += [
            f"| {_cell(name)} | {value if isinstance(value, str) else f'{value:g}'} |"
            for name, value in row["numbers"].items()
        ]
        parts += ["", f"Again: `{row['how_to_rerun']}`"]
    return "\n".join(parts) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> None:
    """Write the page."""
    results = json.loads((ROOT / "results" / "claims.json").read_text(encoding="utf-8"))
    (ROOT / "docs" / "claims.md").write_text(page(results), encoding="utf-8")


if __name__ == "__main__":
    main()
