"""Where an engine or a controller is: one written form of its base address, and what it may not contain."""

from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from rooftune.policies.errors import InputError, bad_value

_ENDINGS = ("/tuning/v1", "/v1")
_LOOPBACK = ("localhost", "127.", "[::1]")
_EXAMPLE = "write http://HOST:PORT, https://HOST:PORT or unix:/PATH/OF/SOCKET"


@dataclass(frozen=True)
class Address:
    """base: scheme, host and path without a slash at the end. socket: path of a Unix socket, empty for TCP."""

    base: str
    socket: str = ""

    @property
    def encrypted(self) -> bool:
        return self.base.startswith("https://")

    @property
    def local(self) -> bool:
        """Whether what is sent stays on this machine as far as the address tells."""
        return bool(self.socket) or self.base.partition("://")[2].startswith(_LOOPBACK)

    def __str__(self) -> str:
        return f"unix:{self.socket}" if self.socket else self.base


def parse_address(text: str, what: str = "engine") -> Address:
    """``http://host:8000``, also with a slash, /v1 or /tuning/v1 at its end as ``serve`` prints it; ``unix:/path``.

    what: whose address, for messages; only an engine's loses those endings. Raises InputError for anything else.
    """
    if text.startswith("unix:"):
        path = "/" + text.removeprefix("unix:").lstrip("/")
        if path == "/" or len(path) > 100 or not path.isprintable():
            raise bad_value(f"{what} address", text[:200], "a Unix socket of at most 100 characters", _EXAMPLE)
        return Address("http://engine", path)
    parts = _split(text, what)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise bad_value(f"{what} address", text[:200], "an http or https address with a host", _EXAMPLE)
    if parts.username or parts.password or parts.query or parts.fragment:
        raise bad_value(f"{what} address", _without_user(parts), "without user, query and fragment", _EXAMPLE)
    base = f"{parts.scheme}://{parts.netloc}{parts.path}".rstrip("/")
    for ending in _ENDINGS if what == "engine" else ():
        base = base.removesuffix(ending)
    return Address(base.rstrip("/"))


def _split(text: str, what: str) -> SplitResult:
    good = text.isascii() and text.isprintable() and " " not in text and len(text) <= 1000
    try:
        parts = urlsplit(text) if good else urlsplit("")
        _ = parts.port
        (parts.hostname or "").encode("idna")
    except ValueError as error:
        raise InputError(f"{what} address {text[:200]!r}: {error}; {_EXAMPLE}") from error
    return parts


def _without_user(parts: SplitResult) -> str:
    """Never show a password."""
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"[:200]
