"""Values as people write them on a command line: 30ms, 1/30, 2x@0.5:60s. One way to write each, for every command."""

import math
import re

from rooftune.policies.commands import (
    NUMBER,
    add_value,
    flag_of,
    number_or_nan,
    parse_choice,
    parse_count,
    parse_number,
    parse_positive,
    refuse,
)
from rooftune.tuner.address import parse_address
from rooftune.tuner.clock import MAX_DURATION_S, in_seconds
from rooftune.tuner.traffic.generate import Constant, Exponential, Lengths, LogNormal, Uniform
from rooftune.tuner.traffic.reshape import MAX_RATE_SCALE, Burst

# Those that both sides use stand in policies/commands.py; every command of this side imports all of them from here.
__all__ = [
    "add_value", "flag_of", "parse_burst", "parse_choice", "parse_count", "parse_duration", "parse_lengths",
    "parse_number", "parse_pair", "parse_positive", "parse_rate", "parse_rate_scale", "parse_share", "parse_url",
]  # fmt: skip
_RATIO = re.compile(rf"({NUMBER})/({NUMBER})")


def parse_duration(text: str, what: str = "duration", *, zero: bool = False) -> float:
    """Seconds of ``2s``, ``30ms``, ``1.5m``, ``250us``, ``2h`` or ``1d``; above 0 (with ``zero``: or 0), at most 1e9.

    A bare number is an error: a target of 30 may mean seconds or milliseconds, a thousandfold apart.
    """
    text = text.strip()
    seconds = in_seconds(text)
    if seconds is None:
        remedy = f"write {text}s or {text}ms" if not math.isnan(number_or_nan(text)) else "write 2s, 30ms or 1.5m"
        raise refuse(what, text, "a number with a unit (us, ms, s, m, h, d)", remedy)
    if seconds > MAX_DURATION_S or seconds < 0 or (seconds == 0 and not zero):
        low = "at least 0" if zero else "above 0"
        raise refuse(what, text, f"{low} and at most {MAX_DURATION_S:g}s", "correct it")
    return seconds


def parse_share(text: str, what: str, *, ends: bool = True) -> float:
    """A share 0..1 of ``0.99``, ``99%`` or ``1/30``; without ``ends``, 0 and 1 themselves are refused."""
    text = text.strip()
    ratio = _RATIO.fullmatch(text)
    if ratio is not None:
        part, whole = float(ratio[1]), float(ratio[2])
        value = part / whole if whole > 0 and math.isfinite(whole) else math.nan
    elif text.endswith("%"):
        value = number_or_nan(text[:-1]) / 100.0
    else:
        value = number_or_nan(text)
    if not 0.0 <= value <= 1.0 or (not ends and value in (0.0, 1.0)):
        bound = "a share within 0..1" if ends else "a share above 0 and below 1"
        raise refuse(what, text, bound, "write 0.05, 5% or 1/20")
    return value


def parse_rate(text: str, what: str = "--rate") -> float:
    """Requests per second of ``3`` or ``3/s``; above 0."""
    return parse_positive(text.strip().removesuffix("/s"), what, high=1e6)


def parse_rate_scale(text: str, what: str = "--rate-scale") -> float:
    """A factor on the rate of arrivals, ``1.8`` or ``1.8x``, within 0.001..1000."""
    return parse_number(text.strip().removesuffix("x"), what, low=1.0 / MAX_RATE_SCALE, high=MAX_RATE_SCALE)


def parse_burst(text: str, what: str = "--burst") -> Burst:
    """``2x@0.5:60s`` doubles the rate for 60 s from the middle of the traffic, ``2x@120s:60s`` from 120 s on."""
    head, colon, length = text.strip().partition(":")
    factor, at, where = head.partition("@")
    if not colon or not at:
        raise refuse(what, text, "FACTORx@WHERE:LENGTH", "write 2x@0.5:60s (from the middle) or 2x@120s:60s")
    speed = parse_positive(factor.removesuffix("x"), f"factor of {what}", high=1e3)
    length_s = parse_duration(length, f"length of {what}")
    if in_seconds(where.strip()) is not None:
        return Burst(speed, length_s, start_s=parse_duration(where, f"start of {what}", zero=True))
    return Burst(speed, length_s, start_share=parse_share(where, f"start of {what}"))


def parse_lengths(text: str, what: str) -> Lengths:
    """Lengths: ``1000``, ``100-1500`` (uniform), ``exp:200`` (mean) or ``lognormal:800,1.0`` (median, sigma)."""
    text = text.strip()
    kind, colon, rest = text.partition(":")
    if colon and kind == "exp":
        return Exponential(parse_positive(rest, f"mean of {what}"))
    if colon and kind == "lognormal":
        median, comma, sigma = rest.partition(",")
        if comma:
            return LogNormal(parse_positive(median, f"median of {what}"), parse_positive(sigma, f"sigma of {what}"))
    elif not colon:
        low, dash, high = text.partition("-")
        if dash and low:
            return Uniform(parse_count(low, f"shortest of {what}"), parse_count(high, f"longest of {what}"))
        if text.lstrip("+-").isdecimal():
            return Constant(parse_count(text, what))
    remedy = "write 1000, 100-1500, exp:200 or lognormal:800,1.0"
    raise refuse(what, text, "a number of tokens or a distribution of them", remedy)


def parse_url(text: str, what: str, *, engine: bool = True, sockets: bool = True) -> str:
    """The address of an engine or a controller in its one form; the flags of ``parse_address``."""
    return str(parse_address(text.strip(), what, engine=engine, sockets=sockets))


def parse_pair(text: str, what: str, form: str, example: str) -> tuple[str, str]:
    """The two sides of a text with a colon. form: such as START:LEN, for the message."""
    first, colon, second = text.strip().partition(":")
    if not colon:
        raise refuse(what, text, form, f"write {example}")
    return first, second
