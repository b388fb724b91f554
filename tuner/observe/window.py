"""The last minutes of one engine as rows: a frozen value, bounded in time and in rows, empty after an engine restart.

Rows leave by the end of a request, so at the old edge a window holds the long requests of an instant and not its
short ones. What asks for arrivals (demand, a replay) starts at ``complete_from_s`` and stops at ``settled``.
"""

import math
from dataclasses import dataclass, field, replace

import numpy as np

from rooftune.policies.errors import bad_value
from rooftune.tuner.observe.protocol import Reading
from rooftune.tuner.observe.rows import FINISHED, BoolArray, FlightRows, FloatArray, RequestRows, StepRows

MOST_STEPS = 60_000
MOST_REQUESTS = 20_000


@dataclass(frozen=True, eq=False)
class Window:
    """Rows of the last ``span_s`` seconds, within most_steps and most_requests; instants on the engine's clock (s).

    boot_id: of the engine whose rows these are, None before the first reading. now_s: of the latest reading.
    complete_from_s: every request that arrived from then on and has ended is here. steps_from_s: every step that
    began from then on is here. lost_steps, lost_requests: rows that came too late to be read, since this start of the
    engine and without those before the first reading. in_flight: what had not ended then, None when not known.
    """

    span_s: float
    most_steps: int = MOST_STEPS
    most_requests: int = MOST_REQUESTS
    boot_id: str | None = None
    now_s: float = math.nan
    steps: StepRows = field(default_factory=StepRows.from_wire)
    requests: RequestRows = field(default_factory=RequestRows.from_wire)
    complete_from_s: float = -math.inf
    steps_from_s: float = -math.inf
    lost_steps: int = 0
    lost_requests: int = 0
    in_system: int = 0
    in_flight: FlightRows | None = None

    def __post_init__(self) -> None:
        if not 0.0 < self.span_s < math.inf:
            raise bad_value("window span_s", self.span_s, "above 0 and finite", "give seconds")
        if self.most_steps < 1 or self.most_requests < 1:
            raise bad_value("rows", (self.most_steps, self.most_requests), "at least 1 each", "keep a row or more")

    def add(self, reading: Reading) -> "Window":
        """The window with these rows; what is too old or too much leaves, and all of it when the engine is another."""
        before = self if self.boot_id == reading.boot_id else self.fresh()
        steps, requests = reading.steps, reading.requests
        complete_from_s, steps_from_s = before.complete_from_s, before.steps_from_s
        if reading.lost_steps and len(steps):
            steps_from_s = float(steps.start_s[0])
        if reading.lost_requests:
            complete_from_s = float(requests.finish_s[0]) if len(requests) else reading.now_s
        if len(before.steps):
            steps = StepRows.join([before.steps, steps])
        if len(before.requests):
            requests = RequestRows.join([before.requests, requests])
        gone = _gone(steps.end_s, reading.now_s - self.span_s, self.most_steps)
        if gone:
            steps_from_s = max(steps_from_s, float(steps.end_s[gone - 1]))
            steps = steps.select(np.arange(gone, len(steps)))
        gone = _gone(requests.finish_s, reading.now_s - self.span_s, self.most_requests)
        if gone:
            complete_from_s = max(complete_from_s, float(np.nanmax(requests.finish_s[:gone])))
            requests = requests.select(np.arange(gone, len(requests)))
        return replace(
            before,
            boot_id=reading.boot_id,
            now_s=reading.now_s,
            steps=steps,
            requests=requests,
            complete_from_s=complete_from_s,
            steps_from_s=steps_from_s,
            lost_steps=before.lost_steps + (0 if reading.first else reading.lost_steps),
            lost_requests=before.lost_requests + (0 if reading.first else reading.lost_requests),
            in_system=reading.in_system,
            in_flight=reading.in_flight,
        )

    def fresh(self) -> "Window":
        """An empty window of the same size."""
        return Window(self.span_s, self.most_steps, self.most_requests)

    def in_force_from(self, revision: int) -> float:
        """When this revision came into force: the end of the last step under an earlier one, ``steps_from_s`` when
        there is none here.

        While the engine is idle no step tells when it came, so this is a little early rather than late.
        """
        return float(self.steps.end_s[self.steps.revision < revision].max(initial=self.steps_from_s))

    def requests_since(self, start_s: float) -> RequestRows:
        """Requests, however they ended, that arrived at start_s or later, by arrival."""
        return _by_arrival(self.requests, self.requests.arrival_s >= start_s)

    def in_flight_at(self, at_s: float) -> RequestRows:
        """Finished requests that had arrived and not ended at an instant, by arrival."""
        rows = self.requests
        return _by_arrival(rows, (rows.arrival_s < at_s) & (rows.finish_s > at_s) & (rows.ended == FINISHED))

    def demand(self, start_s: float = -math.inf) -> RequestRows:
        """Finished requests that arrived from start_s on, by arrival: all of them, as far as can be known.

        From ``complete_from_s`` at the earliest, to ``settled`` with half of the window given away at most; to the end
        where those that have not ended are known, too.
        """
        known = self.in_flight is not None
        until_s = math.inf if known else settled(self.requests, self.now_s, self.in_system, self.span_s / 2.0)
        return arrived_between(self.requests, max(start_s, self.complete_from_s), until_s)


def _gone(end_s: FloatArray, oldest_s: float, most: int) -> int:
    """How many rows from the start are too old or too many. A row without an end leaves with those around it."""
    fresh = np.flatnonzero(end_s >= oldest_s)
    old = int(fresh[0]) if len(fresh) else len(end_s)
    return max(old, len(end_s) - most)


def _by_arrival(rows: RequestRows, kept: BoolArray) -> RequestRows:
    picked = rows.select(kept)
    return picked.select(np.lexsort((picked.sequence, picked.arrival_s)))


def arrived_between(rows: RequestRows, start_s: float, end_s: float) -> RequestRows:
    """Finished requests that arrived within start_s <= arrival < end_s, by arrival (ties: by their end)."""
    within = (rows.arrival_s >= start_s) & (rows.arrival_s < end_s)
    return _by_arrival(rows, within & (rows.ended == FINISHED))


def settled(rows: RequestRows, now_s: float, in_system: int, most_s: float = math.inf) -> float:
    """The latest instant before which all arrivals have ended, as far as can be known; engine's clock.

    in_system: requests running and waiting at now_s. When there is none, everything has ended: now_s. Otherwise the
    longest time in the system that these rows show, at most most_s, is taken off; without rows nothing is settled and
    the answer is -inf.

    The bias that is left: a request in flight that has already taken longer than every ended one here (or than
    most_s) arrived before this instant and is missing; after a rise of the load that is the newest long requests,
    whose share is then too low until they end.
    """
    if in_system == 0:
        return now_s
    took_s = rows.finish_s - rows.arrival_s
    known = took_s[np.isfinite(took_s)]
    return now_s - min(float(known.max()), most_s) if len(known) else -math.inf
