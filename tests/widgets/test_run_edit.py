"""The runs in the panel: pins on top, name and note, lock, trash with undo, and back to the baseline's settings."""

from __future__ import annotations

import pytest

from labkit.experiments import RunStore
from labkit.experiments.run_edits import RunEdits
from labkit.specs.engine_config import EngineConfig
from labkit.widgets import Panel
from labkit.widgets.run_edit import MAX_PINS
from tests.figures.samples import sample_record, sample_runs
from tests.widgets.fake_session import FakeSession


class KeptSession(FakeSession):
    """A session whose runs are in a store as well."""

    def __init__(self, records, folder) -> None:
        super().__init__(records=records)
        self.store = RunStore(folder / "runs.sqlite3")
        for record in records:
            self.store.save(record)
        self.edits = RunEdits(self.store, self._records)


@pytest.fixture
def panel(tmp_path):
    made = Panel(KeptSession(list(sample_runs()), tmp_path))
    yield made
    made.settle()


def names(panel) -> list[str]:
    return [row[0] for row in panel.runs.rows]


def test_name_and_note_are_edited_where_the_run_is_chosen(panel):
    panel.choose("run-16")
    assert (panel.editor.name.value, panel.editor.note.value) == ("block 16", "")
    panel.editor.name.value = "the good one"
    panel.editor.note.value = "quiet machine"
    assert names(panel) == ["block 8", "the good one", "block 64"]
    assert panel.session.store.get("run-16").note == "quiet machine"
    panel.choose("run-8")
    assert panel.editor.name.value == "block 8"
    panel.editor.name.value = ""
    assert "has a name" in panel.editor.status.text
    assert names(panel)[0] == "block 8"


def test_pins_stay_on_top_behind_the_baseline(panel):
    for run_id in ("run-64", "run-8"):
        panel.choose(run_id)
        panel.editor.pin.click()
    panel.choose("run-16")
    panel.pin()
    assert panel.runs.pinned == [1, 2, 0]
    assert panel.runs.marks == ["◆ pinned", "⚑ baseline", "◆ pinned"]
    panel.choose("run-64")
    assert panel.editor.pin.description == "Unpin"
    panel.editor.pin.click()
    assert panel.runs.pinned == [1, 0]


def test_there_are_at_most_five_pins(tmp_path):
    records = [sample_record(run_id=f"run-{number}", name=str(number)) for number in range(MAX_PINS + 1)]
    panel = Panel(KeptSession(records, tmp_path))
    for record in records:
        panel.choose(record.run_id)
        panel.editor.pin.click()
    assert len(panel.runs.pinned) == MAX_PINS == 5
    assert "unpin one first" in panel.editor.status.text
    panel.settle()


def test_deltas_carry_percent_and_amount_and_can_be_off(panel):
    panel.choose("run-16")
    panel.pin()
    assert "%, −" in panel.runs.rows[0][2]
    panel.editor.deltas.value = False
    assert "%" not in panel.runs.rows[0][2]


def test_a_deleted_run_comes_back(panel):
    panel.choose("run-8")
    panel.editor.delete.click()
    assert names(panel) == ["block 16", "block 64"]
    assert panel.session.store.get("run-16").run_id == "run-16"
    panel.editor.undo.click()
    assert names(panel) == ["block 8", "block 16", "block 64"]
    assert panel.editor.undo.disabled


def test_the_last_run_can_be_deleted_and_taken_back(tmp_path):
    panel = Panel(KeptSession([sample_record()], tmp_path))
    panel.editor.delete.click()
    assert panel.runs.rows == []
    panel.editor.undo.click()
    assert names(panel) == ["block 16"]
    panel.settle()


@pytest.mark.parametrize("keep", ["pin", "baseline", "lock"])
def test_what_is_kept_is_not_deleted(panel, keep):
    panel.choose("run-16")
    {"pin": panel.editor.pin.click, "baseline": panel.pin, "lock": panel.editor.lock.click}[keep]()
    panel.editor.delete.click()
    assert len(panel.runs.rows) == 3
    assert "unpin it first" in panel.editor.status.text or "locked" in panel.editor.status.text
    if keep == "lock":
        assert panel.runs.marks[1] == "locked"
        panel.editor.lock.click()
        assert panel.runs.marks[1] == ""


def test_back_to_the_settings_of_the_baseline_is_one_step(panel):
    assert panel.knob_set.baseline_button.disabled
    panel.choose("run-64")
    panel.pin()
    assert not panel.knob_set.baseline_button.disabled
    panel.knobs["max_num_seqs"].value = 7
    panel.knob_set.baseline_button.click()
    assert panel.config == panel.session.records()[2].config
    panel.knob_set.undo()
    assert panel.config == EngineConfig(max_num_seqs=7)


def test_a_session_without_a_store_can_still_pin():
    panel = Panel(FakeSession(records=sample_runs()))
    panel.choose("run-8")
    panel.editor.pin.click()
    assert panel.runs.pinned == [0]
    panel.settle()


def test_before_any_run_there_is_nothing_to_edit():
    panel = Panel(FakeSession())
    assert panel.editor._view.layout.display == "none"
    panel.settle()
