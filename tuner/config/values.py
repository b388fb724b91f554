"""Values as people write them in the configuration: 30s, 1.5m, "Mon 02:00-04:00", 127.0.0.1:9109.

What cannot be used is a ``PydanticCustomError`` made by ``wrong``, which says bound and remedy; the loader adds file,
line and key.
"""

import ipaddress
import re
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from rooftune.policies.commands import NUMBER
from rooftune.policies.errors import shown
from rooftune.policies.guard import WEEK_MINUTES, WeekSpan
from rooftune.tuner.address import flaw_of
from rooftune.tuner.clock import MAX_DURATION_S, in_seconds

DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
DAY_MINUTES = 24 * 60
CODE = "rooftune"  # of our own complaints; any other code is pydantic's
_DAY, _TIME = r"([A-Z][a-z]{2})", r"([0-9]{2}):([0-9]{2})"
_SPAN = re.compile(rf"{_DAY}(?:-{_DAY})? {_TIME}-(?:{_DAY} )?{_TIME}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def wrong(value: object, bound: str, remedy: str, key: str = "") -> PydanticCustomError:
    """A complaint about one value; key: dotted, only where the place of the complaint does not tell it."""
    return PydanticCustomError(
        CODE, "{key} is {value}, must be {bound}; {remedy}",
        {"key": key or "it", "value": shown(value), "bound": bound, "remedy": remedy},
    )  # fmt: skip


def duration_s(text: str) -> float:
    """Seconds of ``2s``, ``30ms``, ``1.5m``, ``250us``, ``2h`` or ``1d``: at least 0, at most 1e9."""
    seconds = in_seconds(text.strip())
    if text.strip().startswith("-") and in_seconds(text.strip()[1:]) is not None:
        raise wrong(text, "at least 0", "drop the minus sign")
    if seconds is None or text.strip().startswith(("+", "-")):
        raise wrong(text, "a time with a unit (us, ms, s, m, h, d)", "write 30ms, 2s or 5m")
    if not seconds <= MAX_DURATION_S:
        raise wrong(text, f"at most {MAX_DURATION_S:g} s", "correct it")
    return seconds


def _seconds(value: object) -> object:
    return duration_s(value) if isinstance(value, str) else value


def _bound_text(text: str) -> str:
    if not duration_s(text) > 0.0:
        raise wrong(text, "above 0", "write 30ms or 2s")
    return text


_TEXT = {"type": "string", "pattern": rf"^{NUMBER} ?(us|ms|s|m|h|d)$"}


def _schema(least: dict[str, float]) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [{"type": "number", **least, "maximum": MAX_DURATION_S}, _TEXT]})


# A key that ends in _s takes a number of seconds or a text with a unit.
Seconds = Annotated[float, Field(gt=0, le=MAX_DURATION_S), BeforeValidator(_seconds), _schema({"exclusiveMinimum": 0})]
SecondsOrNone = Annotated[float, Field(ge=0, le=MAX_DURATION_S), BeforeValidator(_seconds), _schema({"minimum": 0})]
# The bound of a target stands without a unit in its key, so that it needs one in its value.
BoundText = Annotated[str, AfterValidator(_bound_text), WithJsonSchema(_TEXT)]


def _line(text: str) -> str:
    if _CONTROL.search(text):
        raise wrong(text, "a text without line breaks and control characters", "correct it")
    return text


Line = Annotated[str, Field(min_length=1, max_length=500), AfterValidator(_line)]
Name = Annotated[str, Field(min_length=1, max_length=100), AfterValidator(_line)]


def _url(text: str) -> str:
    flaw = flaw_of(text)
    if flaw is not None:
        raise wrong(*flaw)
    return text.rstrip("/")


Url = Annotated[str, Field(max_length=500), AfterValidator(_line), AfterValidator(_url)]


def split_listen(text: str) -> tuple[str, int]:
    """Host and port of ``127.0.0.1:9109`` or ``[::1]:9109``; port 0: any free one."""
    host, colon, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    whole = port.isascii() and port.isdecimal() and len(port) <= 5 and int(port) <= 65_535
    if not colon or not bare or not whole or (":" in bare and bare == host) or re.search(r"[\s/@]", bare):
        raise wrong(text, "HOST:PORT with a port within 0..65535", "write 127.0.0.1:9109")
    return bare, int(port)


def is_loopback(host: str) -> bool:
    """Whether an address is reached from this machine alone; a name other than localhost never counts as such."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _listen(text: str) -> str:
    split_listen(text)
    return text


Listen = Annotated[str, Field(max_length=200), AfterValidator(_line), AfterValidator(_listen)]


def week_spans(text: str) -> tuple[WeekSpan, ...]:
    """Spans of ``Mon 02:00-04:00``, ``Mon-Fri 22:00-06:00`` (each day, into the next) or ``Sat 20:00-Mon 06:00``.

    24:00 ends a day. Days run over the week's end: ``Fri-Mon`` is four days. The end is exclusive.
    """
    found = _SPAN.fullmatch(text.strip())
    example = "write Mon 02:00-04:00, Mon-Fri 22:00-06:00 or Sat 20:00-Mon 06:00"
    if found is None:
        raise wrong(text, "DAY[-DAY] HH:MM-[DAY ]HH:MM", example)
    first, last, start_h, start_m, end_day, end_h, end_m = found.groups()
    for day in (first, last, end_day):
        if day is not None and day not in DAYS:
            raise wrong(text, "with days out of " + ", ".join(DAYS), example)
    start, end = int(start_h) * 60 + int(start_m), int(end_h) * 60 + int(end_m)
    minutes_fit = int(start_m) < 60 and int(end_m) < 60
    if not minutes_fit or start >= DAY_MINUTES or end > DAY_MINUTES:
        raise wrong(text, "with times from 00:00 to 24:00", example)
    if last is not None and end_day is not None:
        raise wrong(text, "either a range of days or a day at the end, not both", example)
    return tuple(_span(text, day, start, end, end_day) for day in _days(first, last))


def _days(first: str, last: str | None) -> list[int]:
    start = DAYS.index(first)
    count = 0 if last is None else (DAYS.index(last) - start) % 7
    return [(start + offset) % 7 for offset in range(count + 1)]


def _span(text: str, day: int, start: int, end: int, end_day: str | None) -> WeekSpan:
    begin = day * DAY_MINUTES + start
    if end_day is not None:
        until = DAYS.index(end_day) * DAY_MINUTES + end
    else:  # an end before the start, or at it, is the next day's
        until = day * DAY_MINUTES + end + (DAY_MINUTES if end <= start else 0)
    if until % WEEK_MINUTES == begin or (end_day is None and end == start):
        raise wrong(text, "a span whose end is not its start", "for a whole day write Mon 00:00-24:00")
    return WeekSpan(begin, until % WEEK_MINUTES)


def _span_text(text: str) -> str:
    week_spans(text)
    return text


Span = Annotated[str, Field(max_length=60), AfterValidator(_span_text)]
