"""Start-up and error logs with numbers, names, lines and bytes mutated, read and explained."""

from __future__ import annotations

import random
import re
from pathlib import Path

from labkit.memory.log_explanation import explain_log, explanation_json
from labkit.memory.logs import read_log_file
from tests.reader_fuzz import ReaderTarget, mutate_bytes

_LOGS = sorted((Path(__file__).parent.parent / "memory" / "data" / "logs").glob("*.log"))
_NUMBER = re.compile(r"\d[\d.,]*")
_NUMBERS = (
    "0", "-1", "1", "0.0", "1e308", "nan", "9" * 15, "9" * 40, "1,2,3", "1,000,000", "0.001", "79.19", "131072",
    "2147483648", "16k", "16K", "None", "", "\u0663",
)  # fmt: skip
_WORDS = (
    ("GiB", "MiB"), ("GiB", "B"), ("GiB", ""), ("bfloat16", "float4"), ("auto", "octave_k3v4"), ("auto", "nvfp4"),
    ("False", "Maybe"), ("v0.", "v9999."), ("0.19.0", "x"), ("tensor_parallel_size=1", "tensor_parallel_size=4096"),
    ("meta-llama/", "../"), ("Llama", "\u202eLlama\x1b]0;x\x07"), ("(", ""), (")", "("), ("tokens", "\n"),
)  # fmt: skip


def make_log(rng: random.Random) -> bytes:
    """One mutated log."""
    lines = rng.choice(_LOGS).read_text().splitlines()
    for _ in range(rng.randint(1, 6)):
        _mutate_lines(lines, rng)
    data = "\n".join(lines).encode("utf-8", "surrogatepass")
    return mutate_bytes(data, rng) if rng.random() < 0.3 else data


def _mutate_lines(lines: list[str], rng: random.Random) -> None:
    index = rng.randrange(len(lines)) if lines else 0
    kind = rng.randrange(6)
    if not lines or kind == 0:
        lines.insert(index, rng.choice(rng.choice(_LOGS).read_text().splitlines()))
    elif kind == 1:
        del lines[index]
    elif kind == 2:
        lines[index] = lines[index][: rng.randrange(len(lines[index]) + 1)]
    elif kind == 3:
        old, new = rng.choice(_WORDS)
        lines[index] = lines[index].replace(old, new)
    elif kind == 4 and (found := list(_NUMBER.finditer(lines[index]))):
        number = rng.choice(found)
        lines[index] = lines[index][: number.start()] + rng.choice(_NUMBERS) + lines[index][number.end() :]
    else:
        lines[index] += rng.choice((" ", "\t", "x" * 20_000, "(" * 500)) + lines[index]


def explain(path: Path) -> object:
    """Everything that `labkit explain-log --json` does."""
    return explanation_json(explain_log(read_log_file(path)))


TARGETS = (ReaderTarget("log", make_log, explain, ".log"),)
