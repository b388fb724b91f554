"""A server in a thread that answers each connection as a script says, byte by byte if need be."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rooftune.policies import wire

Script = Callable[[socket.socket], None]


@dataclass
class Scripted:
    """url: its address. received: head and body of every request, in order. gate: set when the test is over."""

    script: Script
    url: str = ""
    received: list[tuple[str, bytes]] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)

    def header(self, name: str, at: int = -1) -> str | None:
        """A header of one request."""
        for line in self.received[at][0].split("\r\n")[1:]:
            key, _, value = line.partition(":")
            if key.lower() == name.lower():
                return value.strip()
        return None


@contextmanager
def scripted(script: Script, *, socket_path: Path | None = None) -> Iterator[Scripted]:
    """Serves until the block ends."""
    listening = socket.socket(socket.AF_UNIX if socket_path else socket.AF_INET)
    listening.bind(str(socket_path) if socket_path else ("127.0.0.1", 0))
    listening.listen(8)
    server = Scripted(script)
    server.url = f"unix:{socket_path}" if socket_path else f"http://127.0.0.1:{listening.getsockname()[1]}"
    thread = threading.Thread(target=_serve, args=(server, listening), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.gate.set()
        with contextlib.suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join(10)
    assert not thread.is_alive()


def _serve(server: Scripted, listening: socket.socket) -> None:
    while True:
        try:
            connection, _ = listening.accept()
        except OSError:
            return
        with connection, contextlib.suppress(OSError):
            connection.settimeout(10)
            request = _read(connection)
            if request is not None:
                server.received.append(request)
                server.script(connection)


def _read(connection: socket.socket) -> tuple[str, bytes] | None:
    content = b""
    while b"\r\n\r\n" not in content:
        part = connection.recv(65536)
        if not part:
            return None
        content += part
        if not content[:1].isupper():  # a TLS greeting
            return content.hex(), b""
    head, _, body = content.partition(b"\r\n\r\n")
    text = head.decode("latin-1")
    lengths = [line.partition(":")[2] for line in text.split("\r\n") if line.lower().startswith("content-length:")]
    while len(body) < int(lengths[0] if lengths else 0):
        body += connection.recv(65536)
    return text, body


def answer(status: int, body: bytes, *headers: str) -> Script:
    """A whole, well-formed answer."""
    lines = [f"HTTP/1.1 {status} x", f"content-length: {len(body)}", "connection: close", *headers]
    content = "\r\n".join(lines).encode() + b"\r\n\r\n" + body
    return lambda connection: connection.sendall(content)


def message(value: wire.Message, status: int = 200) -> Script:
    return answer(status, value.model_dump_json().encode())


def raw(content: bytes) -> Script:
    return lambda connection: connection.sendall(content)


@contextmanager
def routes(answers: dict[str, Script]) -> Iterator[Scripted]:
    """Answers by path, without what follows a question mark; 404 for any other."""

    def script(connection: socket.socket) -> None:
        path = server.received[-1][0].split(" ")[1].partition("?")[0]
        answers.get(path, answer(404, b'{"detail":"Not Found"}'))(connection)

    with scripted(script) as server:
        yield server
