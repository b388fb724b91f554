"""OpenAI's answers as JSON: whole ones and the chunks of a stream."""

import json
import time
import uuid
from typing import Any

from rooftune.engine.interface import FinishReason
from rooftune.engine.server_request import Generation
from rooftune.engine.server_stream import Answer, Piece

DONE = b"data: [DONE]\n\n"
_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


def sse(value: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: %s\n\n" % json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


class Writer:
    """Writes one answer, as a message (chat) or a completion."""

    def __init__(self, model_id: str, generation: Generation) -> None:
        self._chat = generation.chat
        self._prompt_tokens = len(generation.prompt)
        self._with_tokens = generation.with_tokens
        self._include_usage = generation.include_usage
        self._usage_as_it_grows = generation.usage_as_it_grows
        self._written_tokens = 0
        self._first = True
        self._kind = "chat.completion" if self._chat else "text_completion"
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
        kind = "chat.completion.chunk" if self._chat else self._kind
        chunk = self._head | {"object": kind, "choices": [choice]}
        if self._include_usage:
            chunk["usage"] = self._counts(self._written_tokens) if self._usage_as_it_grows else None
        return sse(chunk)

    def usage_chunk(self, answer: Answer) -> bytes:
        """The last chunk of a stream with ``include_usage``."""
        kind = "chat.completion.chunk" if self._chat else self._kind
        return sse(self._head | {"object": kind, "choices": [], "usage": self._usage(answer)})

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
        if self._with_tokens:
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
