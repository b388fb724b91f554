"""One HTTP request with an end: bounded in bytes and in time, no redirect followed, no proxy, one kind of error.

On httpcore (what httpx is made of): a limit on the whole request must reach every read of the socket, because a server
that drips a byte a second keeps any limit per read, and httpx has only those. Each request has a connection of its own,
so that none is stale after an engine restart; only the name's resolution is bounded by the system alone.
"""

import ssl
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import httpcore

from rooftune.policies.errors import InputError, bad_value
from rooftune.tuner.address import Address, parse_address
from rooftune.tuner.clock import Clock, SystemClock
from rooftune.tuner.config.tokens import read_token
from rooftune.tuner.ports.base import PortError, PortFault


class Network(httpcore.NetworkBackend):
    """The system's sockets, none of which is waited for beyond the end of the request that ``begin`` began."""

    def __init__(self, clock: Clock) -> None:
        self._inner = httpcore.SyncBackend()
        self._clock = clock
        self._until_s = 0.0
        self.ended = False  # the other side closed the connection

    def begin(self, total_s: float) -> None:
        self._until_s = self._clock.now_s() + total_s
        self.ended = False

    def left_s(self, timeout: float | None) -> float:
        """Seconds to wait at most, never 0 (which would mean not to wait at all); at most 1 ms past the end."""
        left = self._until_s - self._clock.now_s()
        return max(left if timeout is None else min(left, timeout), 0.001)

    @property
    def over(self) -> bool:
        return self._clock.now_s() >= self._until_s

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.NetworkStream:
        wait_s = self.left_s(timeout)
        return _Stream(self._inner.connect_tcp(host, port, wait_s, local_address, socket_options), self)

    def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None
    ) -> httpcore.NetworkStream:
        return _Stream(self._inner.connect_unix_socket(path, self.left_s(timeout), socket_options), self)


class _Stream(httpcore.NetworkStream):
    """A connection that knows when the request must be over."""

    def __init__(self, inner: httpcore.NetworkStream, network: Network) -> None:
        self._inner, self._network = inner, network

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        if self._network.over:
            raise httpcore.ReadTimeout("the time for the whole request is over")
        content = self._inner.read(max_bytes, self._network.left_s(timeout))
        self._network.ended = not content
        return content

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        if self._network.over:
            raise httpcore.WriteTimeout("the time for the whole request is over")
        self._inner.write(buffer, self._network.left_s(timeout))

    def close(self) -> None:
        self._inner.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        return _Stream(
            self._inner.start_tls(ssl_context, server_hostname, self._network.left_s(timeout)), self._network
        )

    def get_extra_info(self, info: str) -> object:
        return self._inner.get_extra_info(info)


_AGENT = "rooftune"


@dataclass(frozen=True)
class Timeouts:
    """connect_s: until the connection stands, TLS included. total_s: from the call to the last byte of the answer."""

    connect_s: float = 2.0
    total_s: float = 10.0

    def __post_init__(self) -> None:
        for what, value in (("connect_s", self.connect_s), ("total_s", self.total_s)):
            if not 0.0 < value <= 3600.0:
                raise bad_value(f"timeout {what}", value, "above 0 and at most 3600", "give seconds")


@dataclass(frozen=True)
class Reply:
    """status: 100..999. body: at most the limit asked for. location: where a redirect points, else empty."""

    status: int
    body: bytes
    location: str = ""


class Fetcher:
    """Requests to one address. what: its kind, for messages.

    Raises InputError when address, token file or CA file cannot be used.
    """

    def __init__(
        self,
        base_url: str,
        token_file: Path | None = None,
        timeouts: Timeouts | None = None,
        *,
        ca_file: Path | None = None,
        clock: Clock | None = None,
        what: str = "engine",
    ) -> None:
        self._what = what
        self.where: Address = parse_address(base_url, f"{what} address", engine=what == "engine")
        self._token_file = token_file
        if token_file is not None:
            read_token(token_file)
        self._timeouts = timeouts or Timeouts()
        self._network = Network(clock or SystemClock())
        self._pool = httpcore.ConnectionPool(
            ssl_context=_ssl_context(ca_file) if self.where.encrypted else None,
            max_keepalive_connections=0,
            uds=self.where.socket or None,
            network_backend=self._network,
        )

    def ask(self, method: str, path: str, body: bytes | None = None, *, limit_bytes: int) -> Reply:
        """The answer, whatever its status. Raises PortError when there is none within limits."""
        headers = [("Accept", "application/json"), ("User-Agent", _AGENT), ("Accept-Encoding", "identity")]
        if body is not None:
            headers.append(("Content-Type", "application/json"))
        headers.extend(self._authorization())
        self._network.begin(self._timeouts.total_s)
        each = {"connect": self._timeouts.connect_s, "read": None, "write": None, "pool": self._timeouts.total_s}
        try:
            with self._pool.stream(
                method, self.where.base + path, headers=headers, content=body, extensions={"timeout": each}
            ) as response:
                content = self._bounded(response.iter_stream(), limit_bytes)
                return Reply(response.status, content, _location(response.headers))
        except (httpcore.TimeoutException, httpcore.NetworkError, httpcore.ProtocolError) as error:
            raise self._fault(error) from error

    def close(self) -> None:
        self._pool.close()

    def fail(self, fault: PortFault, what: str) -> PortError:
        """The error for this address. what: value, bound and remedy."""
        return PortError(fault, f"{self._what} {self.where}: {what}")

    def _authorization(self) -> list[tuple[str, str]]:
        if self._token_file is None:
            return []
        try:
            return [("Authorization", f"Bearer {read_token(self._token_file)}")]
        except InputError as error:
            raise PortError(PortFault.UNAUTHORIZED, str(error)) from error

    def _bounded(self, parts: Iterable[bytes], limit_bytes: int) -> bytes:
        kept: list[bytes] = []
        size = 0
        for part in parts:
            size += len(part)
            if size > limit_bytes:
                raise self.fail(
                    PortFault.GARBAGE, f"the answer is longer than {limit_bytes} bytes; is the address right?"
                )
            kept.append(part)
        return b"".join(kept)

    def _fault(self, error: Exception) -> PortError:
        said = " ".join(str(error).split())[:200] or type(error).__name__
        if isinstance(error, httpcore.ConnectTimeout | httpcore.ConnectError):
            limit = f" within {self._timeouts.connect_s:g} s" if isinstance(error, httpcore.ConnectTimeout) else ""
            return self.fail(PortFault.UNREACHABLE, f"no connection{limit} ({said}); is it running, is the port right?")
        if isinstance(error, httpcore.TimeoutException):
            return self.fail(PortFault.TIMEOUT, f"timed out after {self._timeouts.total_s:g} s")
        if isinstance(error, httpcore.NetworkError) or self._network.ended:
            return self.fail(PortFault.UNREACHABLE, f"the connection broke ({said}); is it being restarted?")
        return self.fail(PortFault.GARBAGE, f"the answer is not HTTP ({said}); is the port right, http or https?")


def _ssl_context(ca_file: Path | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=str(ca_file) if ca_file else None)
    except OSError as error:  # ssl.SSLError is one
        raise InputError(f"CA file {str(ca_file)!r} cannot be used: {error}; give certificates in PEM form") from error


def _location(headers: Iterable[tuple[bytes, bytes]]) -> str:
    found = [value for name, value in headers if name.lower() == b"location"]
    return found[0].decode("latin-1")[:200] if found else ""
