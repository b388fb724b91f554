"""Sockets with an end for the whole request: a server that drips a byte a second keeps any limit per read."""

import ssl
from collections.abc import Iterable

import httpcore

from rooftune.tuner.clock import Clock


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
