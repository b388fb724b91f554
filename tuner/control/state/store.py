"""The state of one controller: cycles, pushes with what was predicted and observed, and a few small values.

One SQLite file in WAL mode: a kill at any instant leaves it as it was before or after a write, and others read it
while the controller runs. Studies live in a file of their own beside it (docs/decisions/017-state.md).
"""

import json
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from rooftune.policies.errors import InputError
from rooftune.tuner.clock import Clock, SystemClock
from rooftune.tuner.config import RetentionSection
from rooftune.tuner.control.outcome import CycleRecord
from rooftune.tuner.control.state import operator
from rooftune.tuner.control.state.file import (
    STATE_FILE,
    StoreError,
    StoreFault,
    connect,
    is_sound,
    move_aside,
    salvage,
    set_value,
    store_errors,
    transaction,
)
from rooftune.tuner.control.state.lock import FolderLock, holder
from rooftune.tuner.control.state.rows import PUSH_COLUMNS, PushRow, insert_cycle, push_row, unpack

__all__ = ["PushRow", "StateFile", "StoreError", "StoreFault", "holder"]

STUDIES_FILE = "studies.db"
PRUNE_EVERY = 50  # cycles
PRUNE_ROWS = 200  # at most at once: a clock that jumps ahead for a while must not empty the history
ALWAYS_ROWS = 10  # the latest cycles, however old they seem
PUSHES_LONGER = 10
DAY_S = 86_400.0


