"""One controller per state folder: a lock on a file beside the state, which the kernel drops when its holder dies."""

import fcntl
import os
from pathlib import Path

from rooftune.policies.errors import InputError, RefusedError
from rooftune.tuner.clock import Clock

LOCK_FILE = "controller.lock"
_TRIES, _PAUSE_S = 5, 0.1  # a command that checks for a holder takes the lock for an instant


class FolderLock:
    """Held from ``take`` to ``release``, or to the end of the process, however that comes."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor

    @classmethod
    def take(cls, folder: Path, clock: Clock) -> "FolderLock":
        """Raises RefusedError that names the holder's pid, InputError when the folder cannot be used."""
        descriptor = _open(folder)
        for attempt in range(_TRIES):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if attempt < _TRIES - 1:
                    clock.sleep(_PAUSE_S)
            except OSError as error:
                os.close(descriptor)
                raise _unusable(folder, error) from None
        else:
            pid = _pid(descriptor)
            os.close(descriptor)
            raise RefusedError(
                f"state folder {str(folder)!r} is held by a controller (pid {pid or 'unknown'}); "
                "one controller per folder: end that one, or give this one another --state"
            )
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        except OSError:  # a full disk: the lock is held all the same, only its holder goes unnamed
            pass
        return cls(descriptor)

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def holder(folder: Path) -> str | None:
    """The pid, in digits, of the controller that holds the folder ("unknown" without one); None when none does."""
    try:
        descriptor = os.open(folder / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _pid(descriptor) or "unknown"
    except OSError:
        return None
    else:
        return None
    finally:
        os.close(descriptor)


def _open(folder: Path) -> int:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except (OSError, ValueError) as error:
        raise _unusable(folder, error) from None


def _unusable(folder: Path, error: Exception) -> InputError:
    reason = getattr(error, "strerror", None) or error
    return InputError(f"state folder {str(folder)!r} cannot be used: {reason}; give --state a folder of your own")


def _pid(descriptor: int) -> str | None:
    text = os.pread(descriptor, 32, 0).strip().decode("ascii", "replace")
    return text if text.isdecimal() else None
