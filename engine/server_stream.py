"""From the engine's thread to an answer that an event loop writes: events, text, stop strings, the client's leaving."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass

from rooftune.engine.interface import Engine, FinishReason, GenerationRequest, Sink, TokenEvent
from rooftune.engine.server_request import Generation
from rooftune.engine.server_text import Detokenizer, StopStrings, Tokenizer
from starlette.types import Receive


def deliver_on(loop: asyncio.AbstractEventLoop) -> Callable[[Iterable[tuple[Sink, TokenEvent]]], None]:
    """For ``Engine.deliver_with``: the events of one step wake the loop once."""

    def deliver(events: Iterable[tuple[Sink, TokenEvent]]) -> None:
        try:
            loop.call_soon_threadsafe(_call, events)
        except RuntimeError:  # the event loop is closed, so nobody is left to hear of it
            return

    return deliver


def _call(events: Iterable[tuple[Sink, TokenEvent]]) -> None:
    for sink, event in events:
        sink(event)


@dataclass(frozen=True, slots=True)
class Piece:
    """What one event adds to the answer. text: may be empty. finished: set on the last piece."""

    text: str
    token_ids: tuple[int, ...]
    finished: FinishReason | None


class Answer:
    """One request in the engine: submitted when made, cancelled when closed before its end.

    Lives on the event loop's thread. Raises what ``Engine.submit`` raises.
    """

    def __init__(self, engine: Engine, generation: Generation, tokenizer: Tokenizer, arrived_s: float) -> None:
        self._engine = engine
        self._events: list[TokenEvent] = []
        self._woken = asyncio.Event()
        self._text = Detokenizer(tokenizer, generation.prompt)
        self._stops = StopStrings(generation.stops)
        self.output_tokens = 0
        self.cached_tokens = 0
        self.client_left = False
        self._ended = False
        request = GenerationRequest(
            prompt_token_ids=generation.prompt,
            max_tokens=generation.max_tokens,
            sampling=generation.sampling,
            stop_token_ids=frozenset(generation.stop_token_ids),
            ignore_eos=generation.ignore_eos,
        )
        self._id = engine.submit(request, self._hear, arrived_s)

    def close(self, why: FinishReason = FinishReason.CANCELLED) -> None:
        """Nothing more is wanted; the engine frees what it holds."""
        if not self._ended:
            self._ended = True
            self._engine.cancel(self._id, why)

    def leave(self) -> None:
        """The client has gone: ``pieces`` ends without another piece."""
        self.client_left = True
        self.close()
        self._woken.set()

    async def pieces(self) -> AsyncIterator[list[Piece]]:
        """All pieces that have come meanwhile, again and again until the last one or until the client left."""
        while not self._ended:
            await self._woken.wait()
            self._woken.clear()
            events, self._events = self._events, []
            found: list[Piece] = []
            for event in events:
                if not self._ended:
                    found.append(self._piece(event))
            if found and not self.client_left:
                yield found

    def _hear(self, event: TokenEvent) -> None:
        self._events.append(event)
        self._woken.set()

    def _piece(self, event: TokenEvent) -> Piece:
        self.output_tokens += len(event.token_ids)
        self.cached_tokens = event.cached_tokens
        # The token that ended the answer is counted, but no part of its text.
        spoken = event.token_ids[:-1] if event.finished is FinishReason.STOP else event.token_ids
        text = "".join(self._stops.push(self._text.push(token)) for token in spoken)
        finished = event.finished
        if finished is not None and self._stops.hit is None:
            text += self._stops.push(self._text.finish())
            text += self._stops.finish() if self._stops.hit is None else ""
        if self._stops.hit is not None:
            finished = FinishReason.STOP
            if event.finished is None:
                self.close(FinishReason.STOP)
        self._ended = self._ended or finished is not None
        return Piece(text, event.token_ids, finished)


async def watch(receive: Receive, answer: Answer) -> None:
    """Tells the answer when its client goes away; to be run beside the writing, with the body read already."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            answer.leave()
            return
