"""The tuning protocol as objects: the knobs under their lease, and what ran, by column.

The loop's thread and the threads that serve the protocol share ``TuningDesk`` under one lock, held for microseconds.
The loop reads the setting when a step begins and nowhere else, so a change takes effect between two steps, whole or
not at all.
"""

import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import attrgetter
from threading import Lock
from typing import Any, Generic, NamedTuple, TypeVar

from rooftune.engine.interface import ChangeKind, FinishReason, Flights, Observer, RequestRecord, StepRecord
from rooftune.policies import lease, wire
from rooftune.policies.envelope import KNOB_NAMES, Envelope, Mode
from rooftune.policies.errors import UnreachableError, bad_value, printable
from rooftune.policies.request import Setting
from rooftune.policies.step_time import StepModel

T = TypeVar("T")

# What plan_step gets while no policy in force predicts a step time.
NO_MODEL = StepModel(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)

_MOST_CHARS = 200  # of wire.Text
# Most rows of one answer: while it is built and encoded (some 2 ms for a thousand steps) the loop stands still,
# because Python threads share one interpreter lock. A reader further behind requests again.
ANSWER_ROWS = 1000

_ENDED = {
    FinishReason.STOP: "finished",
    FinishReason.LENGTH: "finished",
    FinishReason.CANCELLED: "aborted",
    FinishReason.FAILED: "failed",
}


class Ring(Generic[T]):
    """The last ``capacity`` rows, each under a number that grows."""

    def __init__(self, capacity: int) -> None:
        if not 1 <= capacity <= wire.MAX_ROWS:
            raise bad_value("ring rows", capacity, f"within 1..{wire.MAX_ROWS}", "keep fewer rows")
        self._rows: list[tuple[int, T]] = []
        self._capacity = capacity
        self._count = 0

    def append(self, number: int, row: T) -> None:
        """``number`` must be above every earlier one."""
        if self._count < self._capacity:
            self._rows.append((number, row))
        else:
            self._rows[self._count % self._capacity] = (number, row)
        self._count += 1

    def after(self, number: int, most: int = wire.MAX_ROWS) -> tuple[list[tuple[int, T]], int]:
        """The first ``most`` rows above ``number`` in order, and how many such rows are gone, given that numbers have
        no holes. Touches no other row, because the appending thread waits meanwhile."""
        rows, kept = self._rows, len(self._rows)
        full = self._count > self._capacity
        oldest = self._count % self._capacity if full else 0
        low, high = 0, kept
        while low < high:
            middle = (low + high) // 2
            if rows[(oldest + middle) % kept][0] > number:
                high = middle
            else:
                low = middle + 1
        found = [rows[(oldest + place) % kept] for place in range(low, min(kept, low + most))]
        return found, max(0, rows[oldest][0] - number - 1) if full else 0


class InForce(NamedTuple):
    """What a step runs under."""

    setting: Setting
    step_model: StepModel
    revision: int


def in_force(book: lease.LeaseBook) -> InForce:
    return InForce(book.setting, book.step_model or NO_MODEL, book.revision)


@dataclass(frozen=True, slots=True)
class About:
    """The state's facts about the engine; see ``wire.State``. Names that the protocol cannot carry are shortened to
    their end (a long path) or get "?" for each unprintable character, so that every model can be tuned."""

    engine: str
    engine_version: str
    model: str
    envelope: wire.BootEnvelope

    def __post_init__(self) -> None:
        for name in ("engine", "engine_version", "model"):
            object.__setattr__(self, name, printable(getattr(self, name), "?")[-_MOST_CHARS:] or "unnamed")


