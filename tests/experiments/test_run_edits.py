"""What a user changes of a run is in the session's list and in the store, and its numbers stay."""

from __future__ import annotations

import pytest

from labkit.errors import StoreError
from labkit.experiments import RunStore
from labkit.experiments.run_edits import RunEdits
from tests.figures.samples import HOSTILE, sample_runs


@pytest.fixture
def shelf(tmp_path):
    store, records = RunStore(tmp_path / "runs.sqlite3"), list(sample_runs())
    for record in records:
        store.save(record)
    return store, records, RunEdits(store, records)


def test_name_and_note_are_kept_in_both_places(shelf):
    store, records, edits = shelf
    edits.rename("run-16", "  the good one ")
    edits.annotate("run-16", "after the fix")
    assert (records[1].name, records[1].note) == ("the good one", "after the fix")
    stored = store.get("run-16")
    assert (stored.name, stored.note) == ("the good one", "after the fix")
    assert stored.requests == sample_runs()[1].requests


@pytest.mark.parametrize("name", ["", "   "])
def test_a_name_is_not_empty(shelf, name):
    _, records, edits = shelf
    with pytest.raises(StoreError, match="has a name"):
        edits.rename("run-16", name)
    assert records[1].name == "block 16"


def test_text_from_outside_is_made_plain(shelf):
    _, records, edits = shelf
    edits.rename("run-8", HOSTILE)
    assert "\x1b" not in records[0].name


def test_a_locked_run_is_not_deleted(shelf):
    store, records, edits = shelf
    edits.lock("run-8")
    assert edits.is_locked("run-8")
    with pytest.raises(StoreError, match="locked"):
        edits.delete("run-8")
    assert len(records) == 3
    edits.lock("run-8", False)
    edits.delete("run-8")
    assert [record.run_id for record in records] == ["run-16", "run-64"]
    assert [entry.run_id for entry in store.list_runs(trashed=True)] == ["run-8"]


def test_deleted_runs_come_back_to_their_places_last_first(shelf):
    store, records, edits = shelf
    before = list(records)
    edits.delete("run-16")
    edits.delete("run-8")
    assert edits.num_deleted == 2
    assert edits.restore_last() == "run-8"
    assert edits.restore_last() == "run-16"
    assert edits.restore_last() is None
    assert records == before
    assert len(store.list_runs()) == 3


def test_a_run_that_is_not_there(shelf):
    _, records, edits = shelf
    for act in (lambda: edits.rename("gone", "x"), lambda: edits.delete("gone")):
        with pytest.raises(StoreError):
            act()
    assert len(records) == 3
