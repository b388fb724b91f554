"""Reads an engine through its port: the state and every row since the last read, whole or not at all."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

import numpy as np

from rooftune.policies import wire
from rooftune.policies.errors import bad_value
from rooftune.tuner.observe.rows import FlightRows, FloatArray, RequestRows, StepRows

MAX_PAGES = 64  # of each kind in one read
_STARTS = 3  # starts of the engine that one read tries to follow

C = TypeVar("C", wire.StepColumns, wire.RequestColumns)


class Source(Protocol):
    """What is read: the reading half of ``rooftune.tuner.ports.base.Port``."""

    def state(self) -> wire.State: ...

    def steps_after(self, after: int) -> wire.StepColumns: ...

    def requests_after(self, after: int) -> wire.RequestColumns: ...

    def in_flight(self) -> wire.FlightColumns | None: ...


@dataclass(frozen=True, eq=False)
class Reading:
    """What one read brought. Instants without another word are seconds on the engine's clock.

    steps, requests: rows since the last read, in order. lost_steps, lost_requests: rows that the engine overwrote
    before they could be read; those of the first read of a controller (``first``) ran before it looked. restarted:
    the engine restarted since the last read, so all rows are from after the restart. behind: there are more rows
    than one read fetches; read again. in_system: requests running and waiting, of those that the newest step knew and
    at least 1 while a step is in flight. busy: in_system is above 0.
    in_flight: what has not ended, read after the rows; None: not asked for, or not known.
    metrics_age_s: for how long the engine has had something to do without a step coming to its end: 0 when it has
    nothing to do, NaN when that cannot be told.
    """

    state: wire.State
    steps: StepRows
    requests: RequestRows
    lost_steps: int
    lost_requests: int
    first: bool
    restarted: bool
    behind: bool
    in_system: int
    busy: bool
    metrics_age_s: float
    in_flight: FlightRows | None = None

    @property
    def boot_id(self) -> str:
        return self.state.boot_id

    @property
    def now_s(self) -> float:
        """When the state was true; rows may be newer."""
        return self.state.now_s


@dataclass(frozen=True, eq=False)
class _Place:
    """How far the rows of one start of the engine have been read, and what was to do then.

    in_system: requests running and waiting in the newest step, which ended at end_s. finishes_s: ends of requests
    after ``since_s``, the start of that step. seen_s: when the last read was. flight: number of the step that was in
    flight then, -1 for none; flight_s: when it had not begun yet, NaN when not known.
    """

    boot_id: str
    steps: int = -1
    requests: int = -1
    in_system: int = 0
    since_s: float = -math.inf
    end_s: float = math.nan
    finishes_s: FloatArray = field(default_factory=lambda: np.zeros(0))
    seen_s: float = math.nan
    flight: int = -1
    flight_s: float = math.nan

    def later(self, steps: StepRows, requests: RequestRows, begun: int, now_s: float) -> "_Place":
        """The place after these rows; begun: steps begun until now_s."""
        after = replace(self, seen_s=now_s)
        if len(steps):
            start_s, duration_s = float(steps.start_s[-1]), float(steps.duration_s[-1])
            after = replace(
                after,
                steps=int(steps.step[-1]),
                in_system=int(steps.running[-1] + steps.waiting[-1]),
                # The step before may have ended, with its requests, in the very instant in which this one starts.
                since_s=start_s if duration_s > 0.0 else math.nextafter(start_s, -math.inf),
                end_s=start_s + duration_s,
            )
        flight = begun - 1 if begun - 1 > after.steps else -1
        if flight != self.flight:
            after = replace(after, flight=flight, flight_s=self.seen_s)
        # The row of a request may be read before the row of the step that ended it: keep it for that one.
        finishes_s = np.concatenate([self.finishes_s, np.where(np.isnan(requests.finish_s), now_s, requests.finish_s)])
        newest = int(requests.sequence[-1]) if len(requests) else self.requests
        return replace(after, requests=newest, finishes_s=finishes_s[finishes_s > after.since_s])

    @property
    def left(self) -> int:
        """Requests of the newest step that have not ended since."""
        return max(0, self.in_system - len(self.finishes_s))

    @property
    def busy(self) -> bool:
        return self.left > 0 or self.flight >= 0

    @property
    def age_s(self) -> float:
        """For how long there has been something to do and no step came to its end; NaN: cannot be told."""
        if self.left > 0:
            return max(0.0, self.seen_s - self.end_s)
        if self.flight >= 0:
            known = not math.isnan(self.flight_s)
            return max(0.0, self.seen_s - float(np.fmax(self.end_s, self.flight_s))) if known else math.nan
        return 0.0


class _Restarted(Exception):
    """The engine restarted while it was read."""


class ProtocolReader:
    """Reads one engine, one read at a time.

    A read that fails leaves the place where it was, so its rows come with the next one. max_pages: pages of steps,
    and of requests, in one read.
    """

    def __init__(self, source: Source, max_pages: int = MAX_PAGES) -> None:
        if max_pages < 1:
            raise bad_value("max_pages", max_pages, "at least 1", "read a page or more")
        self._source, self._max_pages = source, max_pages
        self._place: _Place | None = None

    def read(self, flights: bool = False) -> Reading:
        """The state and all rows since the last read; raises what the source raises (a port: PortError) and no more.

        flights: whether to ask for the requests in flight, when there are any.
        An engine that keeps restarting while it is read gives a reading without rows.
        """
        for _ in range(_STARTS):
            state = self._source.state()
            before = self._place
            place = before if before is not None and before.boot_id == state.boot_id else _Place(state.boot_id)
            try:
                steps = self._pages(self._source.steps_after, place.steps, state, _all_steps)
                requests = self._pages(self._source.requests_after, place.requests, state, _all_requests)
            except _Restarted:
                continue
            return self._with_flights(self._reading(state, place, steps, requests), flights)
        return self._reading(state, _Place(state.boot_id), ([], False), ([], False))

    def _reading(
        self,
        state: wire.State,
        place: _Place,
        steps: tuple[list[wire.StepColumns], bool],
        requests: tuple[list[wire.RequestColumns], bool],
    ) -> Reading:
        """steps, requests: pages, and whether there may be more."""
        (step_pages, more_steps), (request_pages, more_requests) = steps, requests
        step_rows, request_rows = StepRows.from_wire(*step_pages), RequestRows.from_wire(*request_pages)
        before, place = self._place, place.later(step_rows, request_rows, state.step, state.now_s)
        self._place = place
        return Reading(
            state=state,
            steps=step_rows,
            requests=request_rows,
            lost_steps=sum(page.lost for page in step_pages),
            lost_requests=sum(page.lost for page in request_pages),
            first=before is None,
            restarted=before is not None and before.boot_id != state.boot_id,
            behind=more_steps or more_requests,
            in_system=max(place.left, int(place.busy)),
            busy=place.busy,
            metrics_age_s=place.age_s,
        )

    def _with_flights(self, reading: Reading, wanted: bool) -> Reading:
        page = self._source.in_flight() if wanted and reading.busy else None
        if page is None or page.boot_id != reading.boot_id:
            return reading
        return replace(reading, in_flight=FlightRows.from_wire(page))

    def _pages(
        self, ask: Callable[[int], C], after: int, state: wire.State, enough: Callable[[C, wire.State], bool]
    ) -> tuple[list[C], bool]:
        """Pages until one is empty, holds all that had happened when the state was read, or is the last allowed; and
        whether there may be more. Raises _Restarted."""
        pages: list[C] = []
        while len(pages) < self._max_pages:
            page = ask(after)
            if page.boot_id != state.boot_id:
                raise _Restarted
            pages.append(page)
            if page.next == after or enough(page, state):
                return pages, False
            after = page.next
        return pages, True


def _all_steps(page: wire.StepColumns, state: wire.State) -> bool:
    return page.next >= state.step - 1


def _all_requests(page: wire.RequestColumns, state: wire.State) -> bool:
    last_s = page.finish_s[-1]
    return last_s is not None and last_s >= state.now_s
