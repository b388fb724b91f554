"""The state file: its tables, how it is opened, and what happens to one that is damaged or of another release."""

import json
import secrets
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path

from rooftune.policies.errors import InputError, UnreachableError
from rooftune.tuner.clock import Clock


class StoreFault(StrEnum):
    """How the state file failed. None of these says anything about the engine."""

    LOCKED = "locked"  # another process holds it for too long
    FULL = "full"  # no space, or a limit on its size
    DAMAGED = "damaged"
    UNUSABLE = "unusable"  # permissions, a broken disk, closed


class StoreError(UnreachableError):
    """The state file failed: the new value was not written, the old one is still there."""

    def __init__(self, fault: StoreFault, message: str) -> None:
        super().__init__(message)
        self.fault = fault


_FAULTS = {
    sqlite3.SQLITE_BUSY: StoreFault.LOCKED,
    sqlite3.SQLITE_LOCKED: StoreFault.LOCKED,
    sqlite3.SQLITE_FULL: StoreFault.FULL,
    sqlite3.SQLITE_CORRUPT: StoreFault.DAMAGED,
    sqlite3.SQLITE_NOTADB: StoreFault.DAMAGED,
}
_REMEDIES = {
    StoreFault.LOCKED: "another process holds it; end that one",
    StoreFault.FULL: "free space on its disk",
    StoreFault.DAMAGED: "restart the controller: it moves the file aside and starts a new one",
    StoreFault.UNUSABLE: "check the folder, its permissions and its disk",
}


def fault_of(error: sqlite3.Error) -> StoreFault:
    """The kind of an sqlite error; extended codes count as their primary ones. A short write is a full disk."""
    code = getattr(error, "sqlite_errorcode", None)
    if code in (sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_FSYNC):
        return StoreFault.FULL
    return _FAULTS.get((code or 0) & 0xFF, StoreFault.UNUSABLE)


def store_error(error: sqlite3.Error, path: Path) -> StoreError:
    """One line with file, sqlite's message, and the remedy."""
    fault = fault_of(error)
    return StoreError(fault, f"state file {str(path)!r}: {error}; {_REMEDIES[fault]}")


@contextmanager
def store_errors(path: Path) -> Iterator[None]:
    """Every sqlite error inside becomes a StoreError."""
    try:
        yield
    except sqlite3.Error as error:
        raise store_error(error, path) from error


STATE_FILE = "state.db"
SCHEMA_VERSION = 1
APPLICATION_ID = 0x726F6F66  # "roof"
BUSY_S = 2.0
_SIDES = ("", "-wal", "-shm")

# fits: the release before writes it, and the records hold every fit; it stays so that either release opens the file.
_TABLES = """
CREATE TABLE cycles (
    number INTEGER PRIMARY KEY, at_s REAL NOT NULL, mode TEXT NOT NULL, action TEXT NOT NULL, reason TEXT NOT NULL,
    record BLOB NOT NULL
) STRICT;
CREATE TABLE fits (
    number INTEGER PRIMARY KEY, at_s REAL NOT NULL, knee_tokens REAL, knee_low_tokens REAL, knee_high_tokens REAL,
    steps INTEGER NOT NULL, spread REAL NOT NULL, coefficients TEXT NOT NULL
) STRICT;
CREATE TABLE pushes (
    number INTEGER PRIMARY KEY, noted_at_s REAL NOT NULL, changes TEXT NOT NULL, ended TEXT, predicted_gain REAL,
    verified_in INTEGER, verdict TEXT, verdict_reason TEXT, observed_gain REAL, half_width REAL, requests INTEGER,
    prediction_held INTEGER
) STRICT;
CREATE TABLE kept (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
"""


def connect(path: Path) -> sqlite3.Connection:
    """A connection to the state file, which is made when it is not there or empty.

    Raises StoreError, also for a damaged file; InputError for one of another release or of something else.
    """
    with store_errors(path):
        connection = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    try:
        with store_errors(path):
            _prepare(connection, path)
    except BaseException:
        connection.close()
        raise
    return connection


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    version, application = _pragma(connection, "user_version"), _pragma(connection, "application_id")
    tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if (version or tables) and application != APPLICATION_ID:
        raise InputError(f"state file {str(path)!r} is a database of something else; give --state another folder")
    if version not in (0, SCHEMA_VERSION):
        raise InputError(
            f"state file {str(path)!r} has schema version {version}, this release reads {SCHEMA_VERSION}; "
            "use the release that wrote it, or give --state another folder"
        )
    if not version:
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # only before the first table
        connection.execute("PRAGMA journal_mode = WAL")
        _make_tables(connection)
    # A push must be written down before it leaves, also when the machine loses power in between.
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA journal_size_limit = 4000000")


def _make_tables(connection: sqlite3.Connection) -> None:
    """All of them or none: two processes may come here at once, and each may be killed."""
    with transaction(connection):
        if _pragma(connection, "user_version"):
            return
        for statement in _TABLES.split(";"):
            if statement.strip():
                connection.execute(statement)
        set_value(connection, "instance", json.dumps(secrets.token_hex(4)))
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Whole or not at all."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):  # sqlite has rolled back by itself after a full disk
            connection.execute("ROLLBACK")
        raise


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    return int(connection.execute(f"PRAGMA {name}").fetchone()[0])


def is_sound(path: Path) -> bool:
    """False when the file is damaged. Raises StoreError when that cannot be checked now."""
    try:
        with closing(sqlite3.connect(path, timeout=BUSY_S)) as connection:
            return bool(connection.execute("PRAGMA quick_check(1)").fetchone()[0] == "ok")
    except sqlite3.Error as error:
        if fault_of(error) is StoreFault.DAMAGED:
            return False
        raise store_error(error, path) from error


def move_aside(path: Path, clock: Clock) -> Path:
    """Give a damaged file another name, with what belongs to it; returns the new name."""
    stamp = datetime.fromtimestamp(clock.wall_s(), UTC).strftime("%Y%m%dT%H%M%SZ")
    target = path.with_name(f"{path.name}.damaged-{stamp}")
    count = 1
    while target.exists():
        count += 1
        target = path.with_name(f"{path.name}.damaged-{stamp}-{count}")
    for side in reversed(_SIDES):  # the file itself last: killed in between, it is found damaged again
        source = path.with_name(path.name + side)
        if source.exists():
            source.rename(target.with_name(target.name + side))
    return target


def salvage(path: Path) -> dict[str, str] | None:
    """The small values of a damaged file, such as whether it was paused; None when they cannot be read."""
    try:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=BUSY_S)) as connection:
            rows = connection.execute("SELECT key, value FROM kept").fetchall()
    except sqlite3.Error:
        return None
    plain = all(isinstance(key, str) and isinstance(value, str) for key, value in rows)
    return dict(rows) if rows and plain else None


def set_value(connection: sqlite3.Connection, key: str, value: str) -> None:
    """Write a small value, over the one that is there; inside a transaction of the caller."""
    connection.execute("INSERT OR REPLACE INTO kept VALUES (?, ?)", (key, value))
