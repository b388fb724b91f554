"""The controller's pages over HTTP: a small server in threads of its own. What changes something needs the token."""

import json
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from pydantic import ValidationError
from rooftune.policies.errors import InputError
from rooftune.tuner.config import TokenFile
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
