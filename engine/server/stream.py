"""From the engine's thread to an answer that an event loop writes: events, text, stop strings, the client's leaving."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from starlette.types import Receive

from rooftune.engine.interface import FinishReason, GenerationRequest, Sink, TokenEvent
from rooftune.engine.loop import deliver_here
from rooftune.engine.running import RunningEngine
from rooftune.engine.server.request import Generation, Tokenizer

UNFINISHED = "\ufffd"  # what a decoder writes for bytes that do not (yet) form a character
_CONTEXT_TOKENS = 6
_MOST_WINDOW_TOKENS = 64  # decoded again for every token, so it must not grow with the answer
# A character is at most 4 bytes. A longer run of these is not an unfinished character but invalid bytes.
_MOST_UNFINISHED = 16
_STILL_OPEN = 4


class Detokenizer:
    """Text of one growing answer. ``push`` returns what became certain; all pieces together are the whole text.

    prompt: the tokens before the answer; some tokenizers write the first word otherwise without them.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._window = _context(tokenizer, prompt)
        before = tokenizer.decode(self._window) if self._window else ""
        self._sent = len(_certain(before))
        self._prompts_own = before[self._sent :]  # an unfinished character of the prompt, for the answer to finish
        self._clean = 0 if self._prompts_own else len(self._window)  # here no character is cut

    def push(self, token: int) -> str:
        """The text that is certain after one more token; may be empty."""
        self._window.append(token)
        text = self._tokenizer.decode(self._window)
        certain = _certain(text)
        piece = self._take(certain)
        if len(certain) == len(text) and piece:
            self._slide(self._clean, 0)
        elif len(self._window) > _MOST_WINDOW_TOKENS:  # special tokens only, or invalid bytes
            self._slide(len(self._window) - _CONTEXT_TOKENS, len(text) - self._sent)
        return piece

    def finish(self) -> str:
        """What is left at the end, unfinished characters included."""
        return self._take(self._tokenizer.decode(self._window))

    def _take(self, text: str) -> str:
        piece = text[self._sent :]
        self._sent += len(piece)
        if piece and self._prompts_own:
            # Still broken: then it is the prompt's and no part of the answer.
            piece, self._prompts_own = piece.removeprefix(self._prompts_own), ""
        return piece

    def _slide(self, first: int, unsent: int) -> None:
        """Drop the tokens before ``first``; what follows stays as context, such as the tokens of the latest piece."""
        self._window = self._window[first:]
        self._clean = len(self._window)
        self._sent = max(0, len(self._tokenizer.decode(self._window)) - unsent)


def _context(tokenizer: Tokenizer, prompt: Sequence[int]) -> list[int]:
    """The prompt's last tokens, from the beginning of a character on.

    Where bytes are tokens, some decoders take a run of them as a whole: one that begins within a character would be
    nothing but unfinished characters, the answer's own included.
    """
    for count in range(_CONTEXT_TOKENS, min(len(prompt), _MOST_WINDOW_TOKENS) + 1):
        window = list(prompt[-count:])
        if not tokenizer.decode(window).startswith(UNFINISHED):
            return window
    return list(prompt[-_CONTEXT_TOKENS:])


def _certain(text: str) -> str:
    """The part that further tokens cannot change."""
    body = text.rstrip(UNFINISHED)
    unfinished = len(text) - len(body)
    if unfinished <= _MOST_UNFINISHED:
        return body
    return text[: len(text) - _STILL_OPEN]


class StopStrings:
    """Cuts the text before the first stop string, wherever the pieces are split."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.hit: str | None = None

    def push(self, piece: str) -> str:
        """The text to send now. On a hit it ends before the stop string; after one it is always empty."""
        if self.hit is not None:
            return ""
        if not self._stops:
            return piece
        text = self._held + piece
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            # The one that is complete first, as if the text had come a character at a time; of several the longest.
            _, at, self.hit = min(found)
            self._held = ""
            return text[:at]
        keep = self._could_begin(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back, at the end of the answer."""
        held, self._held = self._held, ""
        return held

    def _could_begin(self, text: str) -> int:
        """Length of the longest suffix of ``text`` that begins a stop string."""
        longest = min(len(text), max(len(stop) for stop in self._stops) - 1)
        for size in range(longest, 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                return size
        return 0


def deliver_on(loop: asyncio.AbstractEventLoop) -> Callable[[Iterable[tuple[Sink, TokenEvent]]], None]:
    """For ``RunningEngine.deliver_with``: the events of one step wake the loop once."""

    def deliver(events: Iterable[tuple[Sink, TokenEvent]]) -> None:
        try:
            loop.call_soon_threadsafe(deliver_here, events)
        except RuntimeError:  # the event loop is closed, so no client is left to answer
            return

    return deliver


@dataclass(frozen=True, slots=True)
class Piece:
    """What one event adds to the answer. text: may be empty. finished: set on the last piece."""

    text: str
    token_ids: tuple[int, ...]
    finished: FinishReason | None


class Answer:
    """One request in the engine: submitted when made, cancelled when closed before its end.

    Lives on the event loop's thread. Raises what ``RunningEngine.submit`` raises.
    """

    def __init__(self, engine: RunningEngine, generation: Generation, tokenizer: Tokenizer, arrived_s: float) -> None:
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
            stop_token_ids=generation.stop_token_ids,
            ignore_eos=generation.fields.ignore_eos,
        )
        self._id = engine.submit(request, self._hear, arrived_s)

    def close(self, why: FinishReason = FinishReason.CANCELLED) -> None:
        """Cancel the request; the engine frees what it holds."""
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
    """Stops the answer when its client leaves; runs beside the writing, after the body was read."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            answer.leave()
            return


class ByteTokenizer:
    """Tokens 0..255 are bytes; above that every token is a space and its number, for engines that make up tokens."""

    def __init__(self, vocab_tokens: int) -> None:
        self.vocab_tokens = vocab_tokens

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        parts = (bytes((token,)) if token < 256 else b" %d" % token for token in token_ids)
        return b"".join(parts).decode("utf-8", "replace")

    def chat_text(self, messages: Sequence[Mapping[str, str]]) -> str:
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return "".join([*lines, "assistant: "])
