"""A bearer token in a file, read again for every request: whoever replaces the file has rotated the token."""

from pathlib import Path

from rooftune.policies.errors import InputError

_MOST_BYTES = 65_536


def read_token(path: Path) -> str:
    """The first token of the file (an engine's own file may hold several, one a line, and takes any of them).

    Raises InputError naming the file, never its content, when there is none that can be sent.
    """
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise InputError(f"token file {str(path)!r} cannot be read: {error.strerror}; correct the path") from error
    lines = [line.strip() for line in content.split(b"\n") if line.strip()]
    if not lines or len(content) > _MOST_BYTES:
        raise InputError(f"token file {str(path)!r} must hold a token, one a line, within {_MOST_BYTES} bytes")
    token = lines[0].decode("latin-1")
    if not (token.isascii() and token.isprintable() and " " not in token):
        raise InputError(f"token file {str(path)!r} holds characters that no header takes; use letters and digits")
    return token
