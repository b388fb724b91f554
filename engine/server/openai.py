"""The routes of OpenAI's interface: /v1/completions, /v1/chat/completions, /v1/models."""

import asyncio
import functools
import json
import time
import uuid
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from rooftune.engine.interface import Busy, FinishReason, RejectReason, Stopping, TooLong
from rooftune.engine.running import RunningEngine
from rooftune.engine.server.limits import COME_AGAIN_S, TOO_LONG_CODE, ApiError, BodyRoom, parse_object, read_body
from rooftune.engine.server.request import Generation, Served, read_generation
from rooftune.engine.server.stream import Answer, Piece, watch
from rooftune.engine.server.tuning import SecretFile, require
from rooftune.policies.errors import InputError

DONE = b"data: [DONE]\n\n"
_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


def sse(value: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: %s\n\n" % json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


class Writer:
    """Writes one answer, as a message (chat) or a completion."""

    def __init__(self, model_id: str, generation: Generation) -> None:
        self.fields = generation.fields
        self._chat = generation.chat
        self._prompt_tokens = len(generation.prompt)
        self._written_tokens = 0
        self._first = True
        self._kind = "chat.completion" if self._chat else "text_completion"
        self._chunk_kind = "chat.completion.chunk" if self._chat else self._kind
        name = ("chatcmpl-" if self._chat else "cmpl-") + uuid.uuid4().hex
        self._head = {"id": name, "created": int(time.time()), "model": model_id}

    def chunk(self, piece: Piece) -> bytes:
        """One piece, an event even without text: a client that measures gaps sees every token when it comes."""
        choice = self._choice(piece)
        if self._chat:
            role = {"role": "assistant"} if self._first else {}
            choice["delta"] = role | {"content": piece.text}
        else:
            choice["text"] = piece.text
        self._first = False
        self._written_tokens += len(piece.token_ids)
        chunk = self._head | {"object": self._chunk_kind, "choices": [choice]}
        options = self.fields.stream_options
        if options.include_usage:
            chunk["usage"] = self._counts(self._written_tokens) if options.continuous_usage_stats else None
        return sse(chunk)

    def usage_chunk(self, answer: Answer) -> bytes:
        """The last chunk of a stream with ``include_usage``."""
        return sse(self._head | {"object": self._chunk_kind, "choices": [], "usage": self._usage(answer)})

    def whole(self, pieces: list[Piece], answer: Answer) -> dict[str, Any]:
        """The answer of a request without ``stream``; the last piece is the finished one."""
        token_ids = tuple(token for piece in pieces for token in piece.token_ids)
        text = "".join(piece.text for piece in pieces)
        choice = self._choice(Piece(text, token_ids, pieces[-1].finished))
        if self._chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        return self._head | {"object": self._kind, "choices": [choice], "usage": self._usage(answer)}

    def _choice(self, piece: Piece) -> dict[str, Any]:
        finished = None if piece.finished is None else _REASONS[piece.finished]
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finished}
        if self.fields.return_token_ids:
            choice["token_ids"] = list(piece.token_ids)
        return choice

    def _usage(self, answer: Answer) -> dict[str, Any]:
        details = {"prompt_tokens_details": {"cached_tokens": answer.cached_tokens}}
        return self._counts(answer.output_tokens) | details

    def _counts(self, output_tokens: int) -> dict[str, Any]:
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": output_tokens,
            "total_tokens": self._prompt_tokens + output_tokens,
        }


_PROMPT_THREADS = 4
_BROKEN = "the engine stopped before the answer was complete; send the request again"


@dataclass(frozen=True)
class Service:
    """Everything the routes need. api_key: None = no key is needed. on_rejected: called for requests refused before
    they reach the engine; the engine reports those it refuses itself."""

    engine: RunningEngine
    served: Served
    api_key: SecretFile | None = None
    on_rejected: Callable[[RejectReason], None] = lambda reason: None


def openai_routes(service: Service) -> list[Route]:
    """Routes that need the API key when there is one."""
    started = int(time.time())
    # Separate threads, so that the tuning protocol and the draining, on the default ones, never wait for a prompt.
    pool = ThreadPoolExecutor(_PROMPT_THREADS, thread_name_prefix="prompt")
    room = BodyRoom(service.served.limits)

    async def models(request: Request) -> Response:
        require(service.api_key, request)
        return JSONResponse({"object": "list", "data": [_model(service.served, started)]})

    async def model(request: Request) -> Response:
        require(service.api_key, request)
        if request.path_params["name"] != service.served.model_id:
            raise ApiError(404, "no such model; /v1/models lists what is served", code="model_not_found")
        return JSONResponse(_model(service.served, started))

    return [
        Route("/v1/completions", _generating(service, pool, room, chat=False), methods=["POST"]),
        Route("/v1/chat/completions", _generating(service, pool, room, chat=True), methods=["POST"]),
        Route("/v1/models", models, methods=["GET"]),
        Route("/v1/models/{name:path}", model, methods=["GET"]),
    ]


