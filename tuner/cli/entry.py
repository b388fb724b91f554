"""Where the command begins: Ctrl-C is quiet from here on, also while Python still reads our modules.

It imports next to nothing itself, so that the time before it is Python's own.
"""

import os
import signal
from types import FrameType
from typing import NoReturn

_INTERRUPTED = 130


def main() -> int:
    """Run ``rooftune.tuner.cli.main.main``, which answers signals in its own way once it is there."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a background job's shell may have it ignored
        signal.signal(signal.SIGINT, _end)
    from rooftune.tuner.cli.main import main as run

    try:
        return run()
    except KeyboardInterrupt:  # one more, while the first was being answered
        return _INTERRUPTED


def _end(number: int, frame: FrameType | None) -> NoReturn:
    """At once: what is half imported may turn an exception into another, or lose it."""
    try:
        os.write(2, b"rooftune: interrupted\n")
    finally:
        os._exit(_INTERRUPTED)
