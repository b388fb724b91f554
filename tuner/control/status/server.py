"""The controller's own face: health, metrics, status, a log line an outcome, and pause, resume and revert over HTTP.

The loop calls ``publish`` after each cycle and reads what people asked for through ``state/operator.py``.
"""

import json
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from typing import Any, TextIO
from urllib.parse import urlsplit

from pydantic import ValidationError

from rooftune.policies.errors import InputError, UnreachableError
from rooftune.tuner.clock import Clock
from rooftune.tuner.config import Config, TokenFile
from rooftune.tuner.config.values import split_listen
from rooftune.tuner.control.outcome import CycleRecord
from rooftune.tuner.control.ports import Store
from rooftune.tuner.control.state import operator as wishes
from rooftune.tuner.control.status.log import EventLog, Level, Value, level_of, outcome_fields
from rooftune.tuner.control.status.series import CONTENT_TYPE, Series
from rooftune.tuner.control.status.view import About, View
from rooftune.tuner.record import Part, Words

MAX_BODY_BYTES = 4096
MOST_CONNECTIONS = 32
TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Answer:
    """One answer. body: bytes as they are, or a value for JSON."""

    status: int
    body: bytes | dict[str, Any]
    content_type: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)


class Ask(Part):
    """Body of a POST, all of it optional."""

    actor: Words = "unnamed"
    reason: Words = "not stated"


@dataclass(frozen=True)
class Routes:
    """What is behind the paths. posts get actor and reason; they run only for who has a token."""

    gets: dict[str, Callable[[], Answer]]
    posts: dict[str, Callable[[Ask], Answer]]
    token: TokenFile | None


class PageServer(ThreadingHTTPServer):
    """Bounded: so many connections at once, each for a few seconds; one more is closed at once."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 16

    def __init__(self, host: str, port: int, routes: Routes) -> None:
        """Raises InputError when the address cannot be listened on."""
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.routes = routes
        self._free = threading.Semaphore(MOST_CONNECTIONS)
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            raise InputError(f"listen is {shown!r}: {error.strerror or error}; give a free one of yours") from None

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def server_bind(self) -> None:
        # The inherited one asks the name service for our name, which may take seconds.
        super(ThreadingHTTPServer, self).server_bind()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients may go away; anything else is a defect of ours and is shown."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = TIMEOUT_S
    server_version = "rooftune"
    sys_version = ""

    def do_GET(self) -> None:
        found = self.server.routes.gets.get(urlsplit(self.path).path)
        if found is None:
            self._answer(self._unknown())
        else:
            self._answer(found())

    do_HEAD = do_GET

    def do_POST(self) -> None:
        found = self.server.routes.posts.get(urlsplit(self.path).path)
        if found is None:
            self._answer(self._unknown())
            return
        refused = self._not_allowed()
        if refused is not None:
            self._answer(refused)
            return
        ask = self._ask()
        self._answer(ask if isinstance(ask, Answer) else found(ask))

    def _unknown(self) -> Answer:
        routes = self.server.routes
        path = urlsplit(self.path).path
        allowed = "GET" if path in routes.gets else "POST" if path in routes.posts else None
        if allowed is not None:
            return Answer(405, _error(f"{path} takes {allowed}"), headers={"Allow": allowed})
        return Answer(404, _error(f"no such page; there are {', '.join([*routes.gets, *routes.posts])}"))

    def _not_allowed(self) -> Answer | None:
        token = self.server.routes.token
        if token is None:
            said = "this controller has no token_file, so that nothing is changed over HTTP; use the command"
            return Answer(403, _error(said))
        scheme, _, given = self.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not token.holds(given.strip()):
            said = "the header Authorization: Bearer TOKEN is missing or wrong"
            return Answer(401, _error(said), headers={"WWW-Authenticate": "Bearer"})
        return None

    def _ask(self) -> Ask | Answer:
        length = self.headers.get("Content-Length", "0")
        if self.headers.get("Transfer-Encoding") or not (length.isascii() and length.isdecimal()):
            return Answer(411, _error("send the length of the body"))
        if int(length) > MAX_BODY_BYTES:
            return Answer(413, _error(f"the body must be at most {MAX_BODY_BYTES} bytes"))
        body = self.rfile.read(int(length))
        try:
            return Ask.model_validate_json(body or b"{}")
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            place = ".".join(map(str, first["loc"])) or "the body"
            return Answer(422, _error(f"{place}: {first['msg']}; give actor and reason, or nothing"))

    def _answer(self, answer: Answer) -> None:
        body = answer.body if isinstance(answer.body, bytes) else (json.dumps(answer.body) + "\n").encode()
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Silent: probes come every few seconds."""


