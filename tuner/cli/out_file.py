"""The file that a command will write, checked before its long work."""

import os
from pathlib import Path

from rooftune.policies.errors import InputError
from rooftune.tuner.files import shown_path


def check_out_file(path: str, flag: str = "--out") -> None:
    """Raises InputError where no file could be written: an hour of measuring must not end at a wrong path."""
    folder = Path(path).parent
    try:
        Path(path).lstat()  # tells of a name that is too long, a file as folder, a folder that lets nobody in
        there = Path(path).exists() and not os.path.isdir(path)
        reason = "it is not a regular file" if there and not Path(path).is_file() else ""
    except FileNotFoundError:
        reason = ""
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
    if reason or not path.strip() or os.path.isdir(path) or not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        why = f": {reason}" if reason else ""
        raise InputError(f"{flag} {shown_path(path)} cannot be written{why}; name a file in a folder that is yours")
