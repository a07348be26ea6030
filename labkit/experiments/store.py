"""`RunStore`: every run ever made, in SQLite or any other database; what was acknowledged is never lost."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sqlite3
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from labkit.errors import FileFormatError, StoreError
from labkit.experiments.serialise import (
    dumps,
    from_plain,
    loads,
    record_from_plain,
    record_to_plain,
    rows_from_plain,
    rows_to_plain,
)
from labkit.experiments.store_tables import (
    BUSY_TIMEOUT_MS,
    SCHEMA_VERSION,
    check_version,
    inspect_sqlite,
    make_engine,
    meta,
    metadata,
    network_file_system,
    no_store,
    run_rows,
    runs,
    store_url,
)
from labkit.experiments.writer_identity import WriterIdentity
from labkit.measure.run_record import RequestRow, RunRecord, RunStatus, StepRow
from labkit.text import plain

FINAL: tuple[RunStatus, ...] = ("finished", "cancelled", "failed")
_IN_TRASH = sa.select(runs.c.run_id).where(runs.c.trashed_at.is_not(None), runs.c.locked.is_(False))


@dataclass(frozen=True)
class StoredRun:
    """One line of the table of runs.

    Attributes:
        status: as stored, or "unfinished" for a run whose writer is gone.
        record: the run without its rows of requests and steps and without its block map.
        locked: pinned; it cannot be deleted.
        trashed: deleted, and can be restored.
    """

    run_id: str
    name: str
    created: str
    status: RunStatus
    note: str
    locked: bool
    trashed: bool
    record: RunRecord


class RunStore:
    """A database of runs.

    Args:
        url: None for the user's own store (`LABKIT_HOME` names another folder), a file path for SQLite, or any
            SQLAlchemy URL.
        must_exist: for who reads only: a store that is not there is not made.

    Raises:
        StoreError: the database is damaged, foreign, newer than this labkit, or cannot be reached or made; with
            `must_exist`, that it is not there, and which are.
    """

    def __init__(self, url: str | Path | None = None, *, must_exist: bool = False) -> None:
        self.url = store_url(url)
        self._knob = "LABKIT_HOME" if url is None else "store"
        self._must_exist = must_exist
        self.warnings: tuple[str, ...] = ()
        self._sqlite_path = self._find_sqlite_path()
        self._engine = make_engine(self.url)
        with self._errors("open"):
            self._prepare()

    def __repr__(self) -> str:
        return f"RunStore({self.location!r})"

    @property
    def location(self) -> str:
        """The file, or the URL without its password."""
        return str(self._sqlite_path) if self._sqlite_path else self.url.render_as_string(hide_password=True)

    @property
    def _listing(self) -> str:
        """The command that lists this store's runs."""
        return "labkit runs" if self._knob == "LABKIT_HOME" else f"labkit runs --store {plain(self.location, 200)}"

    def close(self) -> None:
        """Give back all connections; the store can still be used afterwards."""
        self._engine.dispose()

    def begin(self, record: RunRecord) -> RunWriter:
        """Enter `record` as running and return the writer that adds rows and finishes it.

        Raises:
            StoreError: a run of that id is there already, or the store cannot be written.
        """
        self._insert(dataclasses.replace(record, status="running"))
        return RunWriter(self, record.run_id)

    def save(self, record: RunRecord) -> None:
        """Enter a run that has already ended, all of it or nothing; one that this process has begun here is ended.

        Raises:
            StoreError: another run of that id is there already, or the store cannot be written.
        """
        if self._has_begun(record.run_id):
            RunWriter(self, record.run_id).finish(record)
        else:
            self._insert(record)

    def _has_begun(self, run_id: str) -> bool:
        with self._reading("save a run") as connection:
            row = connection.execute(sa.select(runs).where(runs.c.run_id == run_id)).first()
        return row is not None and row.status == "running" and _writer_of(row) == WriterIdentity.of_this_process()

    def _insert(self, record: RunRecord) -> None:
        writer = WriterIdentity.of_this_process()
        with self._writing("save a run") as connection:
            known = connection.execute(sa.select(runs.c.run_id).where(runs.c.run_id == record.run_id)).first()
            if known:
                raise StoreError(f"run {plain(record.run_id, 80)} is in the store already", works="another run id")
            connection.execute(
                runs.insert().values(
                    run_id=record.run_id,
                    created=record.created,
                    **_columns(record),
                    locked=False,
                    writer_host=writer.host,
                    writer_pid=writer.pid,
                    writer_started=writer.started,
                    updated_at=time.time(),
                )
            )
            _add_batch(connection, record.run_id, 0, record.requests, record.steps, record.block_map)

    def get(self, run_id: str) -> RunRecord:
        """The whole run.

        Raises:
            StoreError: there is no such run, or what is stored of it is damaged.
        """
        with self._reading("read a run") as connection:
            row = connection.execute(sa.select(runs).where(runs.c.run_id == run_id)).first()
            if row is None:
                raise self._no_run(run_id)
            batches = connection.execute(
                sa.select(run_rows.c.kind, run_rows.c.payload)
                .where(run_rows.c.run_id == run_id)
                .order_by(run_rows.c.kind, run_rows.c.batch)
            ).all()
        record = self._stored(row).record
        with self._naming_the_damage(run_id):
            return dataclasses.replace(record, **_rows_of(batches))

    def get_readable(self, run_ids: Iterable[str], on_damage: Callable[[str], None]) -> Iterator[RunRecord]:
        """The whole runs of these ids; what is damaged is left out and told as a sentence.

        Raises:
            StoreError: there is no such run, or the store cannot be read.
        """
        for run_id in run_ids:
            try:
                yield self.get(run_id)
            except StoreError as error:
                if not isinstance(error.__cause__, FileFormatError):
                    raise
                on_damage(str(error))

    def list_runs(self, *, trashed: bool = False) -> tuple[StoredRun, ...]:
        """All runs that can be read, newest first; with `trashed` those that were deleted and can be restored.

        A run of another version of labkit, or a damaged one, does not hide the others: `unreadable` names it.
        """
        return tuple(found for found in self._listed(trashed) if isinstance(found, StoredRun))

    def unreadable(self) -> tuple[str, ...]:
        """A sentence for each run that `list_runs` leaves out, the newest first."""
        return tuple(str(found) for found in self._listed(trashed=False) if isinstance(found, StoreError))

    def _listed(self, trashed: bool) -> Iterator[StoredRun | StoreError]:
        # Runs of one second are told apart by when they were last written to.
        query = sa.select(runs).order_by(runs.c.created.desc(), runs.c.updated_at.desc(), runs.c.run_id)
        query = query.where(runs.c.trashed_at.is_not(None) if trashed else runs.c.trashed_at.is_(None))
        with self._reading("list the runs") as connection:
            rows = connection.execute(query).all()
        for row in rows:
            try:
                yield self._stored(row)
            except StoreError as error:
                yield error

    def _stored(self, row: Any) -> StoredRun:
        status = _status_of(row)
        with self._naming_the_damage(row.run_id):
            record = _record_of_head(row.head)
        record = dataclasses.replace(record, status=status, name=row.name, note=row.note)
        trashed = row.trashed_at is not None
        return StoredRun(row.run_id, row.name, row.created, status, row.note, bool(row.locked), trashed, record)

    def rename(self, run_id: str, name: str) -> None:
        """Give the run another name."""
        self._update(run_id, "rename a run", name=name)

    def set_note(self, run_id: str, note: str) -> None:
        """Write a note to the run."""
        self._update(run_id, "note a run", note=note)

    def lock(self, run_id: str, locked: bool = True) -> None:
        """Protect the run from deletion, or with False lift that."""
        self._update(run_id, "lock a run", locked=locked)

    def delete(self, run_id: str) -> None:
        """Move the run to the trash, from which `restore` takes it back.

        Raises:
            StoreError: the run is locked, is still being written, or is not there.
        """
        with self._writing("delete a run") as connection:
            row = self._row(connection, run_id)
            if row.locked:
                raise StoreError(f"run {plain(row.name, 80)!r} is locked", works="unlock it first", knob="lock")
            if _status_of(row) == "running":
                raise StoreError(f"run {plain(row.name, 80)!r} is still running", works="cancel it first")
            connection.execute(runs.update().where(runs.c.run_id == run_id).values(trashed_at=time.time()))

    def restore(self, run_id: str) -> None:
        """Take a run back from the trash."""
        self._update(run_id, "restore a run", trashed_at=None)

    def num_trashed(self) -> int:
        """How many runs `empty_trash` would remove, those that cannot be read included."""
        with self._reading("list the trash") as connection:
            return len(connection.execute(_IN_TRASH).all())

    def empty_trash(self) -> int:
        """Remove what is in the trash for good; returns how many runs that were."""
        with self._writing("empty the trash") as connection:
            names = [row.run_id for row in connection.execute(_IN_TRASH)]
            connection.execute(run_rows.delete().where(run_rows.c.run_id.in_(names)))
            connection.execute(runs.delete().where(runs.c.run_id.in_(names)))
        return len(names)

    def check(self) -> tuple[str, ...]:
        """What is wrong with the store, one sentence each; empty when all of it can be read."""
        problems: list[str] = []
        if self._sqlite_path:
            with self._reading("check the store") as connection:
                found = connection.exec_driver_sql("PRAGMA integrity_check").scalars().all()
            problems += [plain(line, 200) for line in found if line != "ok"]
        with self._reading("check the store") as connection:
            names = connection.execute(sa.select(runs.c.run_id)).scalars().all()
        for run_id in names:
            try:
                self.get(run_id)
            except StoreError as error:
                problems.append(str(error))
        return tuple(problems)

    def _update(self, run_id: str, doing: str, **values: Any) -> None:
        with self._writing(doing) as connection:
            self._row(connection, run_id)
            connection.execute(runs.update().where(runs.c.run_id == run_id).values(**values))

    def _row(self, connection: sa.Connection, run_id: str) -> Any:
        row = connection.execute(sa.select(runs).where(runs.c.run_id == run_id)).first()
        if row is None:
            raise self._no_run(run_id)
        return row

    def _no_run(self, run_id: str) -> StoreError:
        return StoreError(f"the store has no run {plain(run_id, 80)!r}", works=f"an id from `{self._listing}`")

    def _find_sqlite_path(self) -> Path | None:
        if self.url.get_backend_name() != "sqlite" or not self.url.database or self.url.database == ":memory:":
            return None
        return Path(self.url.database)

    def _prepare(self) -> None:
        path = self._sqlite_path
        if path:
            kind = network_file_system(path)
            if kind:
                text = f"{path} is on {plain(kind, 20)}: its locks are not reliable; write from one machine at a time"
                self.warnings = (text,)
                warnings.warn(text, stacklevel=3)
            if inspect_sqlite(path, self._knob) is not None:
                return
            if self._must_exist:
                raise no_store(path)
            path.parent.mkdir(parents=True, exist_ok=True)
        elif self._must_exist and not sa.inspect(self._engine).has_table(meta.name):
            raise StoreError(
                f"there is no store in {self.location}", works="labkit run --store makes one", knob=self._knob
            )
        with self._writing("make the store") as connection:
            metadata.create_all(connection)
            found = connection.execute(sa.select(meta.c.value).where(meta.c.key == "schema_version")).scalar()
            if found is None:
                connection.execute(meta.insert().values(key="schema_version", value=str(SCHEMA_VERSION)))
            else:
                check_version(found, self.location, self._knob)

    @contextlib.contextmanager
    def _reading(self, doing: str) -> Iterator[sa.Connection]:
        with self._errors(doing), self._engine.connect() as connection, connection.begin():
            yield connection

    @contextlib.contextmanager
    def _writing(self, doing: str) -> Iterator[sa.Connection]:
        with self._errors(doing), self._engine.connect() as connection:
            if self._sqlite_path:
                connection = connection.execution_options(labkit_write=True)
                _use_rollback_journal(connection)
            with connection.begin():
                yield connection

    @contextlib.contextmanager
    def _naming_the_damage(self, run_id: str) -> Iterator[None]:
        try:
            yield
        except FileFormatError as error:
            raise StoreError(
                f"run {plain(run_id, 80)} in {self.location} cannot be read and was left as it is: {error}",
                works="the other runs of the store",
            ) from error

    @contextlib.contextmanager
    def _errors(self, doing: str) -> Iterator[None]:
        try:
            yield
        except (sa.exc.DBAPIError, sqlite3.Error, OSError) as error:
            cause = getattr(error, "orig", None) or error
            raise self._explain(doing, cause) from error

    def _explain(self, doing: str, cause: BaseException) -> StoreError:
        text = plain(cause, 200)
        where = f"cannot {doing} in {self.location}"
        if "malformed" in text or "not a database" in text:
            return StoreError(
                f"{self.location} is damaged and was left as it is: {text}",
                works="a copy of it from a backup, or another store",
                knob=self._knob,
            )
        if "locked" in text or "busy" in text:
            waited = f"{BUSY_TIMEOUT_MS / 1000:g} s"
            return StoreError(f"{where}: another process held its lock for {waited}", works="trying again")
        if "full" in text or "No space" in text:
            return StoreError(
                f"{where}: the disk is full", works="freeing space, then trying again; or another disk", knob=self._knob
            )
        if "readonly" in text or "read-only" in text or "unable to open" in text or isinstance(cause, OSError):
            return StoreError(f"{where}: {text}", works="a folder that you may write to", knob=self._knob)
        return StoreError(f"{where}: {text}", works="trying again")


