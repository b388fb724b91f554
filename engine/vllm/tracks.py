"""The history of each request, at a cost per step that does not grow with the batch.

Every request that got a token in the same two updates had the same gap between them. So one list holds the instants of
the updates, and a request keeps only the update of its first token and, rarely, those that passed it over; its instants
are cut out of the list when it ends, and its gaps are computed at a read.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence, Set
from itertools import pairwise
from typing import Any

from rooftune.engine.interface import FinishReason, RequestRecord

# Trimmed from here on: 65,536 updates of half a megabyte together.
_MOST_KEPT = 1 << 16


class Track:
    """One request from its arrival in this process to its end. Times in seconds on the engine's clock."""

    __slots__ = (
        "admitted", "arrival_s", "cached", "decoding", "first", "first_s", "missed", "number", "request", "scheduled_s",
    )  # fmt: skip

    def __init__(self, request: Any, number: int, arrival_s: float) -> None:
        self.request = request  # vLLM's, until it ends
        self.number = number  # in order of arrival
        self.arrival_s = arrival_s
        self.scheduled_s: float | None = None
        self.cached = 0
        self.admitted = -1  # running number of its latest admission
        self.decoding = False  # its latest scheduling left no prompt token uncomputed
        self.first = -1  # update of its first token
        self.first_s = 0.0
        self.missed: list[int] | None = None  # updates since then without a token for it


# Its track, the instants since its first token, the end (s), tokens in and out, preemptions, status, stop strings.
_Ended = tuple[Track, list[float], float, tuple[int, int, int, Any], Any]


class TokenClock:
    """The instants at which tokens came, and for which requests. For the engine's thread; ``closed``: one at a time."""

    def __init__(self, gap_bounds_s: Sequence[float]) -> None:
        self._bounds_s = tuple(gap_bounds_s)
        self._base = 0  # update of the first instant kept
        self._closing: deque[_Ended] = deque()
        self._closed = 0
        self.ends_s: list[float] = []  # an update that passes no request over and begins none is just one more instant
        self._trim_at = _MOST_KEPT
        self.streaming: dict[str, Track] = {}  # those with a first token, not ended

    def update(self, now_s: float, first: Sequence[Track], got: Set[str]) -> None:
        """Tokens came for ``got``, ids of requests, ``first`` (those for whom it may be the first) among them."""
        self.ends_s.append(now_s)
        latest = self._base + len(self.ends_s) - 1
        streaming = self.streaming
        for track in first:
            if track.first < 0:
                track.first, track.first_s = latest, now_s
                streaming[track.request.request_id] = track
        if len(got) != len(streaming) or not got >= streaming.keys():
            self._pass_over(got, latest)

    def _pass_over(self, got: Set[str], latest: int) -> None:
        for request_id, track in self.streaming.items():
            if request_id not in got:
                if track.first == latest:
                    track.first = -2  # it got none after all
                elif track.missed is None:
                    track.missed = [latest]
                else:
                    track.missed.append(latest)
        for request_id in [name for name, track in self.streaming.items() if track.first == -2]:
            self.streaming.pop(request_id).first = -1

    def latest_s(self, track: Track) -> float | None:
        """When the latest token of a request came that has not ended."""
        if track.first < 0:
            return None
        latest, missed = self._base + len(self.ends_s) - 1, track.missed or []
        for passed in reversed(missed):
            if passed != latest:
                break
            latest -= 1
        return self.ends_s[latest - self._base]

    def trim(self) -> None:
        """Instants that no request needs any more go, once there are many."""
        if len(self.ends_s) <= self._trim_at:
            return
        latest = self._base + len(self.ends_s) - 1
        oldest = min((track.first for track in self.streaming.values()), default=latest)
        del self.ends_s[: oldest - self._base]
        self._base = oldest
        self._trim_at = max(_MOST_KEPT, 2 * len(self.ends_s))

    def end(self, track: Track, request: Any, now_s: float) -> None:
        """Its last token came with the latest update that did not pass it over. What the record needs of vLLM's
        request is read now, and no more of it is kept."""
        self.streaming.pop(request.request_id, None)
        ends_s = self.ends_s[track.first - self._base :] if track.first >= 0 else []
        parameters = request.sampling_params
        lived = (request.num_prompt_tokens, request.num_output_tokens, request.num_preemptions, request.status)
        track.request = None
        self._closing.append((track, ends_s, now_s, lived, getattr(parameters, "stop", None)))

    def closed(self, most: int) -> Iterator[RequestRecord]:
        """Records of up to ``most`` requests that ended, in the order of their end: not made in a step."""
        while most > 0 and self._closing:
            yield self._record(*self._closing.popleft())
            most -= 1

    @property
    def closing(self) -> int:
        """Requests that ended and have no record yet."""
        return len(self._closing)

    def _record(
        self, track: Track, ends_s: list[float], finish_s: float, lived: tuple[int, int, int, Any], stops: Any
    ) -> RequestRecord:
        between_s = [later_s - earlier_s for earlier_s, later_s in pairwise(ends_s)]
        gaps_s = sorted(between_s if track.missed is None else _joined(between_s, track.first, track.missed))
        count = len(gaps_s)
        prompt_tokens, output_tokens, preemptions, status = lived
        self._closed += 1
        return RequestRecord(
            sequence=self._closed - 1,
            arrival_s=track.arrival_s,
            scheduled_s=track.scheduled_s,
            ttft_s=track.first_s - track.arrival_s if track.first >= 0 else None,
            finish_s=finish_s,
            prompt_tokens=prompt_tokens,
            cached_tokens=track.cached,
            output_tokens=output_tokens,
            gap_count=count,
            longest_gap_s=gaps_s[-1] if gaps_s else None,
            preemptions=preemptions,
            ended=why(status.name, bool(stops) and output_tokens > 0),
            gap_over=tuple(count - bisect_right(gaps_s, bound_s) for bound_s in self._bounds_s),
        )


def why(status: str, by_string: bool) -> FinishReason:
    """From vLLM's status of a request that ended. by_string: it had output and stop strings, which the frontend finds
    and then aborts: that is how such an answer ends."""
    if status in ("FINISHED_STOPPED", "FINISHED_REPETITION"):
        return FinishReason.STOP
    if status in ("FINISHED_LENGTH_CAPPED", "FINISHED_IGNORED"):
        return FinishReason.LENGTH
    if status == "FINISHED_ABORTED":
        return FinishReason.STOP if by_string else FinishReason.CANCELLED
    return FinishReason.FAILED


def _joined(between_s: list[float], first: int, missed: list[int]) -> Iterator[float]:
    """The gaps of a request that some updates passed over: those around such an update are one."""
    passed = set(missed)
    gap_s = 0.0
    for place, piece_s in enumerate(between_s):
        gap_s += piece_s
        if first + 1 + place not in passed:
            yield gap_s
            gap_s = 0.0
