"""A model folder with one mutated file, and mutated error lines: the doctor answers each and never fails."""

from __future__ import annotations

import pytest

from tests.reader_fuzz import run_target
from tests.reader_targets.doctor_folders import TARGETS


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_it_always_answers(tmp_path, target):
    outcome = run_target(target, 600, 20261130, tmp_path)
    assert outcome.failures == []
    assert outcome.accepted == outcome.inputs == 600