class RunWriter:
    """Adds rows to one running run and ends it; made by `RunStore.begin`.

    Rows that a busy or full store refuses stay here and go with the next batch.
    """

    def __init__(self, store: RunStore, run_id: str) -> None:
        self.run_id = run_id
        self._store = store
        self._next_batch = 1
        self._requests: list[RequestRow] = []
        self._steps: list[StepRow] = []

    def append(self, requests: Sequence[RequestRow] = (), steps: Sequence[StepRow] = ()) -> None:
        """Store rows; when this returns they survive a crash.

        Raises:
            StoreError: the store refused; the rows are kept and go with the next call.
        """
        self._requests.extend(requests)
        self._steps.extend(steps)
        with self._store._writing("save rows of a run") as connection:
            self._check_running(connection)
            connection.execute(runs.update().where(runs.c.run_id == self.run_id).values(updated_at=time.time()))
            # A commit that reported an error may still have happened: the same batch again must not count twice.
            mine = (run_rows.c.run_id == self.run_id, run_rows.c.batch == self._next_batch)
            connection.execute(run_rows.delete().where(*mine))
            _add_batch(connection, self.run_id, self._next_batch, self._requests, self._steps)
        self._next_batch += 1
        self._requests, self._steps = [], []

    def finish(self, record: RunRecord) -> None:
        """End the run with `record`, whose rows take the place of those added before.

        Raises:
            StoreError: the run has ended already, or the store refused; then nothing has changed.
        """
        if record.status not in FINAL:
            raise StoreError(f"a run cannot end as {plain(record.status, 40)!r}", works=", ".join(FINAL))
        columns = {**_columns(record), "updated_at": time.time()}
        with self._store._writing("finish a run") as connection:
            row = self._store._row(connection, self.run_id)
            if row.status == record.status and row.head == columns["head"]:
                return
            self._check_running(connection)
            for kept_by_user in ("name", "note"):
                columns.pop(kept_by_user)
            connection.execute(runs.update().where(runs.c.run_id == self.run_id).values(**columns))
            connection.execute(run_rows.delete().where(run_rows.c.run_id == self.run_id))
            _add_batch(connection, self.run_id, 0, record.requests, record.steps, record.block_map)

    def _check_running(self, connection: sa.Connection) -> None:
        row = self._store._row(connection, self.run_id)
        if row.status != "running":
            raise StoreError(f"run {plain(self.run_id, 80)} has already ended as {row.status}", works="a new run")


