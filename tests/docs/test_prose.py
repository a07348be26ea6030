"""What README and docs say in sentences: files and modules that they name exist, numbers are those of the results."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer.main

from labkit import cli
from labkit.advice import limit
from labkit.advice.speed import MAX_REQUESTS
from labkit.specs import gpu_names

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = "results|tools|labkit|tests|notebooks|kernels|docs|datasets"


def code_of(page: Path) -> str:
    """Everything on a page that stands as code, in a line or in a block."""
    found = re.findall(r"```[^\n]*\n(.*?)```|`([^`\n]+)`", page.read_text(), re.S)
    return "\n".join(block or inline for block, inline in found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_path_that_a_page_names_exists(page):
    named = re.findall(rf"(?<![\w/.~-])((?:{FOLDERS})/[\w./-]*[\w/])", code_of(page))
    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_module_that_a_page_runs_exists(page):
    named = re.findall(r"python -m ((?:labkit|kernels)[\w.]*)", code_of(page))
    assert [name for name in named if importlib.util.find_spec(name) is None] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_benchmark_and_every_flag_that_a_page_names_exists(page):
    commands = typer.main.get_command(cli.app).commands
    for line in re.findall(r"labkit ([a-z][^\n#]*)", code_of(page)):
        words = re.sub(r"'[^']*'|\"[^\"]*\"", "", line).split()
        command = commands[words[0]]
        if words[0] == "bench":
            assert words[1] in command.commands, line
            command = command.commands[words[1]]
        flags = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
        assert [word for word in words if word.startswith("--") and word.partition("=")[0] not in flags] == [], line


def results(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "results" / f"{name}.json").read_text())


def summary(name: str) -> dict[str, Any]:
    return {key: entry["value"] for key, entry in results(name)["summary"].items()}


def counted_runs() -> tuple[int, int]:
    planner = results("planner")
    return planner["h100_vllm_0_19"]["num_runs"], planner["h200_vllm_0_25"]["num_runs"]


def l2_sentences() -> list[str]:
    fitted, held, unseen = summary("counters"), summary("counters-held-out"), len(results("counters")["unseen"])
    return [
        f"Against {fitted['points']} launches on an H200: hit rate within {fitted['hit_rate_mean_error_points']:.1f} "
        f"points mean and {fitted['hit_rate_worst_error_points']:.1f} worst, DRAM bytes within "
        f"{fitted['dram_bytes_mean_error_percent']:.1f} % mean",
        f"a fit to the others: {held['hit_rate_mean_error_points']:.1f}, {held['hit_rate_worst_error_points']:.1f} and "
        f"{held['dram_bytes_mean_error_percent']:.1f} %",
        f"Of {unseen} launches drawn at random",
    ]


def rank_pools() -> list[str]:
    rows = results("tensor-parallel")["rows"]
    pools = {row["num_gpu_blocks"]: None for row in rows if " on 2, 256" in row["name"]}
    return [f"{' and '.join(f'{blocks:,}' for blocks in pools)} blocks, as planned"]


def public_runs() -> list[str]:
    rows = results("simulation")["rows"]
    models = [row for row in rows if row["check"] == "model left out"]
    cards = {row["group"] for row in rows if row["check"] == "card left out"}
    words = {4: "four", 10: "ten"}
    return [f"({sum(row['runs'] for row in models):,}, {words[len(models)]} models, {words[len(cards)]} cards)"]


def pinned_parts() -> list[str]:
    rows = json.loads((ROOT / "tests" / "memory" / "data" / "labkit_parts.json").read_text())["rows"]
    return [f"pins {len(rows)} measured settings of"]


def limits() -> list[str]:
    shares = (limit.FULL_STEP_SHARE, limit.SATURATED_SHARE, limit.HOLDS_BACK_SHARE, limit.BUSY_SHARE)
    full, saturated, held, busy = (round(100 * share) for share in shares)
    return [
        f"the step was full ({full} % of", f"products take {saturated} % of the steps' time",
        f"Under {held} % of the run no memory setting binds", f"in a step for {busy} % of the time",
    ]  # fmt: skip


# Page, and the sentences that must stand on it, made from what they state.
STATED: tuple[tuple[str, Callable[[], list[str]]], ...] = (
    ("docs/l2.md", l2_sentences),
    ("docs/planner.md", rank_pools),
    ("docs/planner.md", pinned_parts),
    ("docs/planner.md", lambda: [f"{sum(counted_runs())} start-ups of real servers"]),
    ("docs/planner.md", lambda: ["{} start-ups of 0.19 on an H100 and {} of 0.25 on an H200".format(*counted_runs())]),
    ("docs/virtual-gpu.md", public_runs),
    ("docs/which-flags.md", lambda: [f"the first {MAX_REQUESTS} requests are simulated"]),
    ("docs/method.md", limits),
)


@pytest.mark.parametrize(("page", "sentences"), STATED, ids=lambda entry: getattr(entry, "__name__", str(entry)))
def test_numbers_in_sentences_are_those_of_the_results(page, sentences):
    text = " ".join((ROOT / page).read_text().split())
    assert [sentence for sentence in sentences() if sentence not in text] == []


def test_counts_in_the_readme_are_those_of_the_catalogues():
    from labkit.advice.claims import CLAIMS

    assert "thirty claims" in (ROOT / "README.md").read_text()
    assert len(CLAIMS) == 30
    assert len(gpu_names()) == 18
