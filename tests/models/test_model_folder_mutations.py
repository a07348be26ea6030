"""Mutated tokenizer.json and safetensors files: only labkit's own errors. Longer: tests/fuzz_readers.py."""

from __future__ import annotations

import pytest

from tests.reader_fuzz import run_target
from tests.reader_targets.model_folders import TARGETS


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_readers_refuse_with_their_own_errors_only(tmp_path, target, one_thread):
    outcome = run_target(target, 2000, 20261130, tmp_path)
    assert outcome.failures == []
    assert outcome.accepted > 100
    assert outcome.refused > 100