def _writer_of(row: Any) -> WriterIdentity:
    return WriterIdentity(row.writer_host, row.writer_pid, row.writer_started)


def _status_of(row: Any) -> RunStatus:
    """As stored, or "unfinished" where whoever wrote it is gone."""
    is_left = row.status == "running" and _writer_of(row).is_gone(time.time() - row.updated_at)
    return "unfinished" if is_left else row.status


def _use_rollback_journal(connection: sa.Connection) -> None:
    """TRUNCATE journal; set only by writers, since setting it can itself need the lock."""
    raw = connection.connection.dbapi_connection
    if raw is not None:
        raw.execute("PRAGMA journal_mode=TRUNCATE").close()


@functools.lru_cache(maxsize=1024)
def _record_of_head(head: str) -> RunRecord:
    """The record in a row's text; a panel lists the same rows again and again."""
    return record_from_plain(loads(head, "its head"), "its head")


def _columns(record: RunRecord) -> dict[str, Any]:
    head = dataclasses.replace(record, requests=(), steps=(), block_map=())
    return {
        "name": record.name,
        "note": record.note,
        "status": record.status,
        "head": dumps(record_to_plain(head)),
    }


def _add_batch(
    connection: sa.Connection,
    run_id: str,
    batch: int,
    requests: Sequence[RequestRow],
    steps: Sequence[StepRow],
    block_map: Sequence[int] = (),
) -> None:
    parts = {"request": rows_to_plain(tuple(requests)), "step": rows_to_plain(tuple(steps)), "blocks": list(block_map)}
    for kind, rows in parts.items():
        if rows:
            connection.execute(run_rows.insert().values(run_id=run_id, kind=kind, batch=batch, payload=dumps(rows)))


def _rows_of(batches: Sequence[Any]) -> dict[str, Any]:
    """The fields of a record that stand in `run_rows`, from rows of (kind, payload) in the order of their batches."""
    requests: list[RequestRow] = []
    steps: list[StepRow] = []
    block_map: tuple[int, ...] = ()
    for kind, payload in batches:
        where = f"{kind} rows"
        data = loads(payload, where)
        if kind == "request":
            requests.extend(rows_from_plain(kind, data, where))
        elif kind == "step":
            steps.extend(rows_from_plain(kind, data, where))
        else:
            block_map = from_plain(tuple[int, ...], data, where)
    requests.sort(key=lambda entry: (entry.arrival_s, entry.request_id))
    return {"requests": tuple(requests), "steps": tuple(steps), "block_map": block_map}
