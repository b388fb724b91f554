"""Where the operator's week stands: minutes from Monday 00:00 on the clock on the wall, daylight saving included."""

import math
from datetime import UTC, datetime, tzinfo

from rooftune.policies.errors import bad_value
from rooftune.policies.limits import WEEK_MINUTES

DAY_MINUTES = 24 * 60
DAY_S = 86_400.0


def minute_of_week(wall_s: float, zone: tzinfo) -> int:
    """Minute 0..10079 of the week at ``wall_s`` (seconds since 1970) as clocks in ``zone`` show it; 0: Monday 00:00.

    The hour that is skipped in spring does not occur, the one repeated in autumn occurs twice: a window that is
    written down for the wall clock means the wall clock.
    """
    local = _local(wall_s, zone)
    return local.weekday() * DAY_MINUTES + local.hour * 60 + local.minute


def day(wall_s: float, zone: tzinfo) -> str:
    """The date in ``zone``, such as 2026-03-29: what a budget for a day is counted by."""
    return _local(wall_s, zone).date().isoformat()


def hour_of_day(wall_s: float, zone: tzinfo) -> int:
    """0..23, part of a fingerprint of traffic."""
    return _local(wall_s, zone).hour


def _local(wall_s: float, zone: tzinfo) -> datetime:
    if not (math.isfinite(wall_s) and 0.0 <= wall_s < 1e11):
        raise bad_value("wall clock", wall_s, "seconds since 1970 within 0..1e11", "set the machine's clock")
    return datetime.fromtimestamp(wall_s, UTC).astimezone(zone)


__all__ = ["WEEK_MINUTES", "day", "hour_of_day", "minute_of_week"]
