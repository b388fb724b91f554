"""One request under way: what has come of it so far, and the row that it becomes."""

import math
from dataclasses import dataclass, field

import numpy as np
from rooftune.tuner.replay.result_file import INTERRUPTED, RequestPart
from rooftune.tuner.replay.stream import Event


@dataclass(slots=True)
class Flight:
    """Times are seconds since the start of the replay.

    sent_s: NaN until it is sent. token_s: when each output token was read; event_tokens: how many tokens each output
    event held. closed: the server said that the answer is complete.
    """

    index: int
    planned_s: float
    sent_s: float = math.nan
    token_s: list[float] = field(default_factory=list)
    event_tokens: list[int] = field(default_factory=list)
    last_is_notice: bool = False
    counted_tokens: int | None = None
    cached_tokens: int | None = None
    closed: bool = False
    ended: bool = False
    failure: str | None = INTERRUPTED  # until something else has become of it
    detail: str | None = None

    def take(self, event: Event, now_s: float) -> None:
        """Adds one event that was read at ``now_s``."""
        if event.output_tokens is not None:
            self.counted_tokens = event.output_tokens
        if event.cached_tokens is not None:
            self.cached_tokens = event.cached_tokens
        if event.error is not None:
            self.fail("server_error", event.error)
        if event.tokens:
            self.token_s += [now_s] * event.tokens
            self.event_tokens.append(event.tokens)
            self.last_is_notice = event.notice
        self.closed = self.closed or event.done or event.finish is not None

    def fail(self, failure: str, detail: str | None = None) -> None:
        """The first failure stands."""
        if not self.ended:
            self.ended, self.failure, self.detail = True, failure, detail

    def finish(self) -> None:
        """The stream ended without an error on the way."""
        # Some servers name the reason of the end in an event of its own, without a token; their count tells.
        if self.last_is_notice and self.counted_tokens == len(self.token_s) - 1:
            self.token_s.pop()
            self.event_tokens.pop()
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
