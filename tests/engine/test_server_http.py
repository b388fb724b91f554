"""HTTP from all kinds of clients: methods, pipelined requests, old versions, nonsense."""

import json
import socket
from urllib.parse import urlsplit

import pytest

from tests.engine.server_harness import HTTP, Live, letters, live


@pytest.fixture(scope="module")
def server():
    with live() as running:
        yield running


@pytest.mark.parametrize("path", ["/health", "/metrics", "/v1/models", "/v1/models/letters"])
def test_head_returns_the_headers_of_get(server: Live, path: str) -> None:
    head, get = HTTP.head(server.public + path), HTTP.get(server.public + path)
    assert head.status_code == get.status_code == 200 and head.content == b"" and len(get.content) > 0
    assert head.headers["content-type"] == get.headers["content-type"]


WRONG = [("OPTIONS", "/v1/completions", {"POST"}), ("GET", "/v1/chat/completions", {"POST"})]
WRONG += [(method, path, {"GET", "HEAD"}) for method, path in (("POST", "/health"), ("DELETE", "/v1/models"))]
WRONG_TUNING = [("POST", "knobs", {"PUT"}), ("GET", "lease", {"DELETE"}), ("PUT", "state", {"GET", "HEAD"})]


def test_a_wrong_method_is_405_with_allow(server: Live) -> None:
    requests = [(method, server.public + path, right) for method, path, right in WRONG]
    requests += [(method, f"{server.private}/tuning/v1/{path}", right) for method, path, right in WRONG_TUNING]
    for method, url, right in requests:
        answer = HTTP.request(method, url)
        assert (answer.status_code, answer.json()["error"]["code"]) == (405, "method_not_allowed")
        assert set(answer.headers["allow"].split(", ")) == right, url


def connect(server: Live) -> socket.socket:
    address = urlsplit(server.public)
    return socket.create_connection((address.hostname, address.port), timeout=30)


def request(seed: int, *, stream: bool = False, version: str = "1.1", extra: str = "") -> bytes:
    body = json.dumps({"prompt": [1, 2, 3], "max_tokens": 4, "seed": seed, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nHost: x\r\n{extra}Content-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def read_to_end(connection: socket.socket) -> bytes:
    found = b""
    while part := connection.recv(65536):
        found += part
    return found


def test_pipelined_requests_are_answered_in_order(server: Live) -> None:
    with connect(server) as connection:
        connection.sendall(b"".join(request(seed, stream=seed % 2 == 0) for seed in range(5)))
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        answer = read_to_end(connection).decode()
    whole = [letters(seed, 3, 4) for seed in (1, 3)]
    assert answer.count("HTTP/1.1 200") == 6 and answer.count("[DONE]") == 3
    assert answer.endswith('{"status":"ok"}') and answer.index(whole[0]) < answer.index(whole[1])


@pytest.mark.parametrize("how", [{"version": "1.0"}, {"extra": "Connection: close\r\n"}])
def test_connection_close_is_honoured(server: Live, how: dict) -> None:
    with connect(server) as connection:
        connection.sendall(request(7, **how))
        answer = read_to_end(connection)
    assert answer.startswith(b"HTTP/1.1 200") and letters(7, 3, 4).encode() in answer


def test_expect_100_continue_is_honoured(server: Live) -> None:
    whole = request(9, extra="Expect: 100-continue\r\nConnection: close\r\n")
    head, _, body = whole.partition(b"\r\n\r\n")
    with connect(server) as connection:
        connection.sendall(head + b"\r\n\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 100")
        connection.sendall(body)
        assert letters(9, 3, 4).encode() in read_to_end(connection)


NONSENSE = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",  # TLS
    b"GET /health HTTP/1.1\r\n\r\n",  # no host
    b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 200_000 + b"\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -3\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabc",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
]


@pytest.mark.parametrize("content", NONSENSE, ids=[str(content[:40]) for content in NONSENSE])
def test_nonsense_is_400_and_closes_the_connection(server: Live, content: bytes) -> None:
    with connect(server) as connection:
        connection.sendall(content)
        assert connection.recv(65536).startswith(b"HTTP/1.1 400")
        try:
            assert b"HTTP/1.1" not in read_to_end(connection), "nothing but the one answer"
        except ConnectionResetError:  # what had not been read yet
            pass
    assert HTTP.get(f"{server.public}/health").status_code == 200
