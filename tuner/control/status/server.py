"""The controller's status server: health, metrics, status, operator commands over HTTP, and a log line per cycle.

The loop calls ``publish`` after each cycle and reads what operators requested through ``state/operator.py``.
"""

import asyncio
import json
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO

import uvicorn
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from rooftune.policies.errors import InputError, UnreachableError
from rooftune.tuner.clock import Clock
from rooftune.tuner.config import Config
from rooftune.tuner.config.tokens import holds_token, read_tokens
from rooftune.tuner.config.values import split_listen
from rooftune.tuner.control.outcome import CycleRecord
from rooftune.tuner.control.ports import Store
from rooftune.tuner.control.state import operator
from rooftune.tuner.control.status.log import EventLog, Level, level_of, outcome_fields
from rooftune.tuner.control.status.series import CONTENT_TYPE, Series
from rooftune.tuner.control.status.view import About, View
from rooftune.tuner.record import Part, Words

MAX_BODY_BYTES = 4096
MOST_CONNECTIONS = 32
TIMEOUT_S = 5.0  # of a connection, from its start to the end of its answer
BACKLOG = 16
STATUS_SCHEMA = "rooftune.status"
STATUS_VERSION = 1
_COMMANDS = {"pause": operator.pause, "resume": operator.resume, "revert": operator.revert}


class CommandBody(Part):
    """Body of a POST, all of it optional."""

    actor: Words = "unnamed"
    reason: Words = "not stated"


