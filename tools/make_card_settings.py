"""Simulates the settings for common cards and writes results/card-settings.json and docs/card-settings.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from labkit.advice.card_settings import TRACES, write_settings

ROOT = Path(__file__).parents[1]
INTRODUCTION = """# Settings for common cards

For each card, model and trace the best of six configurations (twelve where the card has fp8), by simulation of 40
requests that all wait at once: nothing here was measured. *Low* to *high* is where nine in ten measured rates lie, with
the shipped constants. Made by `tools/make_card_settings.py`; your own traffic is one call away, `session.search`.
"""


def page(results: dict[str, Any]) -> str:
    """The page as Markdown."""
    parts = [INTRODUCTION]
    for trace in TRACES:
        parts += [f"## {trace}", "", "| card | model | requests/s | low to high | command |", "|---|---|---|---|---|"]
        for row in results["rows"]:
            if row["trace"] == trace:
                rates = ("–", "–")
                if "requests_per_s" in row:
                    rates = (f"{row['requests_per_s']:g}", f"{row['low']:g} to {row['high']:g}")
                command = " ".join(row["command"].replace("\\\n", " ").split())
                shown = f"`{command}`" if "requests_per_s" in row else command
                parts.append(f"| {row['card']} | {row['model']} | {rates[0]} | {rates[1]} | {shown} |")
        parts.append("")
    return "\n".join(parts)


def main() -> None:
    """Simulate and write both files."""
    results = write_settings(
        ROOT / "results" / "card-settings.json", on_row=lambda row: print(row["card"], row["trace"])
    )
    (ROOT / "docs" / "card-settings.md").write_text(page(results), encoding="utf-8")


if __name__ == "__main__":
    main()
