"""Tables of the run store and how a database is opened, checked and, when it is new, made."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import Any

import psutil
import sqlalchemy as sa

from labkit.errors import StoreError
from labkit.text import plain

SCHEMA_VERSION = 1
STORE_NAME = "runs.sqlite3"
STORE_SUFFIXES = (".sqlite3", ".sqlite", ".db")
MAX_STORES_SHOWN = 5
BUSY_TIMEOUT_MS = 5000
NETWORK_FILE_SYSTEMS = ("nfs", "cifs", "smb", "fuse", "9p", "lustre", "ceph", "gluster", "afs")

metadata = sa.MetaData()

meta = sa.Table(
    "labkit_meta",
    metadata,
    sa.Column("key", sa.String(64), primary_key=True),
    sa.Column("value", sa.Text, nullable=False),
)

runs = sa.Table(
    "runs",
    metadata,
    sa.Column("run_id", sa.String(200), primary_key=True),
    sa.Column("created", sa.String(64), nullable=False, index=True),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("note", sa.Text, nullable=False, default=""),
    sa.Column("status", sa.String(16), nullable=False),
    sa.Column("locked", sa.Boolean, nullable=False, default=False),
    sa.Column("trashed_at", sa.Float, nullable=True),
    sa.Column("head", sa.Text, nullable=False),
    sa.Column("writer_host", sa.Text, nullable=False),
    sa.Column("writer_pid", sa.Integer, nullable=False),
    sa.Column("writer_started", sa.Float, nullable=False),
    sa.Column("updated_at", sa.Float, nullable=False),
)

run_rows = sa.Table(
    "run_rows",
    metadata,
    sa.Column("run_id", sa.String(200), sa.ForeignKey("runs.run_id", ondelete="CASCADE"), primary_key=True),
    sa.Column("kind", sa.String(16), primary_key=True),
    sa.Column("batch", sa.Integer, primary_key=True),
    sa.Column("payload", sa.Text, nullable=False),
)


def store_url(url: str | os.PathLike[str] | None) -> sa.URL:
    """The SQLAlchemy URL of a store: a URL as it is, a path as SQLite, None as the user's own store.

    The user's store is `runs.sqlite3` in the folder that `LABKIT_HOME` names, or else in the user's data folder.

    Raises:
        StoreError: text that looks like a URL and is none, or a folder.
    """
    if url is None:
        return sa.URL.create("sqlite", database=str(own_store_path()))
    text = os.fspath(url)
    if "://" not in text:
        path = Path(text).expanduser()
        if path.is_dir():
            works = f"a file in it: {plain(path / STORE_NAME)}"
            raise StoreError(f"{plain(path)} is a folder", works=works, knob="store")
        return sa.URL.create("sqlite", database=str(path))
    try:
        return sa.make_url(text)
    except sa.exc.ArgumentError as error:
        raise StoreError(
            f"{plain(text, 80)!r} is not a database URL", works="sqlite:////path/runs.sqlite3 or postgresql://…"
        ) from error


def own_store_path() -> Path:
    """The user's own store, whether it is there or not."""
    return data_folder() / STORE_NAME


def data_folder() -> Path:
    """Where labkit keeps the user's runs."""
    import platformdirs

    home = os.environ.get("LABKIT_HOME")
    return Path(home).expanduser() if home else Path(platformdirs.user_data_dir("labkit", appauthor=False))


