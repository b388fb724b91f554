"""The routes of the tuning protocol. Who may use them is decided by where they are mounted and by the token.

With a token reads and writes both need it. Without one they are read-only and belong on a loopback port or a Unix
socket of their own, never on a public port: the address of a peer is no proof of anything.
"""

from collections.abc import Awaitable, Callable

from rooftune.engine.server_auth import SecretFile, require
from rooftune.engine.server_errors import ApiError
from rooftune.engine.server_limits import read_body
from rooftune.engine.server_openapi import MOST_AFTER, openapi
from rooftune.engine.tuning_source import CHANGES, Change, Read, TuningSource
from rooftune.policies import wire
from rooftune.policies.errors import InputError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

PREFIX = "/tuning/v1"
_BODY_S = 10.0

Handler = Callable[[Request], Awaitable[Response]]


def tuning_routes(source: TuningSource, secret: SecretFile | None, token_with: str) -> list[Route]:
    """The protocol's routes; without a secret those that change something refuse with 403.

    token_with: how an operator gives this engine its token file, for the text of that refusal.
    """

    def guarded(handler: Handler, writes: bool = False) -> Handler:
        async def guard(request: Request) -> Response:
            try:
                if writes and secret is None:
                    raise ApiError(403, _read_only(token_with), code="read_only")
                require(secret, request)
                return await handler(request)
            except ApiError as error:  # here, for the application around us may be somebody else's
                return error.response()

        return guard

    def changing(what: Change) -> Handler:
        async def handler(request: Request) -> Response:
            return await _change(source, request, what)

        return guarded(handler, writes=True)

    async def state(request: Request) -> Response:
        if request.query_params:
            return await _malformed(source, f"unknown query parameter {next(iter(request.query_params))!r:.100}")
        return _json(await source.read("state", -1))

    async def steps(request: Request) -> Response:
        return await _rows(source, request, "steps")

    async def requests(request: Request) -> Response:
        return await _rows(source, request, "requests")

    async def page(request: Request) -> Response:
        return JSONResponse(openapi(read_only=secret is None))

    return [
        Route(f"{PREFIX}/state", guarded(state), methods=["GET"]),
        Route(f"{PREFIX}/steps", guarded(steps), methods=["GET"]),
        Route(f"{PREFIX}/requests", guarded(requests), methods=["GET"]),
        Route(f"{PREFIX}/openapi.json", guarded(page), methods=["GET"]),
        Route(f"{PREFIX}/knobs", changing("push"), methods=["PUT"]),
        Route(f"{PREFIX}/lease", changing("revert"), methods=["DELETE"]),
        Route(f"{PREFIX}/resume", changing("resume"), methods=["POST"]),
    ]


def _read_only(token_with: str) -> str:
    return f"read-only: this engine was started without {token_with}, so nothing can be changed"


def _json(text: str, status: int = 200) -> Response:
    return Response(text, status, media_type="application/json")


async def _malformed(source: TuningSource, message: str, status: int = 422) -> Response:
    refusal = wire.Refusal(code="malformed", revision=await source.revision(), message=message[:1000])
    return _json(refusal.model_dump_json(), status)


async def _rows(source: TuningSource, request: Request, what: Read) -> Response:
    given = request.query_params.multi_items()
    text = given[0][1] if given else "-1"
    digits = text.removeprefix("-")
    if len(given) > 1 or any(name != "after" for name, _ in given):
        return await _malformed(source, "the only query parameter is after, given once")
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= 16 and -1 <= int(text) <= MOST_AFTER):
        return await _malformed(source, f"after is {text!r:.100}, must be a whole number within -1..{MOST_AFTER}")
    return _json(await source.read(what, int(text)))


async def _change(source: TuningSource, request: Request, what: Change) -> Response:
    try:
        body = await read_body(request, wire.MAX_BODY_BYTES, _BODY_S)
    except ApiError as error:
        return await _malformed(source, error.message, error.status)
    empty_is_fine = what == "revert"  # one line of curl must be enough to go back
    try:
        wish = wire.parse(CHANGES[what], body or (b"{}" if empty_is_fine else b""))
    except InputError as error:
        return await _malformed(source, str(error))
    status, answer = await source.change(what, wish)
    return _json(answer, status)
