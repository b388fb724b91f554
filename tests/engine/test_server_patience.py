"""A client that never finishes its request headers loses the connection; one that is slow elsewhere does not."""

import json
import socket
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from rooftune.engine.server.limits import ImpatientProtocol
from tests.engine.server_harness import MODEL, LetterRunner, Live, letters, live

pytestmark = pytest.mark.slow  # they wait

HEAD_S = 1.0
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Live]:
    monkeypatch.setattr(ImpatientProtocol, "head_s", HEAD_S)
    with live(runner=LetterRunner(step_s=0.02)) as running:
        yield running


def connect(server: Live) -> socket.socket:
    address = urlsplit(server.public)
    client = socket.create_connection((address.hostname, address.port), timeout=20)
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return client


def healthy(client: socket.socket) -> None:
    client.sendall(HEALTH)
    answer = b""
    while b'"ok"}' not in answer:
        part = client.recv(1000)
        assert part, answer
        answer += part


def cut_off(client: socket.socket) -> bool:
    """Whether the other side closes the connection without an answer."""
    try:
        return client.recv(1000) == b""
    except ConnectionResetError:
        return True


def drip(client: socket.socket) -> None:
    """Header after header, none of them the last, until the server stops reading."""
    for number in range(1000):
        try:
            client.sendall(b"X-%d: y\r\n" % number)
        except (ConnectionResetError, BrokenPipeError):
            return
        time.sleep(HEAD_S / 10)
    raise AssertionError("a thousand headers were taken")


def test_unfinished_request_headers_time_out(server: Live) -> None:
    with connect(server) as silent, connect(server) as client:
        client.sendall(b"GET /health HTTP/1.1\r\n")
        drip(client)
        assert cut_off(silent)


def test_unfinished_headers_time_out_on_a_reused_connection(server: Live) -> None:
    with connect(server) as client:
        healthy(client)
        time.sleep(1.5 * HEAD_S)  # being idle between two requests is allowed
        healthy(client)
        client.sendall(b"GET /health HTTP/1.1\r\n")
        drip(client)


def test_slow_bodies_and_long_answers_are_not_cut_off(server: Live) -> None:
    body = json.dumps({"model": MODEL, "prompt": [7] * 5, "max_tokens": 60, "seed": 3, "ignore_eos": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    with connect(server) as client:
        client.sendall(head % len(body) + body[:10])
        time.sleep(1.5 * HEAD_S)
        client.sendall(body[10:])
        answer = b""
        while letters(3, 5, 60).encode() not in answer:  # 60 steps of 20 ms
            part = client.recv(10_000)
            assert part, answer
            answer += part
