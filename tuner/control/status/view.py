"""What the controller's pages show: the latest record, and whether cycles come as they should."""

from dataclasses import dataclass

from rooftune.policies.guard import Reason
from rooftune.tuner.clock import Clock
from rooftune.tuner.control.outcome import CycleRecord

BLIND = frozenset(
    {
        Reason.UNREACHABLE, Reason.UNAUTHORIZED, Reason.NO_PROTOCOL, Reason.GARBAGE,
        Reason.STORE_FAILED,
    }
)  # the engine was not read, or nothing of it could be kept  # fmt: skip
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
class Glance:
    """One moment. since_s: seconds since the latest record was published, or since the start without one.

    judged: the latest record of this start of the engine in which the twin was compared with it; searches are rare, so
    most cycles have no comparison of their own.
    """

    record: CycleRecord | None
    judged: CycleRecord | None
    since_s: float
    healthy: bool
    ready: bool


class View:
    """Written by the loop, read by the pages' threads."""

    def __init__(self, about: About, clock: Clock) -> None:
        self.about = about
        self._clock = clock
        # One value, replaced whole: the latest record, the latest one with a twin, and when it was published.
        self._latest: tuple[CycleRecord | None, CycleRecord | None, float] = (None, None, clock.now_s())

    def publish(self, record: CycleRecord) -> None:
        judged = self._latest[1] if record.twin is None else record
        self._latest = (record, judged, self._clock.now_s())

    def glance(self) -> Glance:
        record, judged, at_s = self._latest
        since_s = max(0.0, self._clock.now_s() - at_s)
        healthy = since_s <= HEALTHY_CYCLES * self.about.cycle_s + HEALTHY_MORE_S
        if record is None or judged is None or record.boot_id != judged.boot_id:
            judged = None
        ready = healthy and record is not None and record.reason not in BLIND
        return Glance(record, judged, since_s, healthy, ready)
