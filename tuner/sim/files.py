"""Reading and writing whole text files so that every failure is one clear line."""

from pathlib import Path

from rooftune.policies.errors import InputError
from rooftune.tuner.files import shown_path, write_whole

MAX_FILE_BYTES = 512 * 1024 * 1024


def read_text(path: str | Path, wanted: str = "a CSV or JSONL file with at least one request") -> str:
    """The whole of a UTF-8 text file (a leading byte order mark is dropped). wanted: what to give instead of another.

    Raises InputError when the path cannot be read, is larger than MAX_FILE_BYTES, is empty, or is not text.
    """
    where = shown_path(path)
    try:
        with open(path, "rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
    except IsADirectoryError:
        raise InputError(f"{where} is a folder; name a file in it") from None
    except FileNotFoundError:
        raise InputError(f"{where} does not exist; check the path") from None
    except OSError as error:
        reason = error.strerror or error
        raise InputError(f"cannot read {where}: {reason}; check the path and its permissions") from None
    except ValueError:  # a NUL inside the path
        raise InputError(f"{where} is not a valid path; check it") from None
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


def write_text(path: str | Path, text: str) -> None:
    """Write ``text`` as UTF-8, whole or not at all. Raises what ``write_whole`` raises."""
    try:
        data = text.encode("utf-8")
    except UnicodeEncodeError:
        raise InputError(f"cannot write {shown_path(path)}: a name in it is not valid text; rename it") from None
    write_whole(path, data)
