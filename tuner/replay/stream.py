"""Server-sent events of an OpenAI completion: bytes in, what each event says out. No clock, no socket."""

import json
from dataclasses import dataclass
from typing import Any

MAX_EVENT_BYTES = 16 * 1024 * 1024
_ENDS_BADLY = ("abort", "error", "cancelled")


class BadStream(Exception):
    """The bytes are no stream of completion events; the text says why. Becomes the request's failure."""


@dataclass(frozen=True, slots=True)
class Event:
    """One event. tokens: output tokens in it (1 unless it lists its token ids). notice: an empty text that only
    names the reason of the end. finish: that reason. output_tokens, cached_tokens: the server's own counts, in the
    event that holds them. error: the server's message when it gave up. done: the end mark."""

    tokens: int = 0
    notice: bool = False
    finish: str | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    error: str | None = None
    done: bool = False


class EventReader:
    """Cuts a stream into events, however its bytes arrive."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Event]:
        """Events that end in ``data``. Raises BadStream."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise BadStream(f"an event is above {MAX_EVENT_BYTES} bytes")
        # Each data line of these servers is a whole JSON object; comments and other fields mean nothing here.
        payloads = (line[5:].strip() for line in lines if line.startswith(b"data:"))
        return [_event(payload) for payload in payloads if payload]


def _event(payload: bytes) -> Event:
    if payload == b"[DONE]":
        return Event(done=True)
    try:
        value = json.loads(payload)
    except ValueError:
        raise BadStream(f"an event is no JSON: {payload[:80]!r}") from None
    if not isinstance(value, dict):
        raise BadStream("an event is no JSON object")
    if value.get("error"):
        return Event(error=message_of(value) or "an error without a message")
    output_tokens, cached_tokens = _usage(value.get("usage"))
    choices = value.get("choices")
    if not isinstance(choices, list) or not choices:
        return Event(output_tokens=output_tokens, cached_tokens=cached_tokens)
    choice = choices[0]
    if not isinstance(choice, dict):
        raise BadStream("a choice is no JSON object")
    ids, finish = choice.get("token_ids"), choice.get("finish_reason")
    if finish in _ENDS_BADLY:
        return Event(error=f"finish_reason {finish}")
    return Event(
        tokens=len(ids) if isinstance(ids, list) else 1,
        notice=finish is not None and not choice.get("text") and not ids,
        finish=None if finish is None else str(finish),
        output_tokens=output_tokens,
        cached_tokens=cached_tokens,
    )


def _usage(usage: Any) -> tuple[int | None, int | None]:
    if not isinstance(usage, dict):
        return None, None
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return _count(usage.get("completion_tokens")), _count(cached)


def _count(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None


def message_of(value: Any) -> str:
    """The message in an error body, in the shapes that OpenAI-compatible servers use; empty when there is none."""
    found = value
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and key in found:
            found = found[key]
    return found[:300] if isinstance(found, str) else ""
