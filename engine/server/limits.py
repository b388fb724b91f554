"""Bounds on what one client may send, and the reading of a body within them."""

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

from rooftune.policies.errors import bad_value


class ErrorPart(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """The body of a refusal, as OpenAI has it."""

    error: ErrorPart


class ApiError(Exception):
    """A refusal with its HTTP status. param: the field that is wrong; retry_after_s: when to retry."""

    def __init__(
        self, status: int, message: str, *, code: str, param: str | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """An ``Error`` as plain values."""
        kind = _KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        headers = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.status in _CLOSING or self.code == BODIES_FULL_CODE:
            headers["Connection"] = "close"
        return JSONResponse(self.body(), self.status, headers)


COME_AGAIN_S = 5  # for refusals without an estimate of the wait
TOO_LONG_CODE = "context_length_exceeded"
BODIES_FULL_CODE = "bodies_full"
_KINDS = {401: "authentication_error", 429: "rate_limit_error", 503: "service_unavailable"}
_CLOSING = (408, 413)  # the rest of the body has not been read


def bad_request(message: str, param: str | None = None) -> ApiError:
    """400 for a value that cannot be used."""
    return ApiError(400, message, code="invalid_value", param=param)


@dataclass(frozen=True, slots=True)
class Limits:
    """body_bytes: of one request. body_s: for the whole body to arrive. bodies_bytes: of all requests together that
    arrive or wait to be read, never less than some of the greatest. prompt_tokens: 0 = only the model's length.
    Raises InputError outside the bounds.
    """

    body_bytes: int = 8 * 1024 * 1024
    body_s: float = 30.0
    bodies_bytes: int = 256 * 1024 * 1024
    prompt_tokens: int = 0

    def __post_init__(self) -> None:
        if not 1024 <= self.body_bytes <= 1 << 30:
            raise bad_value("body limit", self.body_bytes, "within 1024..1073741824 bytes", "8388608 is usual")
        if not 0.0 < self.body_s <= 3600.0:
            raise bad_value("time for a body", self.body_s, "above 0 and at most 3600 s", "30 is usual")
        if self.prompt_tokens < 0:
            raise bad_value("prompt limit", self.prompt_tokens, "at least 0 tokens", "0 = the model's own length")


_LEAST_BODIES = 4  # of the greatest size that have room together


class BodyRoom:
    """Memory for bodies that are not parsed yet, of all clients together; only for the event loop's thread."""

    def __init__(self, limits: Limits) -> None:
        self._most_bytes = max(limits.bodies_bytes, _LEAST_BODIES * limits.body_bytes)
        self.held_bytes = 0

    @contextmanager
    def share(self) -> Iterator[Callable[[int], None]]:
        """Gives a function to call with the size of each part that has come; it raises ApiError 429 when there is no
        room for it. All of it is released at the end."""
        mine = 0

        def take(size: int) -> None:
            nonlocal mine
            if self.held_bytes + size > self._most_bytes:
                why = "too many bodies arrive at once; send the request again"
                raise ApiError(429, why, code=BODIES_FULL_CODE, retry_after_s=COME_AGAIN_S)
            self.held_bytes += size
            mine += size

        try:
            yield take
        finally:
            self.held_bytes -= mine


async def read_body(
    request: Request, limit_bytes: int, limit_s: float, take: Callable[[int], None] = lambda size: None
) -> bytes:
    """The body. Raises ApiError 413 above ``limit_bytes`` (as soon as that is known), 408 after ``limit_s``, 503 when
    the server ends meanwhile, and whatever ``take`` raises, which is called with the size of each part."""
    announced = request.headers.get("content-length", "0")
    if not (announced.isascii() and announced.isdecimal()):
        raise bad_request("Content-Length is not a number")
    if int(announced[:20]) > limit_bytes:
        raise _too_large(limit_bytes)
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(limit_s):
            async for part in request.stream():
                size += len(part)
                if size > limit_bytes:
                    raise _too_large(limit_bytes)
                take(len(part))
                parts.append(part)
    except TimeoutError:
        raise ApiError(408, f"the body took longer than {limit_s:g} s; send it faster", code="timeout") from None
    except asyncio.CancelledError:  # nothing but the end of the server does that
        raise ApiError(503, "the server is stopping; send the request to another one", code="stopping") from None
    except ClientDisconnect:
        raise ApiError(400, "the client left before its body was complete", code="incomplete_body") from None
    return b"".join(parts)


def _too_large(limit_bytes: int) -> ApiError:
    return ApiError(413, f"the body is above {limit_bytes} bytes; send less", code="body_too_large")


def parse_object(body: bytes) -> dict[str, Any]:
    """A JSON object. Raises ApiError 400, also for NaN, doubled fields and nesting without end."""
    try:
        value = json.loads(body, parse_constant=_no_constant, object_pairs_hook=_no_doubles)
    except (ValueError, RecursionError) as error:
        raise bad_request(f"the body is not valid JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise bad_request("the body must be a JSON object")
    return value


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _no_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a field is named twice")
    return found


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
        """Start the timer while waiting for a head, unless it runs already; stop it when a head has come."""
        awaited = self.cycle is None or self.cycle.response_complete
        if awaited and self._late is None:
            self._late = self.loop.call_later(self.head_s, self.transport.abort)
        elif not awaited and self._late is not None:
            self._late.cancel()
            self._late = None


async def answer_api_error(request: Request, error: Exception) -> JSONResponse:
    """Starlette's handler for ``ApiError``."""
    if not isinstance(error, ApiError):
        raise error
    return error.response()


async def answer_http_error(request: Request, error: Exception) -> JSONResponse:
    """Starlette's own refusals (no such path, no such method) in the same shape."""
    status = int(getattr(error, "status_code", 500))
    code = "method_not_allowed" if status == 405 else "not_found"
    answer = ApiError(status, f"{request.method} {request.url.path[:200]}: {error}", code=code).response()
    answer.headers.update(getattr(error, "headers", None) or {})  # Allow, where the method is wrong
    return answer


async def answer_defect(request: Request, error: Exception) -> JSONResponse:
    """The same shape for an unexpected exception; the trace goes to the log."""
    return ApiError(500, "internal server error, see the server's log; please report it", code="defect").response()
