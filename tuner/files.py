"""Writing a whole file so that every failure is one clear line and nobody ever sees half of it."""

import errno
import fcntl
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rooftune.policies.errors import InputError, UnreachableError

FULL = (errno.ENOSPC, errno.EDQUOT)


def shown_path(path: str | Path) -> str:
    """A path for a message, escaped when it holds anything that does not print."""
    text = str(path)
    return text if text and text.isprintable() else repr(text)


def at_home(path: str | Path) -> Path:
    """The path with a leading ``~`` or ``~name`` as the home folder that it means. Raises InputError for none."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise InputError(f"{shown_path(path)} is in a home folder that is not known; write the whole path") from None


def write_whole(path: str | Path, data: bytes) -> None:
    """Write ``data`` to a temporary file beside the target and rename it over that: whole or not at all.

    Raises InputError when the target is a folder or a device, or cannot be written; a full disk: UnreachableError.
    """
    target = Path(path)
    where = shown_path(path)
    # By chance and not by the process's number, which another container's process may have as well.
    temporary = target.parent / f".rooftune.{secrets.token_hex(8)}.tmp"
    try:
        if not target.name or target.is_dir():
            raise InputError(f"{where} is a folder; name a file in it")
        if target.exists() and not target.is_file():
            # A rename would replace the device or pipe itself.
            raise InputError(f"{where} is not a regular file; name one to write")
        try:
            with open(temporary, "xb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temporary, target)
        finally:
            with suppress(FileNotFoundError):
                temporary.unlink()
    except OSError as error:
        reason = error.strerror or error
        if error.errno in FULL:
            raise UnreachableError(f"cannot write {where}: {reason}; free some space") from None
        raise InputError(f"cannot write {where}: {reason}; choose a folder that exists and is yours") from None
    except ValueError:  # a NUL inside the path
        raise InputError(f"{where} is not a valid path; check it") from None


@contextmanager
def locked(folder: Path, *, wait: bool) -> Iterator[None]:
    """Nobody else holds the folder meanwhile; a file system without locks lets everybody in.

    Raises OSError for no folder, and BlockingIOError where somebody else holds it and ``wait`` is False.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:
            pass
        yield
    finally:
        os.close(descriptor)
