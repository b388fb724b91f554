"""The routes of the tuning protocol. Who may use them is decided by where they are mounted and by the token.

With a token reads and writes both need it. Without one they are read-only and belong on a loopback port or a Unix
socket of their own, never on a public port: the address of a peer is no proof of anything.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from engine.interface import Engine, Tuning
from engine.server_auth import SecretFile, require
from engine.server_errors import ApiError
from engine.server_limits import read_body
from engine.server_openapi import openapi
from policies import wire
from policies.errors import InputError

PREFIX = "/tuning/v1"
_BODY_S = 10.0
_READ_ONLY = "read-only: this engine was started without --tuning-token-file, so nothing can be changed"
_MOST_AFTER = 2**53

Handler = Callable[[Request], Awaitable[Response]]
W = TypeVar("W", bound=wire.Message)


def tuning_routes(engine: Engine, secret: SecretFile | None) -> list[Route]:
    """The protocol's routes; without a secret those that change something refuse with 403."""

    def guarded(handler: Handler) -> Handler:
        async def guard(request: Request) -> Response:
            require(secret, request)
            return await handler(request)

        return guard

    def writing(handler: Handler) -> Handler:
        async def guard(request: Request) -> Response:
            if secret is None:
                raise ApiError(403, _READ_ONLY, code="read_only")
            require(secret, request)
            return await handler(request)

        return guard

    async def state(request: Request) -> Response:
        return await _read(engine, request, lambda tuning: tuning.tuning_state())

    async def steps(request: Request) -> Response:
        return await _rows(engine, request, lambda tuning, after: tuning.steps_after(after))

    async def requests(request: Request) -> Response:
        return await _rows(engine, request, lambda tuning, after: tuning.requests_after(after))

    async def push(request: Request) -> Response:
        return await _change(engine, request, wire.PushRequest, lambda tuning, wish: tuning.push(wish))

    async def revert(request: Request) -> Response:
        return await _change(engine, request, wire.RevertRequest, lambda tuning, wish: tuning.revert(wish))

    async def resume(request: Request) -> Response:
        return await _change(engine, request, wire.ResumeRequest, lambda tuning, wish: tuning.resume(wish))

    async def page(request: Request) -> Response:
        return JSONResponse(openapi(read_only=secret is None))

    return [
        Route(f"{PREFIX}/state", guarded(state), methods=["GET"]),
        Route(f"{PREFIX}/steps", guarded(steps), methods=["GET"]),
        Route(f"{PREFIX}/requests", guarded(requests), methods=["GET"]),
        Route(f"{PREFIX}/openapi.json", guarded(page), methods=["GET"]),
        Route(f"{PREFIX}/knobs", writing(push), methods=["PUT"]),
        Route(f"{PREFIX}/lease", writing(revert), methods=["DELETE"]),
        Route(f"{PREFIX}/resume", writing(resume), methods=["POST"]),
    ]


def _json(message: wire.Message, status: int = 200) -> Response:
    return Response(message.model_dump_json(), status, media_type="application/json")


def _malformed(engine: Engine, message: str, status: int = 422) -> Response:
    revision = engine.snapshot().revision
    return _json(wire.Refusal(code="malformed", revision=revision, message=message[:1000]), status)


async def _read(engine: Engine, request: Request, ask: Callable[[Tuning], wire.Message]) -> Response:
    if request.query_params:
        return _malformed(engine, f"unknown query parameter {next(iter(request.query_params))!r:.100}")
    return await asyncio.to_thread(lambda: _json(ask(engine)))


async def _rows(engine: Engine, request: Request, ask: Callable[[Tuning, int], wire.Message]) -> Response:
    given = request.query_params.multi_items()
    text = given[0][1] if given else "-1"
    digits = text.removeprefix("-")
    if len(given) > 1 or any(name != "after" for name, _ in given):
        return _malformed(engine, "the only query parameter is after, given once")
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= 16 and -1 <= int(text) <= _MOST_AFTER):
        return _malformed(engine, f"after is {text!r:.100}, must be a whole number within -1..{_MOST_AFTER}")
    # Up to 20,000 rows: made and written in a thread, so that no stream waits for it.
    return await asyncio.to_thread(lambda: _json(ask(engine, int(text))))


async def _change(
    engine: Engine, request: Request, kind: type[W], change: Callable[[Tuning, W], wire.PushAnswer | wire.Refusal]
) -> Response:
    try:
        body = await read_body(request, wire.MAX_BODY_BYTES, _BODY_S)
    except ApiError as error:
        return _malformed(engine, error.message, error.status)
    empty_is_fine = kind is wire.RevertRequest  # one line of curl must be enough to go back
    try:
        wish = wire.parse(kind, body or (b"{}" if empty_is_fine else b""))
    except InputError as error:
        return _malformed(engine, str(error))
    answer = await asyncio.to_thread(change, engine, wish)
    return _json(answer, wire.REFUSAL_STATUS[answer.code] if isinstance(answer, wire.Refusal) else 200)