def make_engine(url: sa.URL) -> sa.Engine:
    """An engine whose SQLite connections are opened for each use and closed after it.

    A closed connection cannot be carried over a fork, be shared between Jupyter's threads, or hold a lock.
    SQLite runs with a rollback journal (its WAL mode loses pages before 3.51.3 and needs one host's shared memory),
    full synchronisation, no memory map, and explicit transactions.

    Raises:
        StoreError: the driver of the URL is not installed.
    """
    try:
        if url.get_backend_name() != "sqlite":
            return sa.create_engine(url, pool_pre_ping=True)
        # A database in memory lives as long as its one connection, which threads then take turns on.
        in_memory = not url.database or url.database == ":memory:"
        pool: dict[str, Any] = (
            {"poolclass": sa.QueuePool, "pool_size": 1, "max_overflow": 0} if in_memory else {"poolclass": sa.NullPool}
        )
        engine = sa.create_engine(
            url, **pool, connect_args={"timeout": BUSY_TIMEOUT_MS / 1000, "check_same_thread": False}
        )
    except (ImportError, sa.exc.ArgumentError) as error:
        raise StoreError(
            f"cannot use {url.drivername} databases: {plain(error, 200)}", works="pip install its driver"
        ) from error
    sa.event.listen(engine, "connect", _on_connect)
    sa.event.listen(engine, "begin", _on_begin)
    return engine


def _on_connect(connection: Any, _record: Any) -> None:
    connection.isolation_level = None
    for pragma in ("foreign_keys=ON", "synchronous=FULL", f"busy_timeout={BUSY_TIMEOUT_MS}", "mmap_size=0"):
        connection.execute(f"PRAGMA {pragma}").close()


def _on_begin(connection: sa.Connection) -> None:
    writes = connection.get_execution_options().get("labkit_write", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def inspect_sqlite(path: Path, knob: str) -> int | None:
    """Schema version of the SQLite file at `path`, None where there is nothing yet; the file is not edited.

    Raises:
        StoreError: it is damaged, is another program's database, or its schema is newer than this labkit.
    """
    if not path.exists() or path.stat().st_size == 0:
        return None
    connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_MS / 1000, isolation_level=None)
    try:
        tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type='table'")}
        if not tables:
            return None
        if "labkit_meta" not in tables:
            raise StoreError(
                f"{path} is another program's database; it was left as it is", works="another file", knob=knob
            )
        rows = connection.execute("SELECT value FROM labkit_meta WHERE key='schema_version'").fetchall()
    finally:
        connection.close()
    return check_version(rows[0][0] if rows else None, str(path), knob)


def no_store(path: Path) -> StoreError:
    """That no store is at `path`, and what is there instead: other files of that kind, or not even the folder."""
    folder = path.absolute().parent
    if not folder.is_dir():
        there = f"the folder {plain(folder, 200)} does not exist"
    else:
        names = sorted(entry.name for entry in folder.iterdir() if entry.suffix in STORE_SUFFIXES and entry != path)
        shown = ", ".join(plain(name, 60) for name in names[:MAX_STORES_SHOWN])
        more = f" and {len(names) - MAX_STORES_SHOWN} more" if len(names) > MAX_STORES_SHOWN else ""
        there = f"in that folder: {shown}{more}" if names else "no database is in that folder"
    made = "labkit run and labkit tune make it" if path == own_store_path() else "--store with another path"
    return StoreError(f"there is no store {plain(path, 200)}; {there}", works=made, knob="store")


def check_version(value: str | None, where: str, knob: str) -> int:
    """The schema version `value` as a number.

    Raises:
        StoreError: it is missing, no number, or newer than this labkit.
    """
    try:
        version = int(value or "")
    except ValueError:
        raise StoreError(
            f"{where} does not say its schema version; it was left as it is", works="another file", knob=knob
        ) from None
    if version > SCHEMA_VERSION:
        raise StoreError(
            f"{where} was written by a newer labkit; it was left as it is",
            needed=f"schema {version}",
            available=f"schema {SCHEMA_VERSION}",
            works="a newer labkit, or another store",
            knob=knob,
        )
    return version


def network_file_system(path: Path) -> str | None:
    """Type of the file system at `path` where it is shared over a network, else None."""
    path = path.absolute()
    best = ("", "")
    try:
        partitions = psutil.disk_partitions(all=True)
    except (OSError, PermissionError):
        return None
    for entry in partitions:
        if path.is_relative_to(entry.mountpoint) and len(entry.mountpoint) >= len(best[0]):
            best = (entry.mountpoint, entry.fstype)
    return best[1] if best[1].lower().startswith(NETWORK_FILE_SYSTEMS) else None