class BoundedProtocol(H11Protocol):
    """uvicorn's protocol with what it lacks: limits on open connections and on how long each may stay open."""

    _timeout: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            transport.close()
        else:
            self._timeout = self.loop.call_later(TIMEOUT_S, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._timeout is not None:
            self._timeout.cancel()


class PageServer:
    """An application on an address of its own, served by uvicorn in a thread."""

    def __init__(self, listen: str, app: Starlette) -> None:
        """Raises InputError when the address cannot be listened on."""
        bound = _listen(listen)
        self.port = int(bound.getsockname()[1])
        headers = [("Server", "rooftune"), ("Cache-Control", "no-store"), ("Connection", "close")]
        config = uvicorn.Config(
            app, loop="asyncio", http=BoundedProtocol, ws="none", lifespan="off", headers=headers, backlog=BACKLOG,
            server_header=False, proxy_headers=False, access_log=False, log_config=None, log_level="error",
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([bound],), name="status-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Requests that have come whole are answered first; the others end with their time."""
        self._server.should_exit = True
        self._thread.join()


def _listen(listen: str) -> socket.socket:
    host, port = split_listen(listen)
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        raise InputError(f"listen is {listen!r}: {error.strerror or error}; give a free one of yours") from None
    return bound


def _json(value: dict[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(json.dumps(value) + "\n", status, headers, "application/json")


def _refused(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):  # the client left before its body was whole: no defect of ours
        return Response(status_code=400)
    status, text, headers = error.status_code, error.detail, error.headers or {}
    if status == 404:
        text = f"no such page; there are {', '.join(route.path for route in request.app.routes)}"
    elif status == 405:
        text = f"{request.scope['path']} takes {headers.get('Allow')}"
        status = 405 if request.method in ("GET", "HEAD", "POST") else 501
    return _json({"error": text}, status, headers)


async def _read_body(request: Request) -> CommandBody:
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise HTTPException(413, f"the body must be at most {MAX_BODY_BYTES} bytes")
    try:
        return CommandBody.model_validate_json(body or b"{}")
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"])) or "the body"
        raise HTTPException(422, f"{place}: {first['msg']}; give actor and reason, or nothing") from None


class StatusServer:
    """Pages and log of one controller. listen None: no pages, the log alone."""

    def __init__(
        self, about: About, store: Store, clock: Clock, log: EventLog, listen: str | None, token_file: Path | None
    ) -> None:
        """Raises InputError when the address cannot be listened on or the token file cannot be used."""
        if token_file is not None:
            read_tokens(token_file)
        self._about, self._store, self._clock, self._log, self._token_file = about, store, clock, log, token_file
        self._view = View(about, clock)
        self._series = Series(self._view, store)
        self._pages = None if listen is None else PageServer(listen, self._app())

    @classmethod
    def of(cls, config: Config, store: Store, clock: Clock, stream: TextIO | None = None) -> "StatusServer":
        """As the configuration says, its log on ``stream`` (default: standard error)."""
        about = About(
            config.engine.shown_name, config.mode, store.instance, config.cadence.cycle_s, version("rooftune")
        )
        log = EventLog(stream or sys.stderr, config.log.level, config.log.format)
        return cls(about, store, clock, log, config.listen, config.token_file)

    @property
    def port(self) -> int | None:
        """Where the pages are; None without them."""
        return None if self._pages is None else self._pages.port

    def publish(self, record: CycleRecord) -> None:
        """Show a cycle that has ended; never raises."""
        self._view.publish(record)
        self._series.count(record)
        self._log.write(self._clock.wall_s(), level_of(record), outcome_fields(record, self._about.actor))

    def log_event(self, event: str, text: str) -> None:
        """One line that is not a cycle: an end, a state file moved aside."""
        self._log.write(self._clock.wall_s(), Level.INFO, {"event": event, "detail": text})

    def close(self) -> None:
        if self._pages is not None:
            self._pages.close()
            self._pages = None

    # --- pages -----------------------------------------------------------------------------------

    def _app(self) -> Starlette:
        pages: dict[str, Callable[[Request], Response]] = {  # each call in a thread: the state file may wait for a disk
            "/healthz": lambda request: self._flag("healthy", self._view.glance().healthy),
            "/readyz": lambda request: self._flag("ready", self._view.glance().ready),
            "/metrics": lambda request: Response(self._series.page(), media_type=CONTENT_TYPE),
            "/status": lambda request: _json(self.status()),
        }
        routes = [Route(path, page) for path, page in pages.items()]
        routes += [Route(f"/{kind}", self._command, methods=["POST"]) for kind in _COMMANDS]
        app = Starlette(routes=routes, exception_handlers={HTTPException: _refused, ClientDisconnect: _refused})
        app.router.redirect_slashes = False
        return app

    def _flag(self, name: str, good: bool) -> Response:
        since_s = round(self._view.glance().since_s, 3)
        return _json({name: good, "since_cycle_s": since_s}, 200 if good else 503)

    def status(self) -> dict[str, Any]:
        """What /status says: who, what operators requested, and the latest record."""
        seen = self._view.glance()
        try:
            requests = operator.read(self._store).model_dump(mode="json")
        except UnreachableError as error:
            requests = {"error": str(error)}
        return {
            "schema": STATUS_SCHEMA, "version": STATUS_VERSION, "engine": self._about.engine, "mode": self._about.mode,
            "instance": self._about.instance, "release": self._about.version, "healthy": seen.healthy,
            "ready": seen.ready, "since_cycle_s": round(seen.since_s, 3), "wishes": requests,
            "last": None if seen.record is None else seen.record.model_dump(mode="json", by_alias=True),
        }  # fmt: skip

    async def _command(self, request: Request) -> Response:
        await run_in_threadpool(self._authorize, request.headers.get("Authorization", ""))
        body = await _read_body(request)
        return await run_in_threadpool(self._run_command, request.scope["path"][1:], body)

    def _authorize(self, header: str) -> None:
        if self._token_file is None:
            text = "this controller has no token_file, so that nothing is changed over HTTP; use the command"
            raise HTTPException(403, text)
        scheme, _, given = header.partition(" ")
        if scheme.lower() != "bearer" or not holds_token(self._token_file, given.strip()):
            text = "the header Authorization: Bearer TOKEN is missing or wrong"
            raise HTTPException(401, text, {"WWW-Authenticate": "Bearer"})

    def _run_command(self, kind: str, body: CommandBody) -> Response:
        actor, at_s = f"http:{body.actor}", self._clock.wall_s()
        try:
            request = _COMMANDS[kind](self._store, actor, body.reason, at_s)
        except UnreachableError as error:
            raise HTTPException(503, str(error)) from None
        self._log.write(at_s, Level.WARNING, {"event": kind, "actor": actor, "reason": body.reason})
        status, effect = (200, "at once") if kind == "pause" else (202, "in the next cycle")
        return _json({"asked": kind, "wish": request.id, "takes_effect": effect}, status)
