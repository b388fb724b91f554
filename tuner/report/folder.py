"""The folder of a report: checked before the long work, written whole or not at all."""

import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from rooftune.policies.errors import InputError, UnreachableError
from rooftune.tuner.files import FULL, locked, shown_path
from rooftune.tuner.record import RunRecord, json_text
from rooftune.tuner.report.render import html_page, markdown_page

REMEDY = "choose a folder that is yours"


def report_files(record: RunRecord) -> dict[str, str]:
    """Name and text of each file of the report; the page last, so that it never stands without the others."""
    return {
        "report.json": json_text(record, indent=1),
        "report.md": markdown_page(record),
        "index.html": html_page(record),
    }


def _refused(folder: Path, error: OSError) -> InputError | UnreachableError:
    if error.errno in FULL:
        return UnreachableError(f"--out {shown_path(folder)}: {error.strerror}; free some space")
    return InputError(f"--out {shown_path(folder)} cannot be written: {error.strerror or error}; {REMEDY}")


@contextmanager
def report_folder(folder: Path) -> Iterator[Path]:
    """A folder that is there and can be written; made when missing, and removed again when the work inside fails.

    Raises InputError (a full disk: UnreachableError) before anything else is done.
    """
    with ExitStack() as made:
        try:
            if "\0" in str(folder):
                raise InputError(f"--out {shown_path(folder)} is not a valid path; {REMEDY}")
            if folder.exists() and not folder.is_dir():
                raise InputError(f"--out {shown_path(folder)} is a file, must be a folder; {REMEDY}")
            for path in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
                path.mkdir()
                made.callback(_remove_empty, path)
            with tempfile.TemporaryFile(dir=folder):
                pass
            for name in ("report.json", "report.md", "index.html"):
                if (folder / name).is_dir():
                    raise InputError(f"--out {shown_path(folder / name)} is a folder, must be a file; {REMEDY}")
        except OSError as error:
            raise _refused(folder, error) from None
        yield folder
        made.pop_all()  # the work is done: they stay


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):  # another process put something there meanwhile
        folder.rmdir()


def write_report(record: RunRecord, folder: Path) -> tuple[Path, ...]:
    """Render everything, write all files under temporary names, then rename: never half a report, nor half of one and
    half of another that is written there at the same time.

    Raises InputError, a full disk: UnreachableError.
    """
    texts = report_files(record)
    with ExitStack() as leftovers:
        try:
            folder.mkdir(parents=True, exist_ok=True)  # another run that failed may have taken back what it had made
            waiting: list[tuple[Path, Path]] = []
            for name, text in texts.items():
                temporary = folder / f".rooftune.{secrets.token_hex(8)}.tmp"
                leftovers.callback(temporary.unlink, missing_ok=True)
                temporary.write_text(text, encoding="utf-8", newline="")
                waiting.append((temporary, folder / name))
            with locked(folder, wait=True):
                for temporary, target in waiting:
                    os.replace(temporary, target)
        except OSError as error:
            raise _refused(folder, error) from None
    return tuple(folder / name for name in texts)
