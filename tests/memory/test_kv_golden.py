"""The KV layout against vLLM 0.33's own planner, and against public reports."""

from __future__ import annotations

import pytest

from labkit.memory.public_cases import all_checks, case_file, golden_checks, verdict_file, verdict_plan


def _name(check):
    return f"{check.case} {check.quantity}"


@pytest.mark.parametrize("check", golden_checks(), ids=_name)
def test_golden_table_of_vllms_planner(check):
    assert check.is_exact, check


@pytest.mark.parametrize("check", all_checks(), ids=_name)
def test_public_reports_reproduce(check):
    assert check.is_exact, check


def test_every_report_that_does_not_reproduce_is_listed_with_its_reason():
    assert {"N04", "N53", "N54", "N63"} <= case_file()["listed"].keys()
    assert all(len(reason) > 20 for reason in case_file()["listed"].values())


@pytest.mark.parametrize("case", verdict_file(), ids=lambda case: case["id"])
def test_verdicts_from_model_card_and_flags_alone(case):
    verdict = verdict_plan(case).verdict
    assert verdict != ("does not fit" if case["fits"] else "fits")
