"""The engine's own times of our requests, read from the tuning protocol while and after they run."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import httpx

from rooftune.policies.errors import InputError
from rooftune.policies.wire import MAX_ANSWER_BYTES, RequestColumns, parse
from rooftune.tuner.replay.client import get
from rooftune.tuner.replay.result_file import EnginePart, EngineRequestPart, RequestPart

READ_EVERY_S = 15.0
# A row is ours when the engine had the request no earlier than we sent it and ended it no later than we read its
# end, both within this much: what reading two clocks over a network and a busy client may be off.
SLACK_S = 1.0
_LAST_READS = 8
_LOOK_AHEAD = 64
_BETWEEN_S = 0.25
_SAME = EngineRequestPart.model_fields.keys() - {"index", "gap_over"}  # columns under the same name on both sides


class EngineReader:
    """Collects the rows of requests that end from ``begin`` on.

    now_s: this side's clock, whatever its zero. offset_s: the engine's clock minus this one, by the quickest read.
    """

    def __init__(self, http: httpx.AsyncClient, base: str, now_s: Callable[[], float]) -> None:
        self._http = http
        self._url = f"{base}/tuning/v1/requests"
        self._now_s = now_s
        self._after = -1
        self._boot_id: str | None = None
        self._best_trip_s = float("inf")
        self.offset_s = 0.0
        self.pages: list[RequestColumns] = []

    async def begin(self) -> None:
        """Find where the rows stand. Raises RooftuneError when the routes are not there."""
        await self._read()
        self.pages.clear()

    async def follow(self) -> None:
        """Read now and then until cancelled, so that the ring buffer never runs over."""
        while True:
            await asyncio.sleep(READ_EVERY_S)
            await self._read()

    async def end(self, expected: int) -> None:
        """Read the rest: until ``expected`` rows are there, or a few times."""
        for _ in range(_LAST_READS):
            await self._read()
            if sum(len(page.sequence) for page in self.pages) >= expected:
                return
            await asyncio.sleep(_BETWEEN_S)

    async def _read(self) -> None:
        asked_s = self._now_s()
        url = f"{self._url}?after={self._after}"
        status, content = await get(self._http, url, "give its token with --tuning-token-file")
        answered_s = self._now_s()
        if status != 200:
            raise InputError(
                f"{self._url} answers {status}: no tuning protocol there; "
                "give its address with --tuning-url, or leave the engine's times out"
            )
        page = parse(RequestColumns, content, MAX_ANSWER_BYTES)
        if self._boot_id not in (None, page.boot_id):
            raise InputError("the engine restarted during the replay and its times are lost; replay again")
        self._boot_id = page.boot_id
        self._after = page.next
        self.pages.append(page)
        if answered_s - asked_s < self._best_trip_s:
            self._best_trip_s = answered_s - asked_s
            self.offset_s = page.now_s - (asked_s + answered_s) / 2


def match(pages: Sequence[RequestColumns], rows: Sequence[RequestPart], offset_s: float) -> EnginePart:
    """Find each request that the client saw finish among the engine's rows: by prompt and output tokens and by time.

    The protocol names no request of a client, so several with equal counts are paired in the order of time; where
    that is wrong, two requests of one shape and nearly one arrival have changed places. offset_s: engine's minus ours.
    """
    bounds = pages[-1].gap_bounds_s if pages else ()
    waiting: dict[tuple[int, int], list[EngineRequestPart]] = defaultdict(list)
    found = 0
    for page in pages:
        for at in range(len(page.sequence)):
            found += 1
            one = _row(page, at)
            if one is not None:
                waiting[page.prompt_tokens[at], page.output_tokens[at]].append(one)
    for group in waiting.values():
        group.sort(key=lambda one: (one.arrival_s, one.sequence), reverse=True)  # the earliest is popped first
    matched: list[EngineRequestPart] = []
    finished = sorted((row for row in rows if row.failure is None), key=lambda one: (one.sent_s, one.index))
    left = Counter((row.prompt_tokens, row.output_tokens) for row in finished)
    for row in finished:
        shape = row.prompt_tokens, row.output_tokens
        one = _take(waiting[shape], row, left[shape], offset_s)
        left[shape] -= 1
        if one is not None:
            matched.append(one.model_copy(update={"index": row.index}))
    return EnginePart(
        clock_offset_s=offset_s,
        gap_bounds_s=bounds,
        lost=sum(page.lost for page in pages),
        missing=len(finished) - len(matched),
        others=found - len(matched),
        requests=tuple(sorted(matched, key=lambda one: one.index)),
    )


def _take(group: list[EngineRequestPart], row: RequestPart, left: int, offset_s: float) -> EngineRequestPart | None:
    """The row of ``group`` (the earliest last) that is this request's, taken out; left: requests for the group."""

    def apart_s(one: EngineRequestPart) -> float:
        return one.arrival_s - offset_s - row.sent_s

    while group and apart_s(group[-1]) < -SLACK_S:
        group.pop()
    # With more rows than requests some are not ours: one of a request that failed at the client, or of another client.
    while len(group) > left and abs(apart_s(group[-2 if len(group) > 1 else -1])) < abs(apart_s(group[-1])):
        group.pop()
    # A starved client may reach the engine out of order, so the next ones are looked at as well.
    for at in range(len(group) - 1, max(len(group) - 1 - _LOOK_AHEAD, -1), -1):
        if row.finish_s is not None and group[at].finish_s - offset_s <= row.finish_s + SLACK_S:
            return group.pop(at)
    return None


def _row(page: RequestColumns, at: int) -> EngineRequestPart | None:
    """A finished request, not yet known whose (index 0); None for any other end."""
    if page.ended[at] != "finished" or page.ttft_s[at] is None or page.finish_s[at] is None:
        return None
    values: dict[str, Any] = {name: getattr(page, name)[at] for name in _SAME}
    return EngineRequestPart(index=0, gap_over=tuple(row[at] for row in page.gap_over), **values)
