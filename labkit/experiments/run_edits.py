"""Name, note, lock and trash of a session's runs, in the store and in the session's own list alike."""

from __future__ import annotations

import dataclasses

from labkit.errors import StoreError
from labkit.experiments.store import RunStore
from labkit.measure.run_record import RunRecord
from labkit.text import plain


class RunEdits:
    """What a user may change of a run after it ended; never its numbers.

    Args:
        store: where the runs are kept.
        records: the session's list, changed in place.
    """

    def __init__(self, store: RunStore, records: list[RunRecord]) -> None:
        self._store, self._records = store, records
        self._trash: list[tuple[int, RunRecord]] = []
        self._locked: set[str] = set()

    def rename(self, run_id: str, name: str) -> None:
        """Call the run `name`.

        Raises:
            StoreError: the name is empty, or the store refuses.
        """
        name = plain(name, 200).strip()
        if not name:
            raise StoreError("a run has a name", works="what differs, such as fp8 KV")
        self._store.rename(run_id, name)
        self._replace(run_id, name=name)

    def annotate(self, run_id: str, note: str) -> None:
        """Write a note to the run; an empty one removes it."""
        note = plain(note, 2000)
        self._store.set_note(run_id, note)
        self._replace(run_id, note=note)

    def lock(self, run_id: str, locked: bool = True) -> None:
        """Keep the run from being deleted, or no longer."""
        self._store.lock(run_id, locked)
        (self._locked.add if locked else self._locked.discard)(run_id)

    def is_locked(self, run_id: str) -> bool:
        """Whether the run is locked."""
        return run_id in self._locked

    def delete(self, run_id: str) -> None:
        """Move the run to the trash.

        Raises:
            StoreError: it is locked or not there.
        """
        self._store.delete(run_id)
        at = next((at for at, record in enumerate(self._records) if record.run_id == run_id), None)
        if at is not None:
            self._trash.append((at, self._records.pop(at)))

    @property
    def num_deleted(self) -> int:
        """Runs of this session in the trash."""
        return len(self._trash)

    def restore_last(self) -> str | None:
        """Take the run that was deleted last back to its place; its id, None where the trash is empty."""
        if not self._trash:
            return None
        at, record = self._trash[-1]
        self._store.restore(record.run_id)
        self._trash.pop()
        self._records.insert(at, record)
        return record.run_id

    def _replace(self, run_id: str, **changes: str) -> None:
        for at, record in enumerate(self._records):
            if record.run_id == run_id:
                self._records[at] = dataclasses.replace(record, **changes)  # type: ignore[arg-type]
