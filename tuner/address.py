"""Where an engine or a controller is: one written form of its base address, and what it may not contain."""

from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from rooftune.policies.errors import bad_value

_ENDINGS = ("/tuning/v1", "/v1")
_LOOPBACK = ("localhost", "127.", "[::1]")
MAX_CHARS, MAX_SOCKET_CHARS = 1000, 100


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


def parse_address(text: str, what: str, *, engine: bool = True, sockets: bool = True) -> Address:
    """``http://host:8000``, with or without a slash at its end; ``unix:/path``.

    what: for messages, such as a flag. engine: /v1 or /tuning/v1 at the end, as ``serve`` prints them, is dropped.
    sockets: whether unix:/path is allowed. Raises InputError for anything else.
    """
    flaw = flaw_of(text, sockets=sockets)
    if flaw is not None:
        raise bad_value(what, *flaw)
    if text.startswith("unix:"):
        return Address("http://engine", _socket_path(text))
    parts = _split(text)
    base = f"{parts.scheme}://{parts.netloc}{parts.path}".rstrip("/")
    for ending in _ENDINGS if engine else ():
        base = base.removesuffix(ending)
    return Address(base.rstrip("/"))


def flaw_of(text: str, *, sockets: bool = True) -> tuple[str, str, str] | None:
    """What is wrong with an address: its text (never a password), the bound and the remedy. None for a good one."""
    seen = "an address with a user" if "@" in text else text[:200]
    remedy = "write http://HOST:PORT" + (", https://HOST:PORT or unix:/PATH/OF/SOCKET" if sockets else "")
    if sockets and text.startswith("unix:/"):
        path = _socket_path(text)
        fits = 1 < len(path) <= MAX_SOCKET_CHARS and path.isprintable()
        return None if fits else (seen, f"a Unix socket of at most {MAX_SOCKET_CHARS} characters", remedy)
    parts = _split(text)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
        return seen, "an http or https address with a host and a port within 1..65535", remedy
    if "@" in parts.netloc:
        return seen, "without user and password", "put a token into a file and name that"
    if parts.query or parts.fragment:
        return seen, "without a query and a fragment", remedy
    return None


def _socket_path(text: str) -> str:
    return "/" + text.removeprefix("unix:").lstrip("/")


def _split(text: str) -> SplitResult:
    """Empty parts for a text that no address can be."""
    plain = text.isascii() and text.isprintable() and " " not in text and len(text) <= MAX_CHARS
    try:
        parts = urlsplit(text if plain else "")
        _ = parts.port
        (parts.hostname or "").encode("idna")
    except ValueError:
        return urlsplit("")
    return parts
