"""Writing a whole file so that a failure is one clear line and no reader sees half a file."""

import errno
import fcntl
import gzip
import io
import os
import secrets
import zlib
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
    """No other process holds the folder meanwhile; a file system without locks excludes none.

    Raises OSError for no folder, and BlockingIOError where another process holds it and ``wait`` is False.
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


MAX_FILE_BYTES = 512 * 1024 * 1024


def read_text(
    path: str | Path, wanted: str = "a CSV or JSONL file with at least one request", *, unpack: bool = False
) -> str:
    """The whole of a UTF-8 text file (a leading byte order mark is dropped). wanted: what to give instead of another.

    unpack: a gzip file is unpacked first. Raises InputError when the path cannot be read, is larger than
    MAX_FILE_BYTES, is empty, cut off, or not text.
    """
    where = shown_path(path)
    data = _read_bytes(path, unpack)
    if len(data) > MAX_FILE_BYTES:
        raise InputError(f"{where} is larger than {MAX_FILE_BYTES} bytes; cut a window out of it")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{where} is not UTF-8 text (byte {error.start}); give {wanted}") from None
    if "\0" in text:
        raise InputError(f"{where} is binary (NUL at character {text.index(chr(0))}); give {wanted}")
    if not text.strip():
        raise InputError(f"{where} is empty; give {wanted}")
    return text


def _read_bytes(path: str | Path, unpack: bool) -> bytes:
    where = shown_path(path)
    try:
        with open(path, "rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)  # once: it may be a pipe
        if unpack and data.startswith(b"\x1f\x8b"):
            data = gzip.GzipFile(fileobj=io.BytesIO(data)).read(MAX_FILE_BYTES + 1)
    except (EOFError, zlib.error) as error:
        raise InputError(f"cannot unpack {where}: {error}; the file may be cut off") from None
    except IsADirectoryError:
        raise InputError(f"{where} is a folder; name a file in it") from None
    except FileNotFoundError:
        raise InputError(f"{where} does not exist; check the path") from None
    except OSError as error:
        reason = error.strerror or error
        raise InputError(f"cannot read {where}: {reason}; check the path and its permissions") from None
    except ValueError:  # a NUL inside the path
        raise InputError(f"{where} is not a valid path; check it") from None
    return data


def read_small(path: str | Path, what: str, most_bytes: int, remedy: str = "check the path") -> bytes:
    """A file of at most ``most_bytes``. what: the file in a message. Raises InputError when it cannot be read."""
    try:
        with open(path, "rb") as stream:
            data = stream.read(most_bytes + 1)
    except (OSError, ValueError) as error:  # a NUL inside the path is a ValueError
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{what} cannot be read: {reason}; check the path") from None
    if len(data) > most_bytes:
        raise InputError(f"{what} is larger than {most_bytes} bytes; {remedy}")
    return data


def write_text(path: str | Path, text: str) -> None:
    """Write ``text`` as UTF-8, whole or not at all. Raises what ``write_whole`` raises."""
    try:
        data = text.encode("utf-8")
    except UnicodeEncodeError:
        raise InputError(f"cannot write {shown_path(path)}: a name in it is not valid text; rename it") from None
    write_whole(path, data)
