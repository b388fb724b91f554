"""The tuning protocol over HTTP: its token file (``SecretFile``), its OpenAPI document and its routes.

The token file and ``require`` serve the API keys of /v1 as well. With a token file, tuning reads and writes both need a
token. Without one the routes are read-only and belong on a loopback port or a Unix socket of their own, never on a
public port, because the address of a peer proves nothing.
"""

import hmac
import stat
import threading
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rooftune.engine.server.limits import ApiError, Error, read_body
from rooftune.engine.tuning_source import CHANGES, Change, Read, TuningSource
from rooftune.policies import wire
from rooftune.policies.errors import InputError, UnreachableError

Handler = Callable[[Request], Awaitable[Response]]

PREFIX = "/tuning/v1"
MIN_TOKEN_CHARS = 16
MOST_AFTER = 2**53
_MOST_FILE_BYTES = 65_536
_BODY_S = 10.0  # for the whole body of a change to arrive

# Of the OpenAPI document.
_AFTER = {
    "name": "after",
    "in": "query",
    "required": False,
    "description": "only rows with a number above this; -1: from the oldest kept; then `next` of the latest answer",
    "schema": {"type": "integer", "minimum": -1, "maximum": MOST_AFTER, "default": -1},
}
# Each read with its summary, answer and parameters; each change with its path, method and summary.
_READS: dict[Read, tuple[Any, ...]] = {
    "state": ("Envelope, knobs, policies, revision and lease", wire.State),
    "steps": ("Step records by column", wire.StepColumns, _AFTER),
    "requests": ("Ended requests by column", wire.RequestColumns, _AFTER),
    "in-flight": ("Requests that have not ended, by column", wire.FlightColumns),
}
_CHANGES: dict[Change, tuple[str, str, str]] = {
    "push": ("knobs", "PUT", "Push knobs under a lease, whole or not at all"),
    "revert": ("lease", "DELETE", "Back to the boot settings now"),
    "resume": ("resume", "POST", "Allow pushes again after a revert"),
}
_BODY_OPTIONAL = "revert"  # so that a plain curl -X DELETE reverts


