"""Simulates the settings for common cards and writes results/card-settings.json and docs/card-settings.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from labkit.advice.card_settings import TRACES, write_settings

ROOT = Path(__file__).parents[1]
INTRODUCTION = """# Settings for common cards

For each card, model and trace the best of five configurations (four and fp8 KV, where the card has fp8), on the fewest
cards that hold one, by simulation of 40 requests that all wait at once: nothing here was measured. *Low* to *high* is
where nine in ten measured rates lie; *level* says where the constants of the step times come from. Notebook
[06-card-settings](../notebooks/06-card-settings.ipynb) makes rows of it before your eyes, `tools/make_card_settings.py`
all of it; your own traffic is one call away, `session.search`.
"""


def page(results: dict[str, Any]) -> str:
    """The page as Markdown."""
    parts = [INTRODUCTION]
    for trace in TRACES:
        parts += [f"## {trace}", "", "| card | model | requests/s | low to high | level | command |", "|" + 6 * "---|"]
        parts += [_line(row) for row in results["rows"] if row["trace"] == trace]
        parts.append("")
    return "\n".join(parts)


def _line(row: dict[str, Any]) -> str:
    if "requests_per_s" not in row:
        return f"| {row['card']} | {row['model']} | – | – | – | {row['command']} |"
    card = row["card"] if row["num_cards"] == 1 else f"{row['num_cards']} × {row['card']}"
    command = " ".join(row["command"].replace("\\\n", " ").split())
    return (
        f"| {card} | {row['model']} | {row['requests_per_s']:g} | {row['low']:g} to {row['high']:g} | {row['level']} "
        f"| `{command}` |"
    )


def main() -> None:
    """Simulate and write both files."""
    results = write_settings(
        ROOT / "results" / "card-settings.json", on_row=lambda row: print(row["card"], row["trace"])
    )
    (ROOT / "docs" / "card-settings.md").write_text(page(results), encoding="utf-8")


if __name__ == "__main__":
    main()
