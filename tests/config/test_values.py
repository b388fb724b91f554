"""Values in the configuration: durations, windows of the week, addresses."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import PydanticCustomError

from rooftune.policies.guard import WEEK_MINUTES
from rooftune.tuner.cli.flags.values import parse_duration
from rooftune.tuner.clock import MAX_DURATION_S, UNIT_S
from rooftune.tuner.config.values import DAYS, duration_s, is_loopback, split_listen, week_spans


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30ms", 0.03), ("2s", 2.0), ("1.5m", 90.0), ("250us", 0.00025), ("2h", 7200.0), ("1d", 86_400.0), ("0s", 0.0)],
)
def test_durations(text: str, seconds: float) -> None:
    assert duration_s(text) == seconds


@given(st.floats(1e-6, 1e4), st.sampled_from(sorted(UNIT_S)))
def test_a_duration_means_the_same_in_a_file_and_in_a_flag(number: float, unit: str) -> None:
    text = f"{number:.6f}{unit}"
    if float(f"{number:.6f}") > 0:
        assert duration_s(text) == parse_duration(text)


@given(st.text(max_size=12))
def test_any_other_text_is_refused(text: str) -> None:
    message, seconds = "must be", 0.0
    try:
        seconds = duration_s(text)
    except PydanticCustomError as error:
        message = str(error)
    assert "must be" in message and 0.0 <= seconds <= MAX_DURATION_S


def test_a_window_within_a_day_and_over_midnight() -> None:
    (span,) = week_spans("Tue 02:00-04:30")
    assert (span.start_minute, span.end_minute) == (1440 + 120, 1440 + 270)
    (night,) = week_spans("Mon 22:00-06:00")
    assert night.holds(22 * 60) and night.holds(1440 + 359) and not night.holds(1440 + 360)


def test_a_window_over_the_end_of_the_week() -> None:
    (span,) = week_spans("Sat 20:00-Mon 06:00")
    assert span.holds(6 * 1440) and span.holds(0) and span.holds(359)
    assert not span.holds(360) and not span.holds(5 * 1440)
    (night,) = week_spans("Sun 23:00-01:00")
    assert night.holds(WEEK_MINUTES - 1) and night.holds(59) and not night.holds(60)


def test_the_last_day_may_end_at_24() -> None:
    (span,) = week_spans("Sun 00:00-24:00")
    assert span.holds(6 * 1440) and span.holds(WEEK_MINUTES - 1) and not span.holds(0)


def test_a_range_of_days_is_one_window_per_day_even_across_the_weekend() -> None:
    assert [span.start_minute // 1440 for span in week_spans("Mon-Fri 08:00-10:00")] == [0, 1, 2, 3, 4]
    assert [span.start_minute // 1440 for span in week_spans("Sat-Mon 08:00-10:00")] == [5, 6, 0]


@given(st.sampled_from(DAYS), st.integers(0, 1439), st.integers(0, 1440), st.integers(0, WEEK_MINUTES - 1))
def test_a_window_holds_exactly_the_minutes_written(day: str, start: int, end: int, minute: int) -> None:
    text = f"{day} {start // 60:02}:{start % 60:02}-{end // 60:02}:{end % 60:02}"
    begin = DAYS.index(day) * 1440
    length = (end - start) % 1440 or 1440
    if start == end:
        with pytest.raises(PydanticCustomError):
            week_spans(text)
        return
    (span,) = week_spans(text)
    assert span.holds(minute) == ((minute - begin - start) % WEEK_MINUTES < length)


@pytest.mark.parametrize(
    "text",
    ["", "Mon", "Mon 2:00-4:00", "mon 02:00-04:00", "Mon 25:00-26:00", "Mon 02:60-03:00", "Mon 02:00-24:01",
     "Mon-Fri 02:00-Tue 03:00", "Foo 02:00-03:00", "Mon 02:00-02:00", "Mon 02:00-Mon 02:00", "Mon 02:00-03:00x"],
)  # fmt: skip
def test_meaningless_windows_are_refused(text: str) -> None:
    with pytest.raises(PydanticCustomError, match="write"):
        week_spans(text)


def test_listen_addresses() -> None:
    assert split_listen("127.0.0.1:9109") == ("127.0.0.1", 9109)
    assert split_listen("[::1]:0") == ("::1", 0)
    for text in ("127.0.0.1", ":80", "::1:80", "a b:80", "h:65536", "h:-1", "h:1e3", "u@h:80"):
        with pytest.raises(PydanticCustomError):
            split_listen(text)


def test_only_addresses_of_this_machine_count_as_loopback() -> None:
    assert all(is_loopback(host) for host in ("localhost", "127.0.0.1", "127.9.9.9", "::1"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "localhost.example", "127.0.0.1.nip.io"))
