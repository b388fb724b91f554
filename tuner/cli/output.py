"""Progress on standard error: one rewritten line on a terminal, a few lines elsewhere, nothing when quiet."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from rooftune.policies.errors import InputError
from rooftune.tuner.files import shown_path
from rooftune.tuner.sim import kernel
from rooftune.tuner.sim.compile import code_folder, holds_code, is_writable
from rooftune.tuner.sim.twin import warm

COMPILING = "compiling the twin (first run only, cached) ..."
COMPILING_AGAIN = "compiling the twin (every time: {} cannot be written; name a folder with ROOFTUNE_CACHE_DIR) ..."
_SPARSE_STEPS = 4


class Progress:
    """Call it with (stage, done, total). Lines on ``stream``; ``close`` ends a rewritten line."""

    def __init__(self, stream: TextIO, quiet: bool) -> None:
        self._stream = stream
        self._quiet = quiet
        self._rewrites = stream.isatty()
        self._width = 0
        self._shown: tuple[str, int] = ("", -1)

    def __call__(self, stage: str, done: int, total: int) -> None:
        if self._quiet:
            return
        text = f"{stage} {done:,}/{total:,}" if total > 1 else stage
        if self._rewrites:
            self._stream.write("\r" + text.ljust(self._width))
            self._stream.flush()
            self._width = len(text)
            return
        part = (stage, done * _SPARSE_STEPS // total if total > 1 else 0)
        if part != self._shown:
            self._shown = part
            self.say(text)

    def say(self, text: str) -> None:
        """A whole line, whatever kind of stream it is."""
        if self._quiet:
            return
        self.close()
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Wipe the rewritten line, so that what follows starts at the left."""
        if self._width:
            self._stream.write("\r" + " " * self._width + "\r")
            self._stream.flush()
            self._width = 0


@contextmanager
def progress_to_stderr(quiet: bool) -> Iterator[Progress]:
    """A ``Progress`` on standard error that always leaves a clean line behind."""
    progress = Progress(sys.stderr, quiet)
    try:
        yield progress
    finally:
        progress.close()


def twin_is_compiled() -> bool:
    """Whether machine code of exactly these sources lies in the cache."""
    return holds_code(code_folder(kernel.replay))


def warm_twin(progress: Progress) -> None:
    """Compile the twin, or load it, before the work that is timed and counted; says so when it compiles."""
    if not twin_is_compiled():
        folder = code_folder(kernel.replay)
        progress.say(COMPILING if is_writable(folder) else COMPILING_AGAIN.format(shown_path(folder.parent)))
    warm()


def check_out_file(path: str, flag: str = "--out") -> None:
    """Raises InputError where no file could be written: an hour of measuring must not end at a wrong path."""
    folder = Path(path).parent
    try:
        Path(path).lstat()  # finds a name that is too long, a file used as a folder, an unreadable folder
        there = Path(path).exists() and not os.path.isdir(path)
        reason = "it is not a regular file" if there and not Path(path).is_file() else ""
    except FileNotFoundError:
        reason = ""
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
    if reason or not path.strip() or os.path.isdir(path) or not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        why = f": {reason}" if reason else ""
        raise InputError(f"{flag} {shown_path(path)} cannot be written{why}; name a file in a folder that is yours")
