"""A small OpenAI server in its own thread: it keeps the requests and answers by a script."""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

MODELS = {"data": [{"id": "stub", "max_model_len": 4096}]}


@dataclass
class Received:
    """One completion request: ``order`` of arrival, body and headers."""

    order: int
    body: dict[str, Any]
    headers: dict[str, str]


Answer = Callable[[Received, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Stub:
    """models: status and body of /v1/models. answer: writes the answer to a completion."""

    answer: Answer
    models: tuple[int, dict[str, Any]] = (200, MODELS)
    received: list[Received] = field(default_factory=list)
    url: str = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            lines = head.split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
            content = await reader.readexactly(int(headers.get("content-length", 0)))
            if lines[0].startswith("GET /v1/models "):
                status, value = self.models
                await plain(writer, status, value)
            elif lines[0].startswith("POST /v1/completions "):
                one = Received(len(self.received), json.loads(content), headers)
                self.received.append(one)
                await self.answer(one, writer)
            else:
                await plain(writer, 404, {})
        except (ConnectionError, asyncio.IncompleteReadError):
            return
        finally:
            writer.close()


async def plain(writer: asyncio.StreamWriter, status: int, value: object) -> None:
    """A whole answer; the connection ends with it."""
    content = json.dumps(value).encode()
    writer.write(f"HTTP/1.1 {status} x\r\nconnection: close\r\ncontent-length: {len(content)}\r\n\r\n".encode())
    writer.write(content)
    await writer.drain()


async def begin(writer: asyncio.StreamWriter) -> None:
    """The head of a stream, which then lasts until the connection is closed."""
    writer.write(b"HTTP/1.1 200 x\r\nconnection: close\r\ncontent-type: text/event-stream\r\n\r\n")
    await writer.drain()


def event(value: object) -> bytes:
    return b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"


def token(finish: str | None = None, text: str = "a") -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish}]})


def usage(output: int, cached: int = 0) -> bytes:
    counts = {"completion_tokens": output, "prompt_tokens_details": {"cached_tokens": cached}}
    return event({"choices": [], "usage": counts})


DONE = event(b"[DONE]")


async def whole(one: Received, writer: asyncio.StreamWriter) -> None:
    """As many tokens as were asked for, and a proper end."""
    await begin(writer)
    count = one.body["max_tokens"]
    for at in range(count):
        writer.write(token("length" if at == count - 1 else None))
    writer.write(usage(count) + DONE)
    await writer.drain()


@contextmanager
def stub_server(answer: Answer = whole, models: tuple[int, dict[str, Any]] = (200, MODELS)) -> Iterator[Stub]:
    """A ``Stub`` that answers on loopback until the block ends."""
    stub = Stub(answer, models)
    loop = asyncio.new_event_loop()
    ready = threading.Event()
    stop = asyncio.Event()

    async def main() -> None:
        server = await asyncio.start_server(stub.serve, "127.0.0.1", 0, limit=1 << 24)
        stub.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        ready.set()
        await stop.wait()
        server.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    def run() -> None:
        loop.run_until_complete(main())
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(30)
    try:
        yield stub
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(30)
