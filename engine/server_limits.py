"""Bounds on what one client may send, and the reading of a body within them."""

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rooftune.engine.server_errors import BODIES_FULL_CODE, COME_AGAIN_S, ApiError, bad_request
from rooftune.policies.errors import bad_value
from starlette.requests import ClientDisconnect, Request


@dataclass(frozen=True, slots=True)
class Limits:
    """body_bytes: of one request. body_s: for the whole body to arrive. bodies_bytes: of all requests together that
    arrive or wait to be read, never less than some of the greatest. prompt_tokens: 0 = only the model's length.

    stops: stop strings of one request; stop_chars: length of each. Raises InputError outside the bounds.
    """

    body_bytes: int = 8 * 1024 * 1024
    body_s: float = 30.0
    bodies_bytes: int = 256 * 1024 * 1024
    prompt_tokens: int = 0
    stops: int = 16
    stop_chars: int = 1024

    def __post_init__(self) -> None:
        if not 1024 <= self.body_bytes <= 1 << 30:
            raise bad_value("body limit", self.body_bytes, "within 1024..1073741824 bytes", "8388608 is usual")
        if not 0.0 < self.body_s <= 3600.0:
            raise bad_value("time for a body", self.body_s, "above 0 and at most 3600 s", "30 is usual")
        if self.prompt_tokens < 0:
            raise bad_value("prompt limit", self.prompt_tokens, "at least 0 tokens", "0 = the model's own length")


_LEAST_BODIES = 4  # of the greatest size that have room together


class BodyRoom:
    """Memory for the bodies of all clients that are not read through yet; only for the event loop's thread."""

    def __init__(self, limits: Limits) -> None:
        self._most_bytes = max(limits.bodies_bytes, _LEAST_BODIES * limits.body_bytes)
        self.held_bytes = 0

    @contextmanager
    def share(self) -> Iterator[Callable[[int], None]]:
        """What is called with the size of each part that has come, and raises ApiError 429 when there is no room for
        it; all of it is given back at the end."""
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
    the server ends meanwhile, and what ``take`` does, which hears of the size of each part."""
    announced = request.headers.get("content-length", "0")
    if not (announced.isascii() and announced.isdecimal()):
        raise bad_request("Content-Length is no number")
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
        raise ApiError(503, "the server stops; send the request to another one", code="stopping") from None
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
        raise bad_request(f"the body is no JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise bad_request("the body must be a JSON object")
    return value


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def _no_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a field is named twice")
    return found
