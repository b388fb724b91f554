"""Clients that leave, read nothing or arrive during shutdown: everything is freed, no client gets a wrong token."""

import asyncio
import json
import os
import random
import socket
import time

import httpx
import pytest

from rooftune.engine.server import run as server_run
from tests.engine.server_harness import HTTP, HeldTokenizer, LetterRunner, Live, letters, live, soon

pytestmark = pytest.mark.slow

PATH = "/v1/completions"


def begin(server: Live, body: dict, receive_bytes: int | None = None, send_bytes: int | None = None) -> socket.socket:
    """Sends a request by hand, or only the first bytes of its body, and reads nothing."""
    port = int(server.public.rpartition(":")[2])
    connection = socket.socket()
    if receive_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    connection.connect(("127.0.0.1", port))
    content = json.dumps(body).encode()
    connection.sendall(b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (PATH.encode(), len(content)))
    connection.sendall(content[:send_bytes])
    return connection


def ended(server: Live) -> list[str]:
    return list(server.engine.requests_after(-1).ended)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_request(stream: bool) -> None:
    with live(runner=LetterRunner(step_s=0.002)) as server:
        resting = server.count_tasks()
        connection = begin(server, {"prompt": "hello", "max_tokens": 2000, "stream": stream})
        assert soon(lambda: server.engine.snapshot().running == 1)
        connection.close()
        assert soon(server.idle)
        assert ended(server) == ["aborted"]
        assert soon(lambda: server.count_tasks() <= resting)
        assert server.engine.snapshot().kv_used == 0.0


def test_a_client_that_leaves_while_waiting_frees_its_place() -> None:
    runner = LetterRunner(step_s=0.002)
    with live(runner=runner, max_running=1, max_queue=1) as server:
        first = begin(server, {"prompt": "hello", "max_tokens": 2000, "stream": True})
        assert soon(lambda: server.engine.snapshot().running == 1)
        waiting = begin(server, {"prompt": "hello", "max_tokens": 5, "stream": True})
        assert soon(lambda: server.engine.snapshot().waiting == 1)
        waiting.close()
        assert soon(lambda: server.engine.snapshot().waiting == 0)
        assert server.engine.snapshot().running == 1
        first.close()
        assert soon(server.idle)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_while_its_prompt_is_read_frees_its_blocks(stream: bool) -> None:
    with live(runner=LetterRunner(step_s=0.01), step_tokens=8) as server:
        resting = server.count_tasks()
        connection = begin(server, {"prompt": [1] * 1800, "max_tokens": 5, "stream": stream})
        assert soon(lambda: server.engine.snapshot().partial_prefills == 1)
        assert server.engine.snapshot().kv_used > 0.0
        connection.close()
        assert soon(server.idle)
        requests = server.engine.requests_after(-1)
        assert (requests.ended, requests.output_tokens) == (("aborted",), (0,))
        assert server.engine.snapshot().kv_used == 0.0
        assert soon(lambda: server.count_tasks() <= resting)


def test_a_client_that_leaves_before_its_body_is_read_leaves_nothing() -> None:
    tokenizer = HeldTokenizer()
    with live(tokenizer=tokenizer) as server:
        resting = server.count_tasks()
        body = {"prompt": "hello", "max_tokens": 1000, "stream": True}
        begin(server, body, send_bytes=9).close()
        assert soon(lambda: server.count_tasks() <= resting) and tokenizer.begun == 0
        connection = begin(server, body)
        assert soon(lambda: tokenizer.begun == 1)
        connection.close()
        tokenizer.may.set()
        assert soon(lambda: server.idle() and server.count_tasks() <= resting)
        assert set(ended(server)) <= {"aborted"}


def test_a_client_that_does_not_read_is_cut_off_and_others_are_served() -> None:
    with live(client_s=1.0, runner=LetterRunner(max_model_tokens=20_000, kv_blocks=8192)) as server:
        resting = server.count_tasks()
        with begin(server, {"prompt": "hello", "max_tokens": 19_000, "stream": True}, receive_bytes=4096):
            assert soon(lambda: server.engine.snapshot().running == 1)
            other = HTTP.post(server.public + PATH, json={"prompt": "hi", "max_tokens": 4, "seed": 1})
            assert other.json()["choices"][0]["text"] == letters(1, 2, 4)
            assert soon(lambda: server.idle() and server.count_tasks() <= resting, 60)


def test_draining_finishes_running_requests_and_refuses_new_ones() -> None:
    runner = LetterRunner(step_s=0.002)
    with live(runner=runner) as server, httpx.Client(base_url=server.public) as client:
        with client.stream("POST", PATH, json={"prompt": "hello", "max_tokens": 500, "seed": 7, "stream": True}) as got:
            lines = got.iter_lines()
            first = next(lines)
            runner.gate.clear()
            assert server.engine.snapshot().running == 1
            server.stop.now()
            assert soon(lambda: not server.engine.snapshot().accepting)
            health = HTTP.get(f"{server.public}/health")
            assert (health.status_code, health.json()) == (503, {"status": "draining"})
            late = HTTP.post(server.public + PATH, json={"prompt": "x"})
            assert late.status_code == 503 and "retry-after" in late.headers
            runner.gate.set()
            events = [line.removeprefix("data: ") for line in [first, *lines] if line]
        text = "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])
        assert (text, events[-1]) == (letters(7, 5, 500), "[DONE]")
        server.thread.join(30)
        assert not server.thread.is_alive()


