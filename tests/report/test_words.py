"""Numbers in words: a margin that rounds to 0 is still met or missed, and traffic without a span arrived at once."""

import pytest

from rooftune.tuner.record import MarginPart
from rooftune.tuner.report import words


@pytest.mark.parametrize(
    ("margin", "text"),
    [
        (0.42, "missed by 42 %"),
        (0.006, "missed by 1 %"),
        (0.0049, "missed by less than 1 %"),
        (1e-9, "missed by less than 1 %"),
        (0.0, "met, nothing to spare"),
        (-1e-9, "met, less than 1 % to spare"),
        (-0.31, "met, 31 % to spare"),
        (12.5, "missed by 1,250 %"),
        ("inf", "missed without bound"),
    ],
)
def test_a_margin_never_says_0_percent(margin: float, text: str) -> None:
    assert words.margin(margin) == text


@pytest.mark.parametrize(
    ("margin", "text"),
    [
        (-1.0, "met, 0 % of what may lie above it does"),
        (-0.31, "met, 69 % of what may lie above it does"),
        (0.0, "met, 100 % of what may lie above it does"),
        (0.004, "missed, slightly more above it than allowed"),
        (0.06, "missed, 1.1 times as many above it as allowed"),
        (9.71, "missed, 11 times as many above it as allowed"),
        (None, words.margin(None)),
    ],
)
def test_a_counted_gap_target_shows_no_missed_time(margin: float | None, text: str) -> None:
    assert words.judged(MarginPart(measured_s=None, margin=margin, samples=0 if margin is None else 9)) == text
    measured = MarginPart(measured_s=1.0, margin=0.5, samples=9)
    assert words.judged(measured) == words.margin(0.5)


@pytest.mark.parametrize(
    ("value", "message"),
    [(1.0, "1 request/s"), (0.9999, "1 request/s"), (9.8, "9.8 requests/s"), (1234.5, "1,234 requests/s")],
)
def test_one_request_is_one_request(value: float, message: str) -> None:
    assert words.per_second(value, "requests") == message


def test_share_differences_are_in_points_and_an_unknown_rate_is_named() -> None:
    assert words.points(0.0123) == "1.23 percentage points"
    assert words.rate(None) == words.per_second(None, "requests") == words.NO_VALUE


def test_requests_without_a_span_arrived_at_once() -> None:
    assert words.requests_in(19_366, 3600.0) == "19,366 requests in 3,600 s"
    assert words.requests_in(200, 0.0) == "200 requests at once"
    assert words.requests_in(1, 0.0) == "1 request"


def test_an_enormous_miss_does_not_break_the_table() -> None:
    assert words.margin(7.68) == "missed by 768 %"
    assert words.margin(1e300) == "missed by more than 1,000,000 %"
