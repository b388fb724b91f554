"""An OpenAI-compatible server over HTTP: what it serves, and one streamed completion. Nothing is ever sent twice."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import httpx

from rooftune.policies.errors import InputError, RefusedError, UnreachableError
from rooftune.policies.wire import MAX_ANSWER_BYTES
from rooftune.tuner.replay.stream import BadStream, EventReader, Flight, message_of

CONNECT_S = 10.0
# A whole answer that is no completion: a server that drips a byte a second keeps any limit per read.
ANSWER_S = 30.0
_MOST_ERROR_BYTES = 65_536
# Servers close idle connections after some seconds; one that is reused later than this might be closing already.
_KEEP_S = 2.0
_POOLS = 32


@dataclass(frozen=True)
class Model:
    """What /v1/models says. name: None when it says nothing; max_tokens, vocab_tokens: None when it does not say."""

    name: str | None = None
    max_tokens: int | None = None
    vocab_tokens: int | None = None


def open_client(key: str | None, tls: ssl.SSLContext | bool = True) -> httpx.AsyncClient:
    """A client that queues nothing: as many connections as requests are under way. No proxy, no redirect."""
    headers = {"accept-encoding": "identity"} | ({} if key is None else {"authorization": f"Bearer {key}"})
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=_KEEP_S)
    timeout = httpx.Timeout(None, connect=CONNECT_S)
    return httpx.AsyncClient(headers=headers, limits=limits, timeout=timeout, trust_env=False, verify=tls)


@asynccontextmanager
async def open_clients(key: str | None) -> AsyncIterator[tuple[httpx.AsyncClient, ...]]:
    """Several clients to take in turn: the pool of one looks at all its connections whenever a request begins or ends,
    which with hundreds of streams is most of what a client computes."""
    tls = httpx.create_ssl_context()
    async with AsyncExitStack() as stack:
        yield tuple([await stack.enter_async_context(open_client(key, tls)) for _ in range(_POOLS)])


async def get(http: httpx.AsyncClient, url: str, remedy_401: str) -> tuple[int, bytes]:
    """Status and body of one GET. Raises UnreachableError without an answer or a ready server, RefusedError
    for 401 and 403, InputError for an answer without an end."""
    try:
        async with asyncio.timeout(ANSWER_S), http.stream("GET", url, timeout=CONNECT_S) as response:
            status, content = response.status_code, bytearray()
            async for data in response.aiter_bytes():
                content += data
                if len(content) > MAX_ANSWER_BYTES:
                    raise InputError(f"the answer of {url} is longer than {MAX_ANSWER_BYTES} bytes; check the address")
    except TimeoutError:
        raise InputError(f"the answer of {url} has no end after {ANSWER_S:g} s; check the address") from None
    except (httpx.HTTPError, ssl.SSLError, OSError) as error:
        raise UnreachableError(f"{url} does not answer: {why(error)}; check the address and the server") from None
    if status in (401, 403):
        raise RefusedError(f"{url} answers {status}: {remedy_401}")
    if status >= 500:
        raise UnreachableError(f"{url} answers {status}: it is not ready; wait for it")
    return status, bytes(content)


async def served_model(http: httpx.AsyncClient, base: str) -> Model:
    """The first model that the server lists. Raises what ``get`` raises."""
    status, content = await get(http, f"{base}/v1/models", "give its key with --api-key-file")
    if status != 200:
        return Model()
    try:
        entry = json.loads(content)["data"][0]
        name = entry["id"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return Model()
    if not isinstance(name, str):
        return Model()
    return Model(name, _size(entry, "max_model_len"), _size(entry, "vocab_size"))


def _size(entry: dict[str, object], key: str) -> int | None:
    value = entry.get(key)
    return value if type(value) is int and value > 0 else None


def completion_body(model: str, token_ids: Sequence[int], output_tokens: int) -> bytes:
    """A completion of exactly ``output_tokens`` tokens, streamed, with the server's own counts at its end."""
    fields = {
        "model": model,
        "prompt": list(token_ids),
        "max_tokens": output_tokens,
        "ignore_eos": True,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(fields, separators=(",", ":")).encode()


async def complete(
    http: httpx.AsyncClient, base: str, content: bytes, flight: Flight, since_start: Callable[[], float], limit_s: float
) -> None:
    """Send one request and write into ``flight`` what becomes of it; every failure is its own word.

    Raises RefusedError for 401 alone: then no other request will fare better.
    """
    headers = {"content-type": "application/json", "accept": "text/event-stream"}
    flight.sent_s = since_start()
    try:
        async with (
            asyncio.timeout(limit_s),
            http.stream("POST", f"{base}/v1/completions", content=content, headers=headers) as response,
        ):
            if response.status_code != 200:
                await _refused(response, flight)
                return
            reader = EventReader()
            async for data in response.aiter_bytes():
                now_s = since_start()  # of the read: whatever came together carries one time
                for payload in reader.feed(data):
                    flight.take(payload, now_s)
            flight.finish()
    except TimeoutError:
        flight.fail("timeout", f"not complete after {limit_s:g} s")
    except httpx.ConnectTimeout:
        flight.fail("unreachable", f"no connection after {CONNECT_S:g} s")
    except httpx.ConnectError as error:
        flight.fail("unreachable", why(error))
    except BadStream as error:
        flight.fail("bad_stream", str(error))
    except (httpx.HTTPError, ssl.SSLError, OSError) as error:
        flight.fail("connection_lost", why(error))


async def _refused(response: httpx.Response, flight: Flight) -> None:
    text = bytearray()
    async for data in response.aiter_bytes():
        text += data
        if len(text) > _MOST_ERROR_BYTES:
            break
    try:
        message = message_of(json.loads(bytes(text)))
    except ValueError:
        message = ""
    flight.fail(f"http_{response.status_code}", message or None)
    if response.status_code == 401:
        raise RefusedError(f"{response.url} answers 401: {message or 'no right key'}; give it with --api-key-file")


def why(error: Exception) -> str:
    """The deepest reason in words."""
    return str(error).strip() or type(error).__name__
