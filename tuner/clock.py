"""Time as an argument: code that waits or stamps gets a clock, so that tests can set it."""

import re
import time
from typing import Protocol

from rooftune.policies.commands import NUMBER

# How people write a time: a number and one of these units.
UNIT_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
MAX_DURATION_S = 1e9
_DURATION = re.compile(rf"([+-]?{NUMBER}) ?(us|ms|s|m|h|d)")


def in_seconds(text: str) -> float | None:
    """Seconds of ``2s``, ``30ms``, ``1.5m``, ``250us``, ``2h`` or ``1d``; None for a text of another form."""
    found = _DURATION.fullmatch(text)
    if found is None:
        return None
    number, unit = found.groups()
    # Division keeps 30ms at the float nearest to 0.03, where a product with 1e-3 may miss it by a bit.
    return float(number) / round(1 / UNIT_S[unit]) if UNIT_S[unit] < 1 else float(number) * UNIT_S[unit]


class Clock(Protocol):
    """now_s: monotonic seconds, for intervals. wall_s: seconds since 1970, for people and for windows of the week."""

    def now_s(self) -> float: ...

    def wall_s(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """The machine's clocks."""

    def now_s(self) -> float:
        return time.monotonic()

    def wall_s(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(max(0.0, seconds))


class ManualClock:
    """A clock that moves when told: ``sleep`` advances it at once; ``jump`` moves the wall clock alone."""

    def __init__(self, now_s: float = 0.0, wall_s: float = 1_700_000_000.0) -> None:
        self._now_s, self._wall_s = now_s, wall_s

    def now_s(self) -> float:
        return self._now_s

    def wall_s(self) -> float:
        return self._wall_s

    def sleep(self, seconds: float) -> None:
        self._now_s += max(0.0, seconds)
        self._wall_s += max(0.0, seconds)

    def jump(self, seconds: float) -> None:
        """Set the wall clock ahead (or back), as a time server or an operator would."""
        self._wall_s += seconds