def _error(message: str) -> dict[str, Any]:
    return {"error": message}


STATUS_SCHEMA = "rooftune.status"
STATUS_VERSION = 1
POLL_S = 0.1  # how soon the server notices that it shall end


class Face:
    """Pages and log of one controller. listen None: no pages, the log alone."""

    def __init__(
        self, about: About, store: Store, clock: Clock, log: EventLog, listen: str | None, token: TokenFile | None
    ) -> None:
        """Raises InputError when the address cannot be listened on or the token file cannot be used."""
        if token is not None:
            token.tokens()
        self._about, self._store, self._clock, self._log = about, store, clock, log
        self._view = View(about, clock)
        self._series = Series(self._view, store)
        self._server: PageServer | None = None
        self._thread: threading.Thread | None = None
        if listen is not None:
            host, port = split_listen(listen)
            self._server = PageServer(host, port, self._routes(token))
            serve = self._server.serve_forever
            self._thread = threading.Thread(target=serve, args=(POLL_S,), name="face", daemon=True)
            self._thread.start()

    @classmethod
    def of(cls, config: Config, store: Store, clock: Clock, stream: TextIO | None = None) -> "Face":
        """As the configuration says, its log on ``stream`` (default: standard error)."""
        about = About(
            config.engine.shown_name, config.mode, store.instance, config.cadence.cycle_s, version("rooftune")
        )
        log = EventLog(stream or sys.stderr, config.log.level, config.log.format)
        token = None if config.token_file is None else TokenFile(config.token_file)
        return cls(about, store, clock, log, config.listen, token)

    @property
    def port(self) -> int | None:
        """Where the pages are; None without them."""
        return None if self._server is None else self._server.port

    @property
    def actor(self) -> str:
        """The actor of every push."""
        return self._about.actor

    def publish(self, record: CycleRecord) -> None:
        """Show a cycle that has ended; never raises."""
        self._view.publish(record)
        self._log.write(self._clock.wall_s(), level_of(record), outcome_fields(record, self._about.actor))

    def say(self, event: str, text: str, level: Level = Level.INFO) -> None:
        """One line that is not a cycle: a start, an end, a state file moved aside."""
        self._log.write(self._clock.wall_s(), level, {"event": event, "detail": text})

    def close(self) -> None:
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server = None

    # --- pages -----------------------------------------------------------------------------------

    def _routes(self, token: TokenFile | None) -> Routes:
        return Routes(
            {
                "/healthz": lambda: self._flag("healthy", self._view.glance().healthy),
                "/readyz": lambda: self._flag("ready", self._view.glance().ready),
                "/metrics": lambda: Answer(200, self._series.page(), CONTENT_TYPE),
                "/status": lambda: Answer(200, self.status()),
            },
            {
                "/pause": lambda ask: self._wish("pause", ask),
                "/resume": lambda ask: self._wish("resume", ask),
                "/revert": lambda ask: self._wish("revert", ask),
            },
            token,
        )

    def _flag(self, name: str, good: bool) -> Answer:
        since_s = round(self._view.glance().since_s, 3)
        return Answer(200 if good else 503, {name: good, "since_cycle_s": since_s})

    def status(self) -> dict[str, Any]:
        """What /status says: who, what people asked for, and the latest record."""
        seen = self._view.glance()
        asked: dict[str, Any] | None = None
        try:
            asked = wishes.read(self._store).model_dump(mode="json")
        except UnreachableError as error:
            asked = {"error": str(error)}
        return {
            "schema": STATUS_SCHEMA, "version": STATUS_VERSION, "engine": self._about.engine, "mode": self._about.mode,
            "instance": self._about.instance, "release": self._about.version, "healthy": seen.healthy,
            "ready": seen.ready, "since_cycle_s": round(seen.since_s, 3), "wishes": asked,
            "last": None if seen.record is None else seen.record.model_dump(mode="json", by_alias=True),
        }  # fmt: skip

    def _wish(self, kind: str, ask: Ask) -> Answer:
        actor, at_s = f"http:{ask.actor}", self._clock.wall_s()
        act = {"pause": wishes.pause, "resume": wishes.resume, "revert": wishes.ask_revert}[kind]
        try:
            wish = act(self._store, actor, ask.reason, at_s)
        except UnreachableError as error:
            return Answer(503, {"error": str(error)})
        fields: dict[str, Value] = {"event": kind, "actor": actor, "reason": ask.reason}
        self._log.write(at_s, Level.WARNING, fields)
        done = "at once" if kind == "pause" else "in the next cycle"
        return Answer(200 if kind == "pause" else 202, {"asked": kind, "wish": wish.id, "takes_effect": done})
