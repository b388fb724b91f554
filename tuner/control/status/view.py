"""What the controller's pages show: the latest record, and what has been counted since the start."""

import threading
from collections import Counter
from dataclasses import dataclass, field

from rooftune.policies.guard import Action, Reason
from rooftune.tuner.clock import Clock
from rooftune.tuner.control.outcome import CycleRecord, Stage

BLIND = frozenset(
    {
        Reason.UNREACHABLE, Reason.UNAUTHORIZED, Reason.NO_PROTOCOL, Reason.GARBAGE,
        Reason.STORE_FAILED,
    }
)  # outcomes in which the engine was not read, or nothing could be done about what was  # fmt: skip
HEALTHY_CYCLES, HEALTHY_MORE_S = 4.0, 60.0


@dataclass(frozen=True)
class About:
    """Who this controller is. cycle_s: from the start of one cycle to that of the next."""

    engine: str
    mode: str
    instance: str
    cycle_s: float
    version: str = ""

    @property
    def actor(self) -> str:
        """The actor of every push."""
        return f"rooftune/{self.instance}"


@dataclass(frozen=True)
class Counts:
    """Since the start of this controller."""

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    verdicts: Counter[str] = field(default_factory=Counter)
    stage_count: Counter[Stage] = field(default_factory=Counter)
    stage_sum_s: dict[Stage, float] = field(default_factory=dict)
    pushes: int = 0
    lost_steps: int = 0
    lost_requests: int = 0
    signals: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Glance:
    """One moment. since_s: seconds since the latest record was published, or since the start without one.

    judged: the latest record in which the twin was held against this start of the engine; searches are rare, so most
    cycles have none of their own.
    """

    record: CycleRecord | None
    judged: CycleRecord | None
    counts: Counts
    since_s: float
    healthy: bool
    ready: bool


class View:
    """Written by the loop, read by the pages' threads."""

    def __init__(self, about: About, clock: Clock) -> None:
        self.about = about
        self._clock = clock
        self._lock = threading.Lock()
        self._record: CycleRecord | None = None
        self._judged: CycleRecord | None = None
        self._counts = Counts()
        self._at_s = clock.now_s()

    def publish(self, record: CycleRecord) -> None:
        with self._lock:
            self._counts = _counted(self._counts, record)
            self._record, self._at_s = record, self._clock.now_s()
            if record.twin is not None:
                self._judged = record

    def glance(self) -> Glance:
        with self._lock:
            record, judged, counts = self._record, self._judged, self._counts
            since_s = max(0.0, self._clock.now_s() - self._at_s)
        healthy = since_s <= HEALTHY_CYCLES * self.about.cycle_s + HEALTHY_MORE_S
        if record is None or judged is None or record.boot_id != judged.boot_id:
            judged = None
        ready = healthy and record is not None and record.reason not in BLIND
        return Glance(record, judged, counts, since_s, healthy, ready)


def _counted(before: Counts, record: CycleRecord) -> Counts:
    """A new value, so that a page that is being written keeps the old one."""
    sums = dict(before.stage_sum_s)
    for stage, took_s in record.took_s.items():
        sums[stage] = sums.get(stage, 0.0) + took_s
    # A trial is judged in every cycle; its verdict is the one with which it ended.
    ended = record.verify is not None and (record.verify.verdict == "better" or record.action is Action.REVERT)
    verdict: Counter[str] = Counter([str(record.verify.verdict)] if record.verify and ended else [])
    return Counts(
        before.outcomes + Counter([(record.action.value, record.reason.value)]),
        before.verdicts + verdict,
        before.stage_count + Counter(list(record.took_s)),
        sums,
        before.pushes + (record.pushed is not None),
        before.lost_steps + record.lost_steps,
        before.lost_requests + record.lost_requests,
        before.signals | {signal.code for signal in record.signals},
    )
