"""The doctor in the notebook: what its buttons show is what the examinations say."""

from __future__ import annotations

from labkit.doctor.machine import FixedMachine
from labkit.doctor.nvml_facts import CardFacts, NvmlFacts
from labkit.widgets import doctor_panel

OLD = FixedMachine(nvml_facts=NvmlFacts(driver="470.82", cards=(CardFacts(0, "<b>card</b>", capability=(9, 0)),)))


def test_it_opens_with_this_machines_checks(one_thread):
    panel = doctor_panel(OLD)
    assert panel.table.columns == ["status", "check", "evidence", "cause", "fix"]
    assert len(panel.table.rows) > 15
    assert panel.answer.text.startswith("this machine: ")
    assert panel.table.rows[0][0] in ("problem", "warning")


def test_it_names_the_releases(one_thread):
    panel = doctor_panel(OLD)
    panel.which.click()
    assert panel.answer.level == "bad"
    assert any("update the host's driver" in row[4] for row in panel.table.rows)


def test_it_explains_a_pasted_error_and_says_what_it_does_not_know(one_thread):
    panel = doctor_panel(OLD)
    panel.text.value = "RuntimeError: UVA is not available\x1b[31m"
    panel.explain.click()
    assert panel.answer.level == "bad"
    assert panel.table.rows[0][1] == "uva"
    panel.text.value = "hello"
    panel.explain.click()
    assert panel.answer.level == "ok"
    assert panel.table.rows[0][0] == "unknown"
