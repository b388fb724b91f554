"""Bearer tokens of the controller's own pages: read from a file, replaced without a restart."""

import hmac
import stat
from pathlib import Path

from rooftune.policies.errors import InputError

MIN_TOKEN_CHARS = 16
MAX_TOKEN_FILE_BYTES = 65_536


class TokenFile:
    """One or more tokens of at least 16 characters, one a line, so that old and new both count during a change.

    The file is read for every question: when it is gone or unusable, nobody gets in.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def tokens(self) -> tuple[bytes, ...]:
        """All of them. Raises InputError when the file is unusable."""
        try:
            found = self.path.stat()
            if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_TOKEN_FILE_BYTES:
                raise InputError(
                    f"token file {str(self.path)!r} is {found.st_size} bytes or no file, "
                    f"must be a file of at most {MAX_TOKEN_FILE_BYTES} bytes; correct the path"
                )
            lines = self.path.read_bytes().split(b"\n")
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise InputError(f"token file {str(self.path)!r} cannot be read: {reason}; correct it") from None
        tokens = tuple(line.strip() for line in lines if line.strip())
        if not tokens or min(map(len, tokens)) < MIN_TOKEN_CHARS:
            raise InputError(
                f"token file {str(self.path)!r} needs tokens of at least {MIN_TOKEN_CHARS} characters, one a line; "
                "make one with: openssl rand -hex 32"
            )
        return tokens

    def holds(self, given: str) -> bool:
        """Whether ``given`` is one of them; compared in constant time."""
        try:
            tokens = self.tokens()
        except InputError:
            return False
        candidate = given.encode("utf-8", "surrogateescape")
        same = [hmac.compare_digest(candidate, token) for token in tokens]  # all of them, whichever matches
        return any(same)
