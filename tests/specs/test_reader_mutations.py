"""8,000 mutated configs and traces: only labkit's own errors, within time and memory. Longer: tests/fuzz_readers.py."""

from __future__ import annotations

import random

import pytest

from tests.reader_fuzz import ReaderTarget, run_target
from tests.reader_targets import configs, traces

TARGETS = {target.name: target for target in (*configs.TARGETS, *traces.TARGETS)}


@pytest.mark.parametrize(("name", "count"), [("config.json", 4000), ("trace.csv", 2500), ("trace.jsonl", 1500)])
def test_readers_refuse_with_their_own_errors_only(tmp_path, name, count):
    seed = 20261130
    outcome = run_target(TARGETS[name], count, seed, tmp_path)
    assert outcome.failures == []
    assert outcome.inputs == count
    # A mutation that never passes or always passes would test nothing.
    assert outcome.accepted > count * 0.05
    assert outcome.refused > count * 0.05


def test_the_harness_sees_what_it_should(tmp_path):
    def explode(path):
        raise KeyError("planted")

    target = ReaderTarget("planted", lambda rng: b"", explode, ".bin")
    (failure,) = run_target(target, 1, 7, tmp_path).failures
    assert failure == {"target": "planted", "seed": 7, "number": 0, "problem": "KeyError: 'planted'"}
    hungry = ReaderTarget("hungry", lambda rng: b"", lambda path: len(bytearray(600 * 2**20)), ".bin")
    assert "memory" in run_target(hungry, 1, 7, tmp_path).failures[0]["problem"]


def test_inputs_follow_from_seed_and_number():
    for target in TARGETS.values():
        assert target.make(random.Random("1 x 2")) == target.make(random.Random("1 x 2"))