class StateFile:
    """Implements ``Store`` of control/ports.py. Any thread may call it; every method may raise StoreError.

    notes: what an operator should know about the opening (a damaged file moved aside), one line each.
    """

    def __init__(
        self,
        path: Path,
        connection: sqlite3.Connection,
        clock: Clock,
        retention: RetentionSection,
        lock: FolderLock | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        self.path = path
        self.notes = tuple(notes)
        self._connection = connection
        self._clock = clock
        self._lock = lock
        self._retention = retention
        self._guard = threading.RLock()
        self._since_prune = 0

    # --- opening and closing -------------------------------------------------------------------

    @classmethod
    def own(cls, folder: Path, retention: RetentionSection | None = None, clock: Clock | None = None) -> "StateFile":
        """For the controller: locks the folder, moves a damaged file aside and begins another.

        A damaged file's small values go over into the new one. When they cannot be read, whether it was paused is not
        known, so the new one begins paused. Raises RefusedError when another controller holds the folder, InputError
        for a file of another release, StoreError when the disk fails.
        """
        clock, limits = clock or SystemClock(), retention or RetentionSection()
        lock = FolderLock.take(folder, clock)
        path = folder / STATE_FILE
        try:
            notes = _set_aside_studies(folder / STUDIES_FILE, limits.studies_bytes)
            connection, more = _open_or_begin(path, clock)
        except BaseException:
            lock.release()
            raise
        return cls(path, connection, clock, limits, lock, (*notes, *more))

    @classmethod
    def visit(cls, folder: Path, clock: Clock | None = None, *, create: bool = False) -> "StateFile":
        """For commands beside a controller: reads, and writes small values. create: make the file where there is none.

        Raises InputError when there is no state to visit, StoreError for a damaged file.
        """
        path = folder / STATE_FILE
        if not path.is_file():
            if not create:
                raise InputError(f"no state in {str(folder)!r}; give --state (or --config) of the controller")
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                raise InputError(f"state folder {str(folder)!r}: {error.strerror}; give --state another") from None
        connection = connect(path)
        return cls(path, connection, clock or SystemClock(), RetentionSection())

    def close(self) -> None:
        with self._guard:
            self._connection.close()
            if self._lock is not None:
                self._lock.release()

    def __enter__(self) -> "StateFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- Store -----------------------------------------------------------------------------------

    @cached_property
    def instance(self) -> str:
        return str(json.loads(self.value("instance") or '"unnamed"'))

    def next_number(self) -> int:
        with self._writing() as connection:
            latest = self.value("number")
            number = (int(latest) if latest is not None and latest.isdecimal() else self._greatest()) + 1
            set_value(connection, "number", str(number))
        return number

    def note_push(self, number: int, changes: str) -> None:
        with self._writing() as connection:
            connection.execute(
                "INSERT OR REPLACE INTO pushes (number, noted_at_s, changes) VALUES (?, ?, ?)",
                (number, self._clock.wall_s(), changes),
            )

    def put(self, record: CycleRecord) -> None:
        with self._writing() as connection:
            insert_cycle(connection, record)
        self._since_prune += 1
        if self._since_prune >= PRUNE_EVERY:
            with suppress(StoreError):  # the record is safe; room is made another time
                self.prune()

    def last(self, count: int, before: int | None = None) -> list[CycleRecord]:
        query = "SELECT number, record FROM cycles WHERE ? IS NULL OR number < ? ORDER BY number DESC LIMIT ?"
        return [unpack(number, blob) for number, blob in self._rows(query, before, before, max(count, 0))]

    def get(self, number: int) -> CycleRecord | None:
        rows = self._rows("SELECT record FROM cycles WHERE number = ?", number)
        return unpack(number, rows[0][0]) if rows else None

    def value(self, key: str) -> str | None:
        rows = self._rows("SELECT value FROM kept WHERE key = ?", key)
        return str(rows[0][0]) if rows else None

    def keep(self, key: str, value: str) -> None:
        self.change(key, lambda _: value)

    def change(self, key: str, make: Callable[[str | None], str]) -> None:
        with self._writing() as connection:
            set_value(connection, key, make(self.value(key)))

    # --- history ---------------------------------------------------------------------------------

    def pushes(self, count: int) -> list[PushRow]:
        """Pushes with what was predicted and observed, newest first."""
        query = f"SELECT {PUSH_COLUMNS} FROM pushes ORDER BY number DESC LIMIT ?"
        return [push_row(row) for row in self._rows(query, max(count, 0))]

    def unfinished(self) -> list[PushRow]:
        """Pushes that were noted, but whose cycle was never written down: the controller ended in between."""
        query = f"SELECT {PUSH_COLUMNS} FROM pushes WHERE ended IS NULL ORDER BY number DESC LIMIT 100"
        return [push_row(row) for row in self._rows(query)]

    # --- retention -------------------------------------------------------------------------------

    def prune(self) -> int:
        """Delete what is over the retention, at most ``PRUNE_ROWS`` cycles at once; returns how many cycles went."""
        self._since_prune = 0
        now_s, keep = self._clock.wall_s(), self._retention
        with self._writing() as connection:
            greatest = self._greatest()
            gone = connection.execute(
                "DELETE FROM cycles WHERE number IN (SELECT number FROM cycles WHERE number <= ? OR "
                "(at_s < ? AND number <= ?) ORDER BY number LIMIT ?)",
                (greatest - keep.rows, now_s - keep.days * DAY_S, greatest - ALWAYS_ROWS, PRUNE_ROWS),
            ).rowcount
            connection.execute(
                "DELETE FROM pushes WHERE number IN (SELECT number FROM pushes WHERE number <= ? OR noted_at_s < ? "
                "ORDER BY number LIMIT ?)",
                (greatest - keep.rows * PUSHES_LONGER, now_s - keep.days * PUSHES_LONGER * DAY_S, PRUNE_ROWS),
            )
        with self._reading() as connection:
            connection.execute("PRAGMA incremental_vacuum(256)").fetchall()
        return int(gone)

    # --- inside ----------------------------------------------------------------------------------

    def _greatest(self) -> int:
        query = (
            "SELECT max(coalesce((SELECT max(number) FROM cycles), 0), coalesce((SELECT max(number) FROM pushes), 0))"
        )
        return int(self._rows(query)[0][0])

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self._guard, store_errors(self.path):
            yield self._connection

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with self._guard, store_errors(self.path), transaction(self._connection):
            yield self._connection

    def _rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._reading() as connection:
            return connection.execute(query, values).fetchall()


def _open_or_begin(path: Path, clock: Clock) -> tuple[sqlite3.Connection, list[str]]:
    """The connection and what happened on the way."""
    if not path.is_file() or is_sound(path):
        return connect(path), []
    try:
        aside = move_aside(path, clock)
    except OSError as error:
        message = f"state file {str(path)!r} is damaged and cannot be moved aside: {error.strerror}; move it yourself"
        raise StoreError(StoreFault.DAMAGED, message) from None
    kept = salvage(aside)
    connection = connect(path)
    note = f"state file {str(path)!r} was damaged; it is now {str(aside)!r} and a new one begins"
    if kept is None:
        note += ", paused because the old file may have been; rooftune resume lifts it"
    else:
        note += "; pause, numbers and other small values went over"
    try:
        with store_errors(path), transaction(connection):
            for key, value in (kept or {operator.KEY: operator.paused_after_damage(clock.wall_s())}).items():
                set_value(connection, key, value)
    except BaseException:
        connection.close()
        raise
    return connection, [note]


def _set_aside_studies(path: Path, most_bytes: int) -> list[str]:
    """Studies only grow: start new ones once they are too large. What was learnt of pushes stays in the state."""
    try:
        size = path.stat().st_size
        if size <= most_bytes:
            return []
        for side in ("-wal", "-shm", "-journal", ""):
            path.with_name(path.name + side).unlink(missing_ok=True)
    except FileNotFoundError:
        return []
    except OSError as error:
        return [f"studies file {str(path)!r} cannot be replaced: {error.strerror}; delete it by hand"]
    return [f"studies file {str(path)!r} was {size} bytes, more than {most_bytes}; started a new one"]
