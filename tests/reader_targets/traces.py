"""Traffic traces in every form, plain and gzip, with cells, columns, rows and bytes mutated."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

from labkit.specs.workload_loading import load_workload
from tests.reader_fuzz import ReaderTarget, mutate_bytes, mutate_json

_TABLES = (
    ("arrival_s,input_tokens,output_tokens", "0.5,374,44"),
    ("arrival_s,input_tokens,output_tokens,block_hashes_512", "0.0,7000,500,0-13"),
    ("input_tokens,output_tokens", "3772,54"),
    ("TIMESTAMP,ContextTokens,GeneratedTokens", "2023-11-16 18:17:03.9799600,4808,10"),
    ("TIMESTAMP,ContextTokens,GeneratedTokens", "2024-05-10 00:00:00.009930+00:00,2162,5"),
    ("Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type", "5,ChatGPT,472,18,490,Conversation log"),
    (
        "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type",
        "5.5,a,1.5,GPT-4,472,18,490,Conversation log",
    ),
)
_CELLS = (
    "", " ", "-1", "0", "1", "1.0", "1.5", "1e5", "nan", "inf", "-inf", "9" * 25, "9" * 5000, "0x10", "1_000", "٣", "²",
    "abc", '"', '""', '"1"', "\t5", "\0", "\x1b]52;c;x\x07", "\u202e1", "1-", "-", "0-9999999999999", "5-3",
    "1 2 3 4 5",
    "0-1 0-1", "9" * 19 + "-" + "9" * 20, "2023-13-40 99:99:99", "0001-01-01 00:00:00", "9999-12-31 23:59:59+14:00",
    "2023-11-16T18:17:03Z", "20231116", "100000001", "-0", "+5", "1,1",
)  # fmt: skip
_ROW = {"timestamp": 27482, "input_length": 1500, "output_length": 52, "hash_ids": [46, 47, 2353]}
_KEYS = ("timestamp", "input_length", "output_length", "hash_ids", "extra")


def make_table(rng: random.Random) -> bytes:
    """One mutated csv file."""
    header, row = rng.choice(_TABLES)
    rows = [header.split(","), *(row.split(",") for _ in range(rng.randint(0, 6)))]
    for _ in range(rng.randint(1, 3)):
        _mutate_rows(rows, rng)
    end = rng.choice(("\n", "\r\n", "\n\n", ""))
    text = ("\ufeff" if rng.random() < 0.05 else "") + (end or "\n").join(",".join(cells) for cells in rows) + end
    return _packed(text.encode("utf-8", "surrogatepass"), rng)


def _mutate_rows(rows: list[list[str]], rng: random.Random) -> None:
    cells = rng.choice(rows)
    kind = rng.randrange(7)
    if not cells or kind == 0:
        cells.append(rng.choice(_CELLS))
    elif kind == 1:
        cells.pop(rng.randrange(len(cells)))
    elif kind == 2:
        rows.insert(rng.randrange(len(rows) + 1), list(rng.choice(rows)))
    elif kind == 3 and len(rows) > 1:
        rows.remove(cells)
    elif kind == 4:
        first, second = rng.randrange(len(cells)), rng.randrange(len(cells))
        cells[first], cells[second] = cells[second], cells[first]
    else:
        cells[rng.randrange(len(cells))] = rng.choice(_CELLS)


def make_lines(rng: random.Random) -> bytes:
    """One mutated JSON-lines file."""
    rows: list[object] = [_ROW for _ in range(rng.randint(1, 5))]
    for _ in range(rng.randint(1, 3)):
        place = rng.randrange(len(rows))
        rows[place] = mutate_json(rows[place], rng, _KEYS)
    return _packed("\n".join(json.dumps(row) for row in rows).encode(), rng)


def _packed(data: bytes, rng: random.Random) -> bytes:
    chance = rng.random()
    if chance < 0.2:
        data = mutate_bytes(data, rng)
    if chance > 0.75:
        middle = rng.randrange(len(data) + 1)
        data = gzip.compress(data[:middle], 1) + gzip.compress(data[middle:], 1)
    return mutate_bytes(data, rng) if chance > 0.85 else data


def read(path: Path) -> object:
    """As a user's own trace is read."""
    return load_workload(path)


TARGETS = (ReaderTarget("trace.csv", make_table, read, ".csv"), ReaderTarget("trace.jsonl", make_lines, read, ".jsonl"))
