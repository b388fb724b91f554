"""Runs an engine behind its sockets until a signal, then drains: health says 503, answers in flight are finished."""

import asyncio
import contextlib
import math
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from rooftune.engine.running import RunningEngine
from rooftune.engine.server.limits import ImpatientProtocol
from rooftune.engine.server.stream import deliver_on
from rooftune.policies.errors import InputError, RefusedError

LOOPBACK = "127.0.0.1"
_HEALTH_EVERY_S = 0.5
_FLUSH_S = 5  # for clients to read what is written already
_BACKLOG = 2048
_MOST_KEEPIDLE_S = 32_767  # Linux's own bound
_PROBE_EVERY_S = 5


# An application and the bound socket that it answers at.
Listener = tuple[ASGIApp, socket.socket]


def bind_tcp(host: str, port: int, client_s: float) -> socket.socket:
    """A bound socket. client_s: seconds after which a client that reads nothing, or that vanished without closing, is
    cut off. Raises InputError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise InputError(f"--host {host!r}: {error.strerror or error}; give an address of this machine") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _cut_off_after(bound, client_s)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise InputError(f"cannot listen on {host}:{port}: {error.strerror or error}; choose another") from error
    return bound


def _cut_off_after(bound: socket.socket, client_s: float) -> None:
    """For every connection that is accepted here: Linux hands these settings down."""
    if not hasattr(socket, "TCP_USER_TIMEOUT"):
        return
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(client_s * 1000))
    # While nothing is written (a request that waits, an answer in one piece) only a probe finds a client that is gone.
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, min(_MOST_KEEPIDLE_S, math.ceil(client_s)))
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_EVERY_S)


def bind_unix(path: Path) -> socket.socket:
    """A Unix socket that only this user may open. Raises InputError, also when the path exists already.

    A socket file left by a killed server, on which no process listens, is replaced.
    """
    bound = socket.socket(socket.AF_UNIX)
    try:
        if path.is_socket() and _is_left_over(path):
            path.unlink()
        bound.bind(str(path))
        path.chmod(0o600)
    except OSError as error:
        bound.close()
        raise InputError(f"cannot listen on {str(path)!r}: {error.strerror or error}; choose a new path") from error
    return bound


def bind_private(
    doors: contextlib.ExitStack, port: int | None, path: Path | None, client_s: float
) -> socket.socket | None:
    """The tuning protocol's own loopback port or Unix socket, if one is wanted; a socket's file goes with it.

    Raises InputError.
    """
    if port is not None:
        return doors.enter_context(bind_tcp(LOOPBACK, port, client_s))
    if path is None:
        return None
    bound = doors.enter_context(bind_unix(path))
    doors.callback(path.unlink, missing_ok=True)
    return bound


def address_of(bound: socket.socket) -> str:
    """As an operator writes it, without a path."""
    if bound.family == socket.AF_UNIX:
        return f"unix:{bound.getsockname()}"
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _is_left_over(path: Path) -> bool:
    """Whether no process listens at a Unix socket's file."""
    with socket.socket(socket.AF_UNIX) as caller:
        try:
            caller.connect(str(path))
        except ConnectionRefusedError:
            return True
    return False


class Server(uvicorn.Server):
    """uvicorn without its signal handlers: they would close the sockets before the engine has drained, and inside vLLM
    signals are vLLM's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run(engine: RunningEngine, listeners: Sequence[Listener], *, drain_s: float, ready: Callable[[], None]) -> None:
    """Start the engine and serve until SIGTERM or SIGINT; a second signal cuts the draining short.

    ready: called once when every listener answers.

    Raises RefusedError when answers were unfinished after ``drain_s`` or the engine broke.
    """

    async def until_signal() -> None:
        signals: asyncio.Queue[int] = asyncio.Queue()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, signals.put_nowait, number)
        await serve(engine, listeners, signals, drain_s, ready)

    asyncio.run(until_signal())


async def serve(
    engine: RunningEngine,
    listeners: Sequence[Listener],
    signals: "asyncio.Queue[int]",
    drain_s: float,
    ready: Callable[[], None],
) -> None:
    """Serve until a signal comes out of ``signals``."""
    engine.deliver_with(deliver_on(asyncio.get_running_loop()))
    engine.start()
    servers = [make_server(app) for app, _ in listeners]
    serving = [
        asyncio.create_task(server.serve(sockets=[bound]))
        for server, (_, bound) in zip(servers, listeners, strict=True)
    ]
    try:
        while not all(server.started for server in servers):
            await asyncio.sleep(0.01)
        ready()
        healthy = await _until_signal(engine, signals)
        left = await _drain(engine, signals, drain_s) if healthy else False
    finally:
        await asyncio.to_thread(engine.stop)
        for server in servers:
            server.should_exit = True
        await asyncio.gather(*serving)
    if not healthy:
        raise RefusedError("the engine broke and nothing can be answered; see the trace above, then start it again")
    if left:
        raise RefusedError(f"stopped with answers unfinished after {drain_s:g} s; give --drain more time")


def make_server(app: ASGIApp) -> Server:
    return Server(
        uvicorn.Config(
            app,
            http=ImpatientProtocol,
            lifespan="off",
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,  # trust no header about the client's address
            timeout_keep_alive=30,
            timeout_graceful_shutdown=_FLUSH_S,
            backlog=_BACKLOG,
            ws="none",
        )
    )


async def _until_signal(engine: RunningEngine, signals: "asyncio.Queue[int]") -> bool:
    """True on a signal, False when the engine broke."""
    while engine.snapshot().healthy:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(signals.get(), _HEALTH_EVERY_S)
            return True
    return False


async def _drain(engine: RunningEngine, signals: "asyncio.Queue[int]", drain_s: float) -> bool:
    """Whether answers were left unfinished."""
    print("rooftune: draining, a second signal stops at once", flush=True)
    draining = asyncio.create_task(asyncio.to_thread(engine.drain, drain_s))
    again = asyncio.create_task(signals.get())
    await asyncio.wait({draining, again}, return_when=asyncio.FIRST_COMPLETED)
    again.cancel()
    return not (draining.done() and draining.result())
