"""What the state file can fail with, and how sqlite's complaints become one line."""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path

from rooftune.policies.errors import UnreachableError


class StoreFault(StrEnum):
    """How the state file failed. None of these says anything about the engine."""

    LOCKED = "locked"  # another process holds it for too long
    FULL = "full"  # no space, or a limit on its size
    DAMAGED = "damaged"
    UNUSABLE = "unusable"  # permissions, a broken disk, closed


class StoreError(UnreachableError):
    """The state file did not take part: what was to be written is not there, what was there before still is."""

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
    StoreFault.DAMAGED: "start the controller anew: it moves the file aside and begins another",
    StoreFault.UNUSABLE: "check the folder, its permissions and its disk",
}


def fault_of(error: sqlite3.Error) -> StoreFault:
    """The kind of a complaint; extended codes count as their primary ones. A short write is a full disk."""
    code = getattr(error, "sqlite_errorcode", None)
    if code in (sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_FSYNC):
        return StoreFault.FULL
    return _FAULTS.get((code or 0) & 0xFF, StoreFault.UNUSABLE)


def store_error(error: sqlite3.Error, path: Path) -> StoreError:
    """One line with file, what sqlite said, and the remedy."""
    fault = fault_of(error)
    return StoreError(fault, f"state file {str(path)!r}: {error}; {_REMEDIES[fault]}")


@contextmanager
def told(path: Path) -> Iterator[None]:
    """Whatever sqlite complains about inside is a StoreError."""
    try:
        yield
    except sqlite3.Error as error:
        raise store_error(error, path) from error
