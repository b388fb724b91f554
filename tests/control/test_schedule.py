"""The operator's week: daylight saving, the week's end, and windows on both sides of them."""

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rooftune.policies.errors import InputError
from rooftune.policies.guard import WEEK_MINUTES
from rooftune.tuner.config.values import week_spans
from rooftune.tuner.control.options import day, minute_of_week

BERLIN, NEW_YORK, KATHMANDU = (ZoneInfo(name) for name in ("Europe/Berlin", "America/New_York", "Asia/Kathmandu"))


def _at(*parts: int) -> float:
    return datetime(*parts, tzinfo=UTC).timestamp()


def test_monday_midnight_in_the_operators_timezone_is_minute_0() -> None:
    assert minute_of_week(_at(2026, 1, 5), ZoneInfo("UTC")) == 0
    assert minute_of_week(_at(2026, 1, 4, 23), BERLIN) == 0
    assert minute_of_week(_at(2026, 1, 4, 22, 59), BERLIN) == WEEK_MINUTES - 1
    assert minute_of_week(_at(2026, 1, 4, 18, 15), KATHMANDU) == 0  # half hours and quarters count


def test_in_spring_an_hour_is_skipped() -> None:
    sunday = 6 * 1440
    before, after = _at(2026, 3, 29, 0, 59), _at(2026, 3, 29, 1, 0)
    assert minute_of_week(before, BERLIN) == sunday + 119
    assert minute_of_week(after, BERLIN) == sunday + 180
    (skipped,) = week_spans("Sun 02:00-03:00")
    minutes = {minute_of_week(before + 60 * step, BERLIN) for step in range(-120, 120)}
    assert not any(skipped.holds(minute) for minute in minutes)


def test_in_autumn_a_window_of_an_hour_lasts_two() -> None:
    (window,) = week_spans("Sun 02:00-03:00")
    start = _at(2026, 10, 24, 22, 0)  # Sunday 00:00 in Berlin
    inside = [step for step in range(6 * 60) if window.holds(minute_of_week(start + 60 * step, BERLIN))]
    assert inside == list(range(120, 240))


def test_the_same_window_on_both_sides_of_a_change_starts_at_the_same_wall_clock() -> None:
    (window,) = week_spans("Mon 02:00-04:00")
    for monday, offset_h in ((datetime(2026, 3, 9), 4), (datetime(2026, 3, 2), 5)):  # New York changed on 8 March
        opens = (monday + timedelta(hours=2 + offset_h)).replace(tzinfo=UTC).timestamp()
        assert window.holds(minute_of_week(opens, NEW_YORK))
        assert not window.holds(minute_of_week(opens - 60, NEW_YORK))


@settings(max_examples=50)
@given(st.integers(0, 4_000_000_000), st.sampled_from([BERLIN, NEW_YORK, KATHMANDU]))
def test_minutes_stay_in_the_week_and_advance_by_one_except_at_clock_changes(at_s: int, zone: ZoneInfo) -> None:
    minute = minute_of_week(at_s, zone)
    step = (minute_of_week(at_s + 60, zone) - minute) % WEEK_MINUTES
    assert 0 <= minute < WEEK_MINUTES
    assert step in (0, 1, 2, 61, WEEK_MINUTES - 59) or at_s < 1_000_000_000  # odd offsets of long ago


def test_the_day_is_in_the_operators_timezone() -> None:
    assert day(_at(2026, 3, 28, 23, 30), BERLIN) == "2026-03-29"
    assert day(_at(2026, 3, 28, 23, 30), NEW_YORK) == "2026-03-28"


@pytest.mark.parametrize("wall_s", [float("nan"), float("inf"), -1.0, 1e12])
def test_an_impossible_clock_is_refused(wall_s: float) -> None:
    with pytest.raises(InputError, match="wall clock"):
        minute_of_week(wall_s, BERLIN)
