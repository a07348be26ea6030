"""The split computed without a card is the one that the device's plan kernel makes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from labkit_kernels import decode_split

FOLDER = Path(__file__).parent
KERNELS = FOLDER.parents[1] / "kernels"


def case(lens, tile=64, slots=33.0, window=None, chunk_tokens=None):
    return {"lens": lens, "tile": tile, "slots": slots, "window": window, "chunk_tokens": chunk_tokens}


RAGGED = np.random.default_rng(3).integers(1, 9000, 40).tolist()
# Few of the places of a captured step are taken; without the padding's items their split would not fit.
PADDED = [*np.random.default_rng(4).integers(100, 850, 20).tolist(), *[0] * 76]
CASES = [
    case([4096] * 64), case([1]), case([32768]), case([16384] * 8), case([1024] * 16, slots=8.25), case(RAGGED),
    case([300, 5, 64, 65], tile=16), case(RAGGED, window=1000), case(RAGGED[:9], chunk_tokens=1024),
    case([4096, 100], tile=128, slots=66.0, chunk_tokens=8192), case(PADDED), case(PADDED, window=300),
]  # fmt: skip


@pytest.fixture(scope="module")
def plans():
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(KERNELS)}
    command = [sys.executable, str(FOLDER / "decode_split_cases.py"), json.dumps(CASES)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("index", range(len(CASES)))
def test_equals_the_device(plans, index):
    given, plan = CASES[index], plans[index]
    lens = np.array(given["lens"])
    first = np.zeros_like(lens)
    if given["window"]:
        first = np.maximum(lens - 1 - given["window"] + 1, 0) // given["tile"] * given["tile"]
    chunk = given["chunk_tokens"] and given["chunk_tokens"] // given["tile"]
    items = decode_split.split_decode(lens, first, given["tile"], given["slots"], chunk)
    assert items.chunk_tiles == plan["chunk"]
    assert [items.sequence.tolist(), items.start.tolist(), items.end.tolist()] == plan["items"]


def test_items_cover_every_token_once():
    lens = np.array(RAGGED)
    items = decode_split.split_decode(lens, np.zeros_like(lens), 64, 16.5)
    for sequence, length in enumerate(lens):
        mine = np.flatnonzero(items.sequence == sequence)
        pieces = sorted(zip(items.start[mine].tolist(), items.end[mine].tolist(), strict=True))
        assert [start for start, _ in pieces] == [0, *[end for _, end in pieces[:-1]]]
        assert pieces[-1][1] == length


def test_a_step_never_has_more_items_than_there_is_room_for():
    """As `DecodeWorkspace` allocates them: more would be written over other items, and then past their end."""
    rng = np.random.default_rng(5)
    for _ in range(400):
        batch, slots = int(rng.integers(1, 257)), float(rng.choice([8.25, 33.0, 49.5]))
        lens = np.zeros(batch, np.int64)
        taken = int(rng.integers(0, batch + 1))
        lens[:taken] = rng.integers(1, rng.choice([300, 3000]), taken)
        items = decode_split.split_decode(lens, np.zeros_like(lens), 64, slots)
        assert len(items.sequence) <= batch - 1 + int(slots)
        assert set(items.sequence.tolist()) == set(range(batch))
