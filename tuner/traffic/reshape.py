"""The same requests at other times: another rate, a burst, a window. Deterministic; adds no requests."""

import math
from dataclasses import dataclass, replace

import numpy as np

from rooftune.policies.errors import InputError, bad_value
from rooftune.tuner.traffic.workload import MAX_ARRIVAL_S, FloatArray, Traffic

MAX_RATE_SCALE = 1000.0
MAX_BURST_FACTOR = 100.0
_EXAMPLE = "write 2x@0.5:60s"


@dataclass(frozen=True)
class Burst:
    """For ``length_s`` seconds requests arrive ``factor`` times as fast.

    factor: above 1, at most 100. Exactly one of start_s (seconds, counted like ``arrival_s``) and start_share
    (share of the span from first to last arrival, 0 up to but without 1) says where it begins.
    Raises InputError when a value is out of range.
    """

    factor: float
    length_s: float
    start_s: float | None = None
    start_share: float | None = None

    def __post_init__(self) -> None:
        if not 1.0 < self.factor <= MAX_BURST_FACTOR:
            raise bad_value("burst factor", self.factor, f"above 1 and at most {MAX_BURST_FACTOR:g}", _EXAMPLE)
        if not 0.0 < self.length_s <= MAX_ARRIVAL_S:
            raise bad_value("burst length_s", self.length_s, f"above 0 and at most {MAX_ARRIVAL_S:g}", _EXAMPLE)
        if (self.start_s is None) == (self.start_share is None):
            raise InputError("a burst begins at a time or at a share of the span; give one of the two")
        if self.start_share is not None and not 0.0 <= self.start_share < 1.0:
            raise bad_value("burst start share", self.start_share, "at least 0 and below 1", _EXAMPLE)
        if self.start_s is not None and not 0.0 <= self.start_s <= MAX_ARRIVAL_S:
            raise bad_value("burst start_s", self.start_s, f"within 0..{MAX_ARRIVAL_S:g}", "write 2x@120s:60s")


def scale_rate(traffic: Traffic, factor: float) -> Traffic:
    """``factor`` times the requests per second: arrival times divided by it. Raises InputError."""
    if not math.isfinite(factor) or not 1.0 / MAX_RATE_SCALE <= factor <= MAX_RATE_SCALE:
        raise bad_value("rate scale", factor, f"within {1 / MAX_RATE_SCALE:g}..{MAX_RATE_SCALE:g}", "1 leaves the rate")
    if factor == 1.0:
        return traffic
    return replace(traffic, arrival_s=traffic.arrival_s / factor, name=f"{traffic.name} at {factor:g}x rate")


def add_burst(traffic: Traffic, burst: Burst) -> Traffic:
    """The same requests with the arrivals of one window compressed.

    From the start of the burst on, ``factor * length_s`` seconds of traffic pass in ``length_s`` seconds;
    later requests keep their gaps and arrive ``(factor - 1) * length_s`` seconds earlier. So no request is added,
    duplicated or dropped (prefix content and tenants stay correct), and the load after the burst is unchanged.
    Raises InputError when the burst begins at or after the last arrival, where it would change nothing.
    """
    first, last = float(traffic.arrival_s[0]), float(traffic.arrival_s[-1])
    start_s = burst.start_s if burst.start_s is not None else first + (burst.start_share or 0.0) * (last - first)
    if start_s >= last:
        raise InputError(
            f"a burst from {start_s:g} s changes nothing: the last request of {traffic.name} arrives at {last:g} s; "
            "begin earlier"
        )
    since_start = traffic.arrival_s - start_s
    inside = since_start <= burst.factor * burst.length_s
    moved = np.where(inside, since_start / burst.factor, since_start - (burst.factor - 1.0) * burst.length_s)
    arrival_s: FloatArray = np.where(since_start <= 0, traffic.arrival_s, start_s + moved)
    # Where the two pieces meet, rounding by one bit may swap neighbours.
    arrival_s = np.maximum.accumulate(arrival_s)
    label = f"{traffic.name} with {burst.factor:g}x burst at {start_s:g} s for {burst.length_s:g} s"
    return replace(traffic, arrival_s=arrival_s, name=label)


def window(traffic: Traffic, start_s: float, length_s: float) -> Traffic:
    """The requests that arrive within start_s <= t < start_s + length_s, their times counted from start_s.

    Raises InputError when the bounds are not finite, the length is not positive, or nothing arrives in it.
    """
    if not math.isfinite(start_s) or start_s < 0:
        raise bad_value("window start_s", start_s, "finite and at least 0", "count seconds from the start")
    if not math.isfinite(length_s) or length_s <= 0:
        raise bad_value("window length_s", length_s, "finite and above 0", "give seconds")
    low, high = np.searchsorted(traffic.arrival_s, [start_s, start_s + length_s], side="left")
    if low == high:
        raise InputError(
            f"no request of {traffic.name} arrives within {start_s:g}..{start_s + length_s:g} s (it has "
            f"{traffic.arrival_s[0]:g}..{traffic.arrival_s[-1]:g} s); choose another window"
        )
    rows = slice(int(low), int(high))
    offsets, keys = traffic.prefix_offsets, traffic.prefix_keys
    if len(offsets):
        keys = keys[offsets[low] : offsets[high]]
        offsets = offsets[low : high + 1] - offsets[low]
    return replace(
        traffic,
        arrival_s=traffic.arrival_s[rows] - start_s,
        prompt_tokens=traffic.prompt_tokens[rows],
        output_tokens=traffic.output_tokens[rows],
        cached_tokens=traffic.cached_tokens[rows],
        tenant=traffic.tenant[rows],
        prefix_offsets=offsets,
        prefix_keys=keys,
        name=f"{traffic.name} from {start_s:g} s for {length_s:g} s",
    )


def repeat(traffic: Traffic, times: int) -> Traffic:
    """The same requests ``times`` times, one after another at the same rate; prefixes are not shared between them.

    Raises InputError for traffic that arrives all at once, or fewer than one time.
    """
    period_s = period_of(traffic)
    if times < 1:
        raise bad_value("times", times, "at least 1", "1 leaves the traffic as it is")
    if times == 1:
        return traffic
    shift_s = np.repeat(period_s * np.arange(times), len(traffic))
    keys, offsets = traffic.prefix_keys, traffic.prefix_offsets
    if len(offsets):
        kinds = int(keys.max()) + 1 if len(keys) else 0
        offsets = np.concatenate([[0], *(offsets[1:] + len(keys) * k for k in range(times))])
        keys = np.concatenate([keys + kinds * k for k in range(times)])
    return replace(
        traffic,
        arrival_s=np.tile(traffic.arrival_s, times) + shift_s,
        prompt_tokens=np.tile(traffic.prompt_tokens, times),
        output_tokens=np.tile(traffic.output_tokens, times),
        cached_tokens=np.tile(traffic.cached_tokens, times),
        tenant=np.tile(traffic.tenant, times),
        prefix_offsets=offsets,
        prefix_keys=keys,
        name=f"{traffic.name}, {times} times",
    )


def period_of(traffic: Traffic) -> float:
    """Seconds from one repetition to the next: the span, and one mean gap between arrivals. Requests over it are the
    offered rate. Raises InputError for traffic that arrives all at once."""
    n = len(traffic)
    if n < 2 or traffic.span_s <= 0.0:
        raise InputError(f"{traffic.name} arrives all at once, so it has no rate; give traffic that spans a time")
    return traffic.span_s * n / (n - 1)
