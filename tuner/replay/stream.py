"""Server-sent events of an OpenAI completion, and what a request makes of them. No clock, no socket."""

import json
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rooftune.tuner.replay.result_file import INTERRUPTED, RequestPart

MAX_EVENT_BYTES = 16 * 1024 * 1024
_ENDS_BADLY = ("abort", "error", "cancelled")


class BadStream(Exception):
    """The bytes are no stream of completion events; the text says why. Becomes the request's failure."""


class EventReader:
    """Cuts a stream into events, however its bytes arrive."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Payloads of the events that end in ``data``. Raises BadStream."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise BadStream(f"an event is above {MAX_EVENT_BYTES} bytes")
        # Each data line of these servers is a whole JSON object; comments and other fields mean nothing here.
        payloads = (line[5:].strip() for line in lines if line.startswith(b"data:"))
        return [payload for payload in payloads if payload]


def _count(value: Any, known: int | None) -> int | None:
    return value if type(value) is int and value >= 0 else known


def message_of(value: Any) -> str:
    """The message in an error body, in the shapes that OpenAI-compatible servers use; empty when there is none."""
    found = value
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and key in found:
            found = found[key]
    return found[:300] if isinstance(found, str) else ""


@dataclass(slots=True)
class Flight:
    """Times are seconds since the start of the replay.

    sent_s: NaN until it is sent. token_s: when each output token was read. last_is_notice: the latest is an empty text
    that only names the reason of the end. closed: the server said that the answer is complete.
    """

    index: int
    planned_s: float
    sent_s: float = math.nan
    token_s: list[float] = field(default_factory=list)
    last_is_notice: bool = False
    counted_tokens: int | None = None
    cached_tokens: int | None = None
    closed: bool = False
    ended: bool = False
    failure: str | None = INTERRUPTED  # until something else has become of it
    detail: str | None = None

    def take(self, payload: bytes, now_s: float) -> None:
        """Adds one event that was read at ``now_s``. Raises BadStream."""
        if payload == b"[DONE]":
            self.closed = True
            return
        try:
            value = json.loads(payload)
        except ValueError:
            raise BadStream(f"an event is no JSON: {payload[:80]!r}") from None
        if not isinstance(value, dict):
            raise BadStream("an event is no JSON object")
        if value.get("error"):
            self.fail("server_error", message_of(value) or "an error without a message")
            return
        self._take_usage(value.get("usage"))
        choices = value.get("choices")
        if isinstance(choices, list) and choices:
            self._take_choice(choices[0], now_s)

    def _take_usage(self, usage: Any) -> None:
        """The server's own counts, in the event that holds them."""
        if not isinstance(usage, dict):
            return
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        self.counted_tokens = _count(usage.get("completion_tokens"), self.counted_tokens)
        self.cached_tokens = _count(cached, self.cached_tokens)

    def _take_choice(self, choice: Any, now_s: float) -> None:
        """Output tokens: 1 unless the event lists its token ids."""
        if not isinstance(choice, dict):
            raise BadStream("a choice is no JSON object")
        ids, finish = choice.get("token_ids"), choice.get("finish_reason")
        if finish in _ENDS_BADLY:
            self.fail("server_error", f"finish_reason {finish}")
            return
        tokens = len(ids) if isinstance(ids, list) else 1
        if tokens:
            self.token_s += [now_s] * tokens
            self.last_is_notice = finish is not None and not choice.get("text") and not ids
        self.closed = self.closed or finish is not None

    def fail(self, failure: str, detail: str | None = None) -> None:
        """The first failure stands."""
        if not self.ended:
            self.ended, self.failure, self.detail = True, failure, detail

    def finish(self) -> None:
        """The stream ended without an error on the way."""
        # Some servers name the reason of the end in an event of its own, without a token; their count tells.
        if self.last_is_notice and self.counted_tokens == len(self.token_s) - 1:
            self.token_s.pop()
        if not self.closed:
            self.fail("cut_short", "the stream ended without its end mark")
        elif not self.token_s:
            self.fail("no_tokens", "the answer holds no token")
        elif not self.ended:
            self.ended, self.failure = True, None

    def row(self, tenant: str, prompt_tokens: int, asked_tokens: int) -> RequestPart:
        """Plain values, to the nanosecond."""
        times = self.token_s
        output = max(self.counted_tokens or 0, len(times))
        first, last = (times[0], times[-1]) if times else (None, None)
        tpot_s = (times[-1] - times[0]) / (output - 1) if output > 1 and times and self.failure is None else None
        gaps = np.diff(np.array(times, dtype=np.float64)).round(9)
        return RequestPart(
            index=self.index,
            tenant=tenant,
            planned_s=round(self.planned_s, 9),
            sent_s=round(self.sent_s, 9),
            ttft_s=None if first is None else max(round(first - self.sent_s, 9), 0.0),
            finish_s=None if last is None or self.failure is not None else round(last, 9),
            tpot_s=None if tpot_s is None else round(tpot_s, 9),
            prompt_tokens=prompt_tokens,
            asked_tokens=asked_tokens,
            output_tokens=output,
            cached_tokens=self.cached_tokens,
            gaps_s=tuple(gaps.tolist()),
            failure=self.failure,
            detail=None if self.detail is None else self.detail[:300],
        )