class TuningDesk:
    """The knobs and the records of one engine.

    now_s: the engine's clock. Raises InputError when boot lies outside the envelope.
    """

    def __init__(
        self,
        about: About,
        envelope: Envelope,
        boot: Setting,
        now_s: Callable[[], float],
        *,
        gap_bounds_s: tuple[float, ...] = (),
        max_lease_s: float = lease.MAX_LEASE_S,
        ring_rows: int = wire.MAX_ROWS,
    ) -> None:
        self._about = about
        self._now_s = now_s
        self._gap_bounds_s = gap_bounds_s
        self._lock = Lock()
        self._book = lease.boot_book(envelope, boot, now_s(), max_lease_s)
        self._stepped_s = -math.inf  # latest step under this lease; the book gets it when something is due
        self._next_step = 0
        self._steps: Ring[StepRecord] = Ring(ring_rows)
        self._requests: Ring[RequestRecord] = Ring(ring_rows)
        self._notes: tuple[str, ...] = ()
        self.boot_id = secrets.token_hex(8)
        self.observer: Observer | None = None
        self.flights: Callable[[], Flights] = _unknown_flights  # the engine replaces it

    # --- the loop's side ---

    def begin_step(self, now_s: float) -> InForce:
        """The setting of the step that begins now. An expired lease ends here, with or without a controller."""
        with self._lock:
            held = self._book.lease
            if held is not None:
                if self._stepped_s <= now_s and self._book.seen_s <= now_s and held.holds(now_s):
                    self._stepped_s = now_s
                else:
                    self._settle(now_s)
            book = self._book
            self._next_step += 1
        return in_force(book)

    def skip_step(self) -> None:
        """Give the number of a step that computes nothing to the next one."""
        with self._lock:
            self._next_step -= 1

    def note(self, text: str) -> None:
        """Add a note for readers of the state; shortened to what the schema allows."""
        with self._lock:
            self._notes = (*self._notes, text[:_MOST_CHARS])[: wire.MAX_NOTES]

    def close(self, text: str) -> None:
        """Restore the boot setting; after it only a restart changes a knob. ``text``: the reason, for the state."""
        self.note(text)
        with self._lock:
            bounds = tuple(replace(bound, mode=Mode.RESTART) for bound in self._book.envelope.by_name.values())
            self._book = replace(
                self._book,
                envelope=Envelope(bounds),
                setting=self._book.boot,
                lease=None,
                step_model=None,
                revision=self._book.revision + 1,
            )

    def lease_left_s(self) -> float:
        """Seconds; 0 without a lease. Ends an expired lease."""
        with self._lock:
            now_s = self._settle(self._now_s())
            return self._book.lease.left_s(now_s) if self._book.lease is not None else 0.0

    def add_step(self, record: StepRecord) -> None:
        with self._lock:
            self._steps.append(record.step, record)

    def add_request(self, record: RequestRecord) -> None:
        with self._lock:
            self._requests.append(record.sequence, record)

    @property
    def book(self) -> lease.LeaseBook:
        """The book as it stands, for gauges; frozen."""
        return self._book

    @property
    def steps(self) -> int:
        """Steps begun since the start."""
        return self._next_step

    # --- the protocol's side ---

    def tuning_state(self) -> wire.State:
        with self._lock:
            now_s = self._settle(self._now_s())
            book, step = self._book, self._next_step
        held = book.lease
        return wire.State(
            engine=self._about.engine,
            engine_version=self._about.engine_version,
            model=self._about.model,
            boot_id=self.boot_id,
            now_s=now_s,
            envelope=self._about.envelope,
            knobs=tuple(_knob(book, name) for name in KNOB_NAMES),
            revision=book.revision,
            blocked=book.blocked,
            lease=None
            if held is None
            else wire.LeaseState(
                actor=held.actor, reason=held.reason, left_s=held.left_s(now_s), length_s=held.length_s
            ),
            step=step,
            notes=self._notes,
        )

    def push(self, request: wire.PushRequest) -> wire.PushAnswer | wire.Refusal:
        """Apply knobs from the next step on, or refuse and change nothing (HTTP status: wire.REFUSAL_STATUS[code])."""
        wish = request.to_push()
        with self._lock:
            now_s = self._settle(self._now_s())
            self._book, outcome = lease.push(self._book, wish, now_s)
            if outcome.refused:
                return wire.refusal(outcome)
            return self._answer(ChangeKind.PUSHED, wish.actor, wish.reason)

    def revert(self, request: wire.RevertRequest) -> wire.PushAnswer:
        """Restore the boot settings from the next step on; never refused."""
        with self._lock:
            self._catch_up()
            before = self._book.revision
            self._book, _ = lease.revert(self._book, self._now_s(), block=request.block)
            return self._answer(ChangeKind.REVERTED, request.actor, request.reason, before)

    def resume(self, request: wire.ResumeRequest) -> wire.PushAnswer:
        with self._lock:
            now_s = self._settle(self._now_s())
            before = self._book.revision
            self._book, _ = lease.resume(self._book, now_s)
            return self._answer(ChangeKind.RESUMED, request.actor, request.reason, before)

    def steps_after(self, after: int) -> wire.StepColumns:
        """Step records with a number above ``after`` (-1: from the oldest kept), a thousand at a time: call again with
        ``next`` until no rows come."""
        rows, common = self._read(self._steps, after)
        columns: dict[str, Any] = {name: tuple(map(attrgetter(name), rows)) for name in wire.STEP_COLUMNS}
        return wire.StepColumns(**common, **columns)

    def requests_after(self, after: int) -> wire.RequestColumns:
        rows, common = self._read(self._requests, after)
        columns: dict[str, Any] = {name: tuple(map(attrgetter(name), rows)) for name in wire.REQUEST_COLUMNS}
        columns["ended"] = tuple(_ENDED[row.ended] for row in rows)
        columns["gap_bounds_s"] = self._gap_bounds_s
        columns["gap_over"] = tuple(
            tuple(row.gap_over[bound] for row in rows) for bound in range(len(self._gap_bounds_s))
        )
        return wire.RequestColumns(**common, **columns)

    def in_flight(self, found: Flights | None = None) -> wire.FlightColumns:
        """What has not ended: ``found``, or what is found now. Raises what ``flights`` raises."""
        rows, left_out = self.flights() if found is None else found
        columns: dict[str, Any] = dict.fromkeys(wire.FLIGHT_COLUMNS, ())
        if rows:
            columns = dict(zip(wire.FLIGHT_COLUMNS, zip(*rows, strict=True), strict=True))
        return wire.FlightColumns(boot_id=self.boot_id, now_s=self._now_s(), left_out=left_out, **columns)

    # --- both ---

    def _settle(self, now_s: float) -> float:
        """End an expired lease; returns the time now (s)."""
        self._catch_up()
        held = self._book.lease
        self._book, _ = lease.expire(self._book, now_s)
        if held is not None and self._book.lease is None:
            self._tell(ChangeKind.LEASE_ENDED, held.actor, held.reason)
        return self._book.seen_s

    def _catch_up(self) -> None:
        """Give the book the latest step's time."""
        stepped_s, self._stepped_s = self._stepped_s, -math.inf
        if stepped_s > self._book.seen_s:
            self._book, _ = lease.expire(self._book, stepped_s)

    def _answer(self, kind: ChangeKind, actor: str, reason: str, before: int = -1) -> wire.PushAnswer:
        if self._book.revision != before:
            self._tell(kind, actor, reason)
        return wire.PushAnswer(revision=self._book.revision, effective_from_step=self._next_step)

    def _tell(self, kind: ChangeKind, actor: str, reason: str) -> None:
        if self.observer is not None:
            self.observer.on_change(kind, self._book.revision, actor, reason)

    def _read(self, ring: Ring[T], after: int) -> tuple[list[T], dict[str, Any]]:
        with self._lock:
            rows, lost = ring.after(after, ANSWER_ROWS)
        following = rows[-1][0] if rows else after
        common = {"boot_id": self.boot_id, "now_s": self._now_s(), "after": after, "next": following, "lost": lost}
        return [row for _, row in rows], common


def _unknown_flights() -> Flights:
    raise UnreachableError("nothing here tells what is in flight; ask the engine itself")


def _knob(book: lease.LeaseBook, name: str) -> wire.KnobState:
    bound = book.envelope.by_name.get(name)
    if bound is None:
        return wire.KnobState(name=name, mode="absent")
    return wire.KnobState(
        name=name,
        mode="live" if bound.mode is Mode.LIVE else "restart",
        value=getattr(book.setting, name),
        boot=getattr(book.boot, name),
        min=bound.minimum,
        max=bound.maximum,
    )
