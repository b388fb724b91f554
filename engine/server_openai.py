"""The routes of OpenAI's interface: /v1/completions, /v1/chat/completions, /v1/models."""

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field

from rooftune.engine.interface import Busy, Engine, FinishReason, RejectReason, Stopping, TooLong
from rooftune.engine.server_answers import DONE, Writer, sse
from rooftune.engine.server_auth import SecretFile, require
from rooftune.engine.server_errors import COME_AGAIN_S, TOO_LONG_CODE, ApiError
from rooftune.engine.server_limits import BodyRoom, Limits, parse_object, read_body
from rooftune.engine.server_prompt import Served
from rooftune.engine.server_request import Generation, read_generation
from rooftune.engine.server_stream import Answer, Piece, watch
from rooftune.engine.server_text import Tokenizer
from rooftune.policies.errors import InputError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

_PROMPT_THREADS = 4
_BROKEN = "the engine stopped before the answer was complete; send the request again"


@dataclass(frozen=True)
class Service:
    """Everything that answering takes. api_key: None = anybody may ask. on_rejected: hears of requests refused before
    they reached the engine; those it refuses itself it tells on its own."""

    engine: Engine
    tokenizer: Tokenizer
    served: Served
    limits: Limits = field(default_factory=Limits)
    api_key: SecretFile | None = None
    on_rejected: Callable[[RejectReason], None] = lambda reason: None


def openai_routes(service: Service) -> list[Route]:
    """Routes that need the API key when there is one."""
    started = int(time.time())
    # Threads of their own: the tuning protocol and the draining use the default ones, and wait for no prompt.
    pool = ThreadPoolExecutor(_PROMPT_THREADS, thread_name_prefix="prompt")
    room = BodyRoom(service.limits)

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
    named = {"id": served.model_id, "object": "model", "created": started, "owned_by": "rooftune"}
    # Not OpenAI's: the first name is vLLM's, the second tells a load generator which token ids it may send.
    return named | {"max_model_len": served.max_model_tokens, "vocab_size": served.vocab_tokens}


def _generating(
    service: Service, pool: Executor, room: BodyRoom, *, chat: bool
) -> Callable[[Request], Awaitable[Response]]:
    async def generating(request: Request) -> Response:
        arrived_s = service.engine.now_s()
        require(service.api_key, request)
        with room.share() as take:
            body = await read_body(request, service.limits.body_bytes, service.limits.body_s, take)
            # Parsing, encoding and hashing a long prompt takes long enough to be felt by every other stream.
            begin = functools.partial(_begin, service, body, chat, arrived_s)
            generation, answer = await asyncio.get_running_loop().run_in_executor(pool, begin)
        return AnswerResponse(answer, Writer(service.served.model_id, generation), generation)

    return generating


def _begin(service: Service, body: bytes, chat: bool, arrived_s: float) -> tuple[Generation, Answer]:
    """The checked request and its answer, which the engine has begun; refusals of either become ApiErrors."""
    try:
        fields = parse_object(body)
        generation = read_generation(
            fields, chat=chat, served=service.served, tokenizer=service.tokenizer, limits=service.limits
        )
    except ApiError as error:
        too_long = error.code == TOO_LONG_CODE
        service.on_rejected(RejectReason.TOO_LONG if too_long else RejectReason.INVALID)
        raise
    try:
        return generation, Answer(service.engine, generation, service.tokenizer, arrived_s)
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
    """Writes an answer, streamed or whole, and gives it up the moment its client leaves."""

    def __init__(self, answer: Answer, writer: Writer, generation: Generation) -> None:
        super().__init__()
        self._answer = answer
        self._writer = writer
        self._generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._answer
        watcher = asyncio.create_task(watch(receive, answer))
        try:
            if self._generation.stream:
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
            parts += [self._writer.usage_chunk(self._answer), DONE] if self._generation.include_usage else [DONE]
        return b"".join(parts)


def _broken(piece: Piece) -> bool:
    return piece.finished in (FinishReason.FAILED, FinishReason.CANCELLED)
