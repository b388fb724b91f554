"""What each request lived through, at a price per step that does not grow with the batch.

Every request that got a token in the same two updates had the same gap between them. So one list holds the gap between
neighbouring updates, and a request keeps only the update of its first token and, rarely, those that passed it over; its
gaps are cut out of the list when it ends.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from engine.interface import FinishReason, RequestRecord

# Trimmed from here on: 65,536 updates of half a megabyte together.
_MOST_KEPT = 1 << 16


class Track:
    """One request from its arrival in this process to its end. Times in seconds on the engine's clock."""

    __slots__ = (
        "admitted", "arrival_s", "cached", "decoding", "first", "first_s", "missed", "number", "request", "scheduled_s",
    )  # fmt: skip

    def __init__(self, request: Any, number: int, arrival_s: float) -> None:
        self.request = request  # vLLM's
        self.number = number  # in order of arrival
        self.arrival_s = arrival_s
        self.scheduled_s: float | None = None
        self.cached = 0
        self.admitted = -1  # running number of its latest admission
        self.decoding = False  # its latest scheduling left no prompt token uncomputed
        self.first = -1  # update of its first token
        self.first_s = 0.0
        self.missed: list[int] | None = None  # updates since then without a token for it


class TokenClock:
    """The instants at which tokens came, and who got one."""

    def __init__(self, gap_bounds_s: Sequence[float]) -> None:
        self._bounds_s = tuple(gap_bounds_s)
        self._gaps_s: list[float] = []
        self._base = 0  # update of the first gap kept
        self._latest_s = 0.0
        self._latest = -1
        self._closing: deque[tuple[Track, list[float], int, float, FinishReason]] = deque()
        self._closed = 0
        self.streaming: dict[str, Track] = {}  # those with a first token, not ended

    def update(self, now_s: float, first: Sequence[Track], outputs: Iterator[str], count: int) -> None:
        """Tokens came for ``count`` requests, ``first`` (those for whom it may be the first) among them.

        outputs: the ids of all of them; only read when somebody was passed over.
        """
        self._gaps_s.append(now_s - self._latest_s)
        self._latest_s = now_s
        self._latest += 1
        streaming = self.streaming
        for track in first:
            if track.first < 0:
                track.first, track.first_s = self._latest, now_s
                streaming[track.request.request_id] = track
        if count != len(streaming):
            self._pass_over(set(outputs))
        if len(self._gaps_s) > _MOST_KEPT:
            self._trim()

    def _pass_over(self, got: set[str]) -> None:
        for request_id, track in self.streaming.items():
            if request_id not in got:
                if track.first == self._latest:
                    track.first = -2  # it got none after all
                elif track.missed is None:
                    track.missed = [self._latest]
                else:
                    track.missed.append(self._latest)
        for request_id in [name for name, track in self.streaming.items() if track.first == -2]:
            self.streaming.pop(request_id).first = -1

    def _trim(self) -> None:
        oldest = min((track.first for track in self.streaming.values()), default=self._latest)
        del self._gaps_s[: oldest - self._base]
        self._base = oldest

    def end(self, track: Track, now_s: float, why: FinishReason) -> None:
        """Its last token came with the latest update that did not pass it over."""
        self.streaming.pop(track.request.request_id, None)
        gaps_s = self._gaps_s[track.first + 1 - self._base :] if track.first >= 0 else []
        self._closing.append((track, gaps_s, self._latest, now_s, why))

    def closed(self, most: int) -> Iterator[RequestRecord]:
        """Records of up to ``most`` requests that ended, in the order of their end. Apart, so that a step in which many
        end does not pay for all of them."""
        while most > 0 and self._closing:
            track, gaps_s, _, finish_s, why = self._closing.popleft()
            yield self._record(track, gaps_s, finish_s, why)
            most -= 1

    @property
    def closing(self) -> int:
        """Requests that ended and have no record yet."""
        return len(self._closing)

    def _record(self, track: Track, between_s: list[float], finish_s: float, why: FinishReason) -> RequestRecord:
        gaps_s = sorted(between_s if track.missed is None else _joined(between_s, track.first, track.missed))
        count = len(gaps_s)
        request = track.request
        self._closed += 1
        return RequestRecord(
            sequence=self._closed - 1,
            arrival_s=track.arrival_s,
            scheduled_s=track.scheduled_s,
            ttft_s=track.first_s - track.arrival_s if track.first >= 0 else None,
            finish_s=finish_s,
            prompt_tokens=request.num_prompt_tokens,
            cached_tokens=track.cached,
            output_tokens=request.num_output_tokens,
            gap_count=count,
            longest_gap_s=gaps_s[-1] if gaps_s else None,
            preemptions=request.num_preemptions,
            finished=why,
            gap_over=tuple(count - bisect_right(gaps_s, bound_s) for bound_s in self._bounds_s),
        )


def _joined(between_s: list[float], first: int, missed: list[int]) -> Iterator[float]:
    """The gaps of a request that some updates passed over: those around such an update are one."""
    passed = set(missed)
    gap_s = 0.0
    for place, piece_s in enumerate(between_s):
        gap_s += piece_s
        if first + 1 + place not in passed:
            yield gap_s
            gap_s = 0.0
