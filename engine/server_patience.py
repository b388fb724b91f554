"""A connection that never finishes the head of a request is cut off; uvicorn itself would wait for ever."""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 10.0


class ImpatientProtocol(H11Protocol):
    """uvicorn's protocol with a limit on the time between a connection, or a request's first byte, and its whole head.

    Bodies have a limit of their own (``Limits.body_s``), and idle connections uvicorn's keep-alive time.
    """

    head_s = HEAD_S
    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._late is not None:
            self._late.cancel()

    def _watch(self) -> None:
        """Start the time where a head is awaited and it does not run yet; stop it where one has come."""
        awaited = self.cycle is None or self.cycle.response_complete
        if awaited and self._late is None:
            self._late = self.loop.call_later(self.head_s, self.transport.abort)
        elif not awaited and self._late is not None:
            self._late.cancel()
            self._late = None
