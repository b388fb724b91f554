"""Bearer tokens read from a file: compared in constant time, replaced without a restart."""

import hmac
import stat
import threading
from pathlib import Path

from rooftune.engine.server_errors import ApiError
from rooftune.policies.errors import InputError
from starlette.requests import HTTPConnection

MIN_TOKEN_CHARS = 16
_MOST_BYTES = 65_536


class SecretFile:
    """One or more tokens, one a line, so that old and new both count while clients change over.

    The file is looked at for every request and read again when it changed. When it is gone or unusable later on,
    nobody gets in: a secret that was taken away must not live on. Raises InputError when it is unusable at the start.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._seen: tuple[int, int, int] | None = None
        self._tokens: tuple[bytes, ...] = ()
        self._refresh()

    def holds(self, given: str) -> bool:
        """Whether ``given`` is one of the tokens."""
        try:
            with self._lock:
                self._refresh()
                tokens = self._tokens
        except InputError:
            return False
        candidate = given.encode("latin-1", "replace")  # as the header came; nothing else is in a header
        same = [hmac.compare_digest(candidate, token) for token in tokens]  # all of them, whichever matches
        return any(same)

    def _refresh(self) -> None:
        try:
            found = self._path.stat()
            mark = (found.st_mtime_ns, found.st_size, found.st_ino)
            if mark == self._seen:
                return
            self._seen = None
            if not stat.S_ISREG(found.st_mode) or found.st_size > _MOST_BYTES:
                raise InputError(f"token file {str(self._path)!r} must be a file of at most {_MOST_BYTES} bytes")
            lines = self._path.read_bytes().split(b"\n")
        except OSError as error:
            self._seen = None
            raise InputError(f"token file {str(self._path)!r} cannot be read: {error.strerror}; correct it") from error
        tokens = tuple(line.strip() for line in lines if line.strip())
        if not tokens or min(len(token) for token in tokens) < MIN_TOKEN_CHARS:
            raise InputError(
                f"token file {str(self._path)!r} needs tokens of at least {MIN_TOKEN_CHARS} characters, one a line; "
                "make one with: openssl rand -hex 32"
            )
        self._tokens, self._seen = tokens, mark


def require(secret: SecretFile | None, connection: HTTPConnection) -> None:
    """Raises ApiError 401 unless the request carries ``Authorization: Bearer TOKEN``; no secret: anybody may."""
    if secret is None:
        return
    scheme, _, given = connection.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not secret.holds(given.strip()):
        raise ApiError(401, "a valid bearer token is needed in the header Authorization", code="invalid_api_key")
