"""Bearer tokens in files: one to send to an engine, or several that the controller's own pages take.

A file is read again for every use, so that replacing it rotates the token without a restart. Messages name the file,
never its content.
"""

import hmac
from pathlib import Path

from rooftune.policies.errors import InputError
from rooftune.tuner.files import read_small

MIN_TOKEN_CHARS = 16
MAX_TOKEN_FILE_BYTES = 65_536


def read_token(path: Path) -> str:
    """The first token of the file (an engine's own file may hold several, one a line, and takes any of them).

    Raises InputError when there is none that can be sent.
    """
    lines = _lines(path)
    if not lines:
        raise InputError(f"token file {str(path)!r} is empty; it must hold a token, one a line")
    token = lines[0].decode("latin-1")
    if not (token.isascii() and token.isprintable() and " " not in token):
        raise InputError(f"token file {str(path)!r} holds characters that no header takes; use letters and digits")
    return token


def _lines(path: Path) -> list[bytes]:
    """The lines that are not empty. Raises InputError when the file cannot be read or is too large."""
    content = read_small(path, f"token file {str(path)!r}", MAX_TOKEN_FILE_BYTES)
    return [line.strip() for line in content.split(b"\n") if line.strip()]


def read_tokens(path: Path) -> tuple[bytes, ...]:
    """One or more tokens of at least 16 characters, one a line, so that old and new both count during a change.

    Raises InputError when the file is unusable.
    """
    if path.exists() and not path.is_file():  # a pipe would hold every request
        raise InputError(f"token file {str(path)!r} is no regular file; correct the path")
    tokens = tuple(_lines(path))
    if not tokens or min(map(len, tokens)) < MIN_TOKEN_CHARS:
        raise InputError(
            f"token file {str(path)!r} needs tokens of at least {MIN_TOKEN_CHARS} characters, one a line; "
            "make one with: openssl rand -hex 32"
        )
    return tokens


def holds_token(path: Path, given: str) -> bool:
    """Whether ``given`` is one of the file's tokens, compared in constant time; False while the file is unusable."""
    try:
        tokens = read_tokens(path)
    except InputError:
        return False
    candidate = given.encode("utf-8", "surrogateescape")
    same = [hmac.compare_digest(candidate, token) for token in tokens]  # all of them, whichever matches
    return any(same)