class SecretFile:
    """One or more tokens, one a line, so that old and new tokens are both valid while clients change over.

    Every request checks whether the file changed and reads it again if so. Once the file is gone or unusable, every
    request is refused: a deleted secret must stop working. Raises InputError when it is unusable at the start.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._seen: tuple[int, int, int] | None = None
        self._tokens: tuple[bytes, ...] = ()
        self._refresh()

    def holds(self, given: str) -> bool:
        """Whether ``given`` is one of the tokens."""
        try:
            with self._lock:
                self._refresh()
                tokens = self._tokens
        except InputError:
            return False
        candidate = given.encode("latin-1", "replace")  # HTTP headers hold latin-1
        same = [hmac.compare_digest(candidate, token) for token in tokens]  # all, so timing does not tell which matches
        return any(same)

    def _refresh(self) -> None:
        try:
            found = self._path.stat()
            mark = (found.st_mtime_ns, found.st_size, found.st_ino)
            if mark == self._seen:
                return
            self._seen = None
            if not stat.S_ISREG(found.st_mode) or found.st_size > _MOST_FILE_BYTES:
                raise InputError(f"token file {str(self._path)!r} must be a file of at most {_MOST_FILE_BYTES} bytes")
            lines = self._path.read_bytes().split(b"\n")
        except OSError as error:
            self._seen = None
            raise InputError(f"token file {str(self._path)!r} cannot be read: {error.strerror}; correct it") from error
        tokens = tuple(line.strip() for line in lines if line.strip())
        if not tokens or min(len(token) for token in tokens) < MIN_TOKEN_CHARS:
            raise InputError(
                f"token file {str(self._path)!r} needs tokens of at least {MIN_TOKEN_CHARS} characters, one a line; "
                "make one with: openssl rand -hex 32"
            )
        self._tokens, self._seen = tokens, mark


def require(secret: SecretFile | None, connection: HTTPConnection) -> None:
    """Raises ApiError 401 unless the request carries ``Authorization: Bearer TOKEN``. secret: None lets all through."""
    if secret is None:
        return
    scheme, _, given = connection.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not secret.holds(given.strip()):
        raise ApiError(401, "the Authorization header needs a valid bearer token", code="invalid_api_key")


def openapi(*, read_only: bool) -> dict[str, Any]:
    """The OpenAPI 3.1 document of these routes. read_only: leave out the routes that change something."""
    paths: dict[str, Any] = {f"{PREFIX}/{what}": {"get": _read(*shown)} for what, shown in _READS.items()}
    if not read_only:
        for what, (place, method, summary) in _CHANGES.items():
            paths[f"{PREFIX}/{place}"] = {method.lower(): _changing(summary, CHANGES[what], what != _BODY_OPTIONAL)}
    kinds: list[type[BaseModel]] = [*wire.SCHEMAS, Error]
    _, schemas = models_json_schema(
        [(kind, "validation") for kind in kinds], ref_template="#/components/schemas/{model}"
    )
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Rooftune tuning protocol", "version": str(wire.PROTOCOL_VERSION)},
        "paths": paths,
        "components": {"schemas": schemas["$defs"]},
    }
    if not read_only:
        document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"token": []}]
    return document


def _content(kind: type[BaseModel]) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}}


def _answers(kind: type[wire.Message], refusals: tuple[int, ...]) -> dict[str, Any]:
    answers: dict[str, Any] = {"200": {"description": kind.__name__, "content": _content(kind)}}
    for status in refusals:
        answers[str(status)] = {"description": "nothing was changed", "content": _content(wire.Refusal)}
    # In OpenAI's format, not the protocol's.
    answers["401"] = {"description": "no valid bearer token", "content": _content(Error)}
    return answers


def _read(summary: str, kind: type[wire.Message], *parameters: dict[str, Any]) -> dict[str, Any]:
    return {"summary": summary, "parameters": list(parameters), "responses": _answers(kind, (422,))}


def _changing(summary: str, kind: type[wire.Message], needs_body: bool) -> dict[str, Any]:
    statuses = tuple(sorted({413, *wire.REFUSAL_STATUS.values()}))
    return {
        "summary": summary,
        "requestBody": {"required": needs_body, "content": _content(kind)},
        "responses": _answers(wire.PushAnswer, statuses),
    }


def tuning_routes(source: TuningSource, secret: SecretFile | None, token_with: str) -> list[Route]:
    """The protocol's routes; without a secret, those that change something answer 403.

    token_with: the flag or variable that sets the token file, named in that refusal.
    """

    def guarded(handler: Handler, writes: bool = False) -> Handler:
        async def guard(request: Request) -> Response:
            try:
                if writes and secret is None:
                    why = f"read-only: this engine was started without {token_with}, so nothing can be changed"
                    raise ApiError(403, why, code="read_only")
                require(secret, request)
                return await handler(request)
            except ApiError as error:  # here, because the enclosing application may not be ours
                return error.response()

        return guard

    async def page(request: Request) -> Response:
        return JSONResponse(openapi(read_only=secret is None))

    return [
        Route(f"{PREFIX}/openapi.json", guarded(page), methods=["GET"]),
        *(Route(f"{PREFIX}/{what}", guarded(partial(_read_answer, source, what)), methods=["GET"]) for what in _READS),
        *(
            Route(f"{PREFIX}/{place}", guarded(partial(_change, source, what), writes=True), methods=[method])
            for what, (place, method, _) in _CHANGES.items()
        ),
    ]


def _json(text: str, status: int = 200) -> Response:
    return Response(text, status, media_type="application/json")


async def _malformed(source: TuningSource, message: str, status: int = 422) -> Response:
    state = wire.parse(wire.State, (await source.read("state", -1)).encode(), wire.MAX_ANSWER_BYTES)
    return _json(wire.malformed(state.revision, message).model_dump_json(), status)


async def _read_answer(source: TuningSource, what: Read, request: Request) -> Response:
    given = request.query_params.multi_items()
    if given and len(_READS[what]) == 2:
        return await _malformed(source, f"unknown query parameter {given[0][0]!r:.100}")
    text = given[0][1] if given else "-1"
    digits = text.removeprefix("-")
    if len(given) > 1 or any(name != "after" for name, _ in given):
        return await _malformed(source, "the only query parameter is after, given once")
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= 16 and -1 <= int(text) <= MOST_AFTER):
        return await _malformed(source, f"after is {text!r:.100}, must be a whole number within -1..{MOST_AFTER}")
    try:
        return _json(await source.read(what, int(text)))
    except UnreachableError as error:
        raise ApiError(503, str(error), code="engine_unavailable", retry_after_s=1) from error


async def _change(source: TuningSource, what: Change, request: Request) -> Response:
    try:
        body = await read_body(request, wire.MAX_BODY_BYTES, _BODY_S)
    except ApiError as error:
        return await _malformed(source, error.message, error.status)
    try:
        parsed = wire.parse(CHANGES[what], body or (b"{}" if what == _BODY_OPTIONAL else b""))
    except InputError as error:
        return await _malformed(source, str(error))
    status, answer = await source.change(what, parsed)
    return _json(answer, status)