def test_silent_clients_at_shutdown_are_not_logged_as_defects(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One with half a body, one that reads nothing of a long answer: both are dropped, with no traceback in the log."""
    monkeypatch.setattr(server_run, "_FLUSH_S", 1)
    runner = LetterRunner(max_model_tokens=20_000, kv_blocks=8192)
    with live(runner=runner, drain_s=60.0) as server:
        deaf = begin(server, {"prompt": "hello", "max_tokens": 19_000, "stream": True}, receive_bytes=4096)
        dumb = begin(server, {"prompt": "hello"}, send_bytes=5)
        assert soon(lambda: server.engine.snapshot().step > 18_000, 60)
        server.stop.now()
        answer = read_all(dumb)
        server.thread.join(60)
        assert not server.thread.is_alive()
        deaf.close()
    assert answer.startswith(b"HTTP/1.1 503") and b'"stopping"' in answer
    log = capsys.readouterr().err
    assert "Cancel 2 running task(s)" in log and "Traceback" not in log


def test_a_broken_engine_ends_streams_with_an_error_and_the_server_with_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("threading.excepthook", lambda args: None)  # the loop's own trace is expected here
    runner = LetterRunner()
    with live(runner=runner) as server:
        runner.gate.clear()
        connections = [
            begin(server, {"prompt": "hello", "max_tokens": 50, "stream": stream}) for stream in (True, False)
        ]
        assert soon(lambda: server.engine.snapshot().running + server.engine.snapshot().waiting == 2)
        runner.broken = True
        runner.gate.set()
        answers = [read_all(connection) for connection in connections]
        assert b"engine_stopped" in answers[0] and b"[DONE]" not in answers[0]
        assert answers[1].startswith(b"HTTP/1.1 503") and b"engine_stopped" in answers[1]
        server.thread.join(30)
        assert not server.thread.is_alive()


def read_all(connection: socket.socket) -> bytes:
    connection.settimeout(30)
    found = b""
    with connection:
        while more := connection.recv(65536):
            found += more
    return found


def open_files() -> int:
    """Of this process, connections included."""
    return len(os.listdir("/proc/self/fd"))


async def one_client(port: int, chance: random.Random, seed: int) -> str:
    """One stream, read to its end or left at a random moment; checks every token it was sent. Returns what it did."""
    prompt_tokens, tokens = chance.randint(1, 60), chance.randint(1, 100)
    leaves_after = chance.randint(0, tokens - 1) if chance.random() < 0.5 else None
    await asyncio.sleep(chance.random())
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = {"prompt": [seed % 500] * prompt_tokens, "max_tokens": tokens, "seed": seed, "stream": True}
    content = json.dumps(body).encode()
    writer.write(b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (PATH.encode(), len(content)))
    writer.write(content)
    await writer.drain()
    text = ""
    try:
        while leaves_after is None or len(text) < leaves_after:
            line = await asyncio.wait_for(reader.readline(), 120)
            assert line, "the server closed a stream before its end"
            if line.startswith(b"HTTP/1.1"):
                assert b" 200 " in line, line
            if line.startswith(b"data: [DONE]"):
                assert text == letters(seed, prompt_tokens, tokens)
                return "finished"
            if line.startswith(b"data: "):
                text += json.loads(line[6:])["choices"][0]["text"]
                assert letters(seed, prompt_tokens, tokens).startswith(text)
        return "left"
    finally:
        writer.close()


@pytest.mark.slow
def test_500_streams_half_of_which_leave_at_random() -> None:
    chance = random.Random(5)
    runner = LetterRunner(step_s=0.01, kv_blocks=600)  # too few for all, so that requests are preempted as well
    with live(runner=runner, max_running=200) as server:
        resting, files = server.count_tasks(), open_files()
        port = int(server.public.rpartition(":")[2])

        async def all_streams() -> list[str]:
            clients = [one_client(port, random.Random(chance.random()), seed) for seed in range(500)]
            return await asyncio.gather(*clients)

        did = asyncio.run(all_streams())
        assert len(did) == 500 and 150 < did.count("finished") < 350
        assert soon(server.idle)
        assert soon(lambda: server.count_tasks() <= resting and open_files() <= files)
        assert server.engine.snapshot().kv_used == 0.0
        kinds = ended(server)
        # Some that left did so after their last token had been made.
        assert len(kinds) == 500 and kinds.count("finished") >= did.count("finished")
        assert kinds.count("aborted") > 0 and "failed" not in kinds
        assert HTTP.post(server.public + PATH, json={"prompt": "hi", "max_tokens": 4, "seed": 1}).status_code == 200


def test_one_stream_does_not_wait_for_another_long_prompt() -> None:
    """Encoding happens off the event loop: health answers while a slow tokenizer works."""

    class Slow:
        vocab_tokens = 512

        def encode(self, text: str, *, special: bool = True) -> list[int]:
            time.sleep(0.5)
            return [1]

        def decode(self, token_ids: list[int]) -> str:
            return "x" * len(token_ids)

        def chat_text(self, messages: list[dict]) -> str:
            return ""

    with live(tokenizer=Slow()) as server:
        connection = begin(server, {"prompt": "hello", "max_tokens": 1})
        answered = [HTTP.get(f"{server.public}/health").status_code for _ in range(3)]
        assert answered == [200] * 3 and not ended(server), "health waited for the encoding"
        connection.close()