def _model(served: Served, started: int) -> dict[str, object]:
    named = {
        "id": served.model_id,
        "object": "model",
        "created": started,
        "owned_by": "rooftune",
        "root": served.model_id,
    }
    # Not OpenAI's: the first name is vLLM's, the second tells a load generator which token ids it may send.
    return named | {"max_model_len": served.max_model_tokens, "vocab_size": served.tokenizer.vocab_tokens}


def _generating(
    service: Service, pool: Executor, room: BodyRoom, *, chat: bool
) -> Callable[[Request], Awaitable[Response]]:
    limits = service.served.limits

    async def generating(request: Request) -> Response:
        arrived_s = service.engine.now_s()
        require(service.api_key, request)
        with room.share() as take:
            body = await read_body(request, limits.body_bytes, limits.body_s, take)
            # Parsing, encoding and hashing a long prompt takes long enough to be felt by every other stream.
            begin = functools.partial(_begin, service, body, chat, arrived_s)
            generation, answer = await asyncio.get_running_loop().run_in_executor(pool, begin)
        return AnswerResponse(answer, Writer(service.served.model_id, generation))

    return generating


def _begin(service: Service, body: bytes, chat: bool, arrived_s: float) -> tuple[Generation, Answer]:
    """The checked request and its answer, which the engine has begun; refusals of either become ApiErrors."""
    try:
        generation = read_generation(parse_object(body), chat=chat, served=service.served)
    except ApiError as error:
        too_long = error.code == TOO_LONG_CODE
        service.on_rejected(RejectReason.TOO_LONG if too_long else RejectReason.INVALID)
        raise
    try:
        return generation, Answer(service.engine, generation, service.served.tokenizer, arrived_s)
    except Busy as error:
        raise ApiError(429, str(error), code="queue_full", retry_after_s=error.retry_after_s) from None
    except Stopping as error:
        raise ApiError(503, str(error), code="stopping", retry_after_s=COME_AGAIN_S) from None
    except TooLong as error:
        param = "messages" if chat else "prompt"
        raise ApiError(400, str(error), code=TOO_LONG_CODE, param=param) from None
    except InputError as error:
        raise ApiError(400, str(error), code="invalid_value") from None


class AnswerResponse(Response):
    """Writes an answer, streamed or whole, and cancels it as soon as its client leaves."""

    def __init__(self, answer: Answer, writer: Writer) -> None:
        super().__init__()
        self._answer = answer
        self._writer = writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._answer
        watcher = asyncio.create_task(watch(receive, answer))
        try:
            if self._writer.fields.stream:
                await self._stream(send)
            else:
                await self._whole(scope, receive, send)
        except asyncio.CancelledError:  # the end of the server, and this client does not read what is written already
            return
        finally:
            answer.close()
            watcher.cancel()
            with suppress(asyncio.CancelledError):
                await watcher

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        pieces: list[Piece] = []
        async for found in self._answer.pieces():
            pieces.extend(found)
        if self._answer.client_left:
            return
        if _broken(pieces[-1]):
            await ApiError(503, _BROKEN, code="engine_stopped").response()(scope, receive, send)
            return
        await JSONResponse(self._writer.whole(pieces, self._answer))(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for found in self._answer.pieces():
            await send({"type": "http.response.body", "body": self._chunks(found), "more_body": True})
        if not self._answer.client_left:
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _chunks(self, pieces: list[Piece]) -> bytes:
        """Everything that came since the last write, one event a piece."""
        last = pieces[-1]
        if _broken(last):
            error = ApiError(503, _BROKEN, code="engine_stopped").body()
            return b"".join([*map(self._writer.chunk, pieces[:-1]), sse(error)])
        parts = [self._writer.chunk(piece) for piece in pieces]
        if last.finished is not None:
            if self._writer.fields.stream_options.include_usage:
                parts.append(self._writer.usage_chunk(self._answer))
            parts.append(DONE)
        return b"".join(parts)


def _broken(piece: Piece) -> bool:
    return piece.finished in (FinishReason.FAILED, FinishReason.CANCELLED)
