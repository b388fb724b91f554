"""Bench ``soak``: a day in virtual time through saturation and back, in a third of its time, and what became of it.

Steps of load, in shares of what the default can carry, with an hour of steps 30 % slower, a burst of ten times the load
for a minute, and a quiet night. Mix and targets: documents, with targets that the default can meet. share_of_hindsight:
good requests under the controller over those of the best fixed setting, chosen for this very day. A dip is a stretch of
sliding windows of verify_s with fewer good requests than the default's beyond noise; a push, a revert or a signal from
two windows before it to its end explains it. The whole day would take a quarter of an hour; so an hour of it lasts
20 minutes, the burst 35 s. ``short``: the same day in 40 minutes, the burst in ten seconds.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from rooftune.policies.commands import Figure
from rooftune.policies.guard import Action
from rooftune.policies.outcomes import BoolArray
from rooftune.policies.request import DEADLINE, FCFS, SHORTEST_FIRST, FloatArray
from rooftune.tuner.bench.mixes import DEFAULT, MODEL
from rooftune.tuner.control.outcome import CycleRecord
from rooftune.tuner.traffic.workload import Traffic
from tests.bench.virtual import (
    MILD,
    Progress,
    Served,
    below,
    capacity_rps,
    controlled,
    fixed,
    mix_at,
    operator_options,
    targets,
    windows,
)

HOUR_S = 3600.0
# Hours and the load in them; the day begins in the morning and ends with the night.
DAY = (
    (2, 0.5), (2, 0.7), (1, 1.0), (1, 0.6), (0.5, 1.3), (1.5, 0.5), (0.25, 2.0), (2.75, 0.5), (3, 0.6), (2, 0.8),
    (2, 0.5), (6, 0.05),
)  # fmt: skip
SLOW_HOUR, SLOW = 12.0, 1.3
BURST_HOUR, BURST_S, BURST = 14.5, 60.0, 10.0
BUDGETS, CAPS, AGED_SHARES = (256, 600, 1200, 2048), (0, 256), (0.1, 1.0)
EXPLAINED_WINDOWS = 2
LONG, SHORT = 1.0 / 3.0, 1.0 / 36.0  # of a day's time


def load_at(hour: float) -> float:
    """Share of capacity at this hour of the day."""
    for hours, load in DAY:
        if hour < hours:
            return load
        hour -= hours
    return DAY[-1][1]


def day(scale: float, seed: int) -> tuple[Traffic, float]:
    """The day's arrivals, its length times ``scale``, and that length in seconds."""
    span_s, burst_s = 24.0 * HOUR_S * scale, max(10.0, BURST_S * scale**0.5)
    burst_from_s = BURST_HOUR * HOUR_S * scale
    at_s = np.linspace(0.0, span_s, 24 * 3600 + 1)
    load = np.array([load_at(one / (HOUR_S * scale)) for one in at_s])
    load[(at_s >= burst_from_s) & (at_s < burst_from_s + burst_s)] *= BURST
    # Arrivals at constant rate, moved to where the integral of the load has grown as far.
    grown = np.concatenate([[0.0], np.cumsum(load[:-1] * np.diff(at_s))])
    even = mix_at(MILD, capacity_rps(MILD), float(grown[-1]), seed)
    return moved(even, np.interp(even.arrival_s, grown, at_s)), span_s


def moved(traffic: Traffic, arrival_s: FloatArray) -> Traffic:
    """The same requests at other instants."""
    return Traffic(
        arrival_s, traffic.prompt_tokens, traffic.output_tokens, traffic.cached_tokens, traffic.tenant, name="soak"
    )


def pace(scale: float, at_s: float) -> float:
    """Factor on the time of steps."""
    hour = at_s / (HOUR_S * scale)
    return SLOW if SLOW_HOUR <= hour < SLOW_HOUR + 1.0 else 1.0


def dips(low: BoolArray, end_s: FloatArray, length_s: float) -> list[tuple[float, float]]:
    """Stretches of neighbouring low windows: begin of the first, end of the last."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], low, [False]]).astype(int)))
    return [(float(end_s[a]) - length_s, float(end_s[b - 1])) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def explained(dip: tuple[float, float], records: Sequence[tuple[float, CycleRecord]], before_s: float) -> bool:
    """Whether a push, a revert or a signal was recorded in it or up to ``before_s`` before."""
    return any(
        record.pushed is not None or record.action is Action.REVERT or bool(record.signals)
        for at_s, record in records
        if dip[0] - before_s <= at_s <= dip[1]
    )


def hindsight(traffic: Traffic, span_s: float, scale: float) -> Served:
    """The best fixed setting for these arrivals."""
    late = {"ttft_target_s": 2.0, "prefill_s_per_token": MODEL.slope_s_per_token}
    orders: list[dict[str, float]] = [{"order_policy": FCFS}]
    for order in ({"order_policy": SHORTEST_FIRST}, {"order_policy": DEADLINE} | late):
        orders += [order | {"aging_s": 30.0, "aged_share": share} for share in AGED_SHARES]
    tried = [
        DEFAULT._replace(step_tokens=tokens, chunk_cap_tokens=cap, **order)
        for tokens in BUDGETS for cap in CAPS for order in orders
    ]  # fmt: skip
    slo, slow = targets(MILD), partial(pace, scale)
    return max((fixed(traffic, span_s, slo, setting, pace=slow) for setting in tried), key=lambda one: one.share)


def bench(short: bool) -> Iterator[Figure]:
    """See the module."""
    scale = SHORT if short else LONG
    progress = Progress("soak", 3)
    (traffic, span_s), slo, slow = day(scale, seed=1), targets(MILD), partial(pace, scale)
    default, same = (fixed(traffic, span_s, slo, seed=seed, pace=slow) for seed in (1, 2))
    progress.tell(f"default: {default.share:.3f} good of {len(traffic)}")
    best = hindsight(traffic, span_s, scale)
    progress.tell(f"best fixed setting: {best.share:.3f} good")
    cadence = {"cycle_s": 10.0, "verify_s": 60.0, "lease_s": 60.0}
    cadence |= {"window_s": 180.0, "search_every_s": 300.0} if short else {"window_s": 600.0, "search_every_s": 900.0}
    options = operator_options(slo, 1, 20 if short else 60, cadence)
    tuned = controlled(traffic, span_s, options, pace=slow)
    progress.tell(f"controller: {tuned.share:.3f} good")
    by_window = partial(windows, length_s=options.verify_s, step_s=options.cycle_s, span_s=span_s)
    found = by_window(default, tuned)
    low = dips(below(found, by_window(default, same)), found.end_s, options.verify_s)
    told = [one for one in low if explained(one, tuned.records, EXPLAINED_WINDOWS * options.verify_s)]
    records = [record for _, record in tuned.records]
    yield Figure("good_share", tuned.share, "share", default.share)
    yield Figure("share_of_hindsight", tuned.share / best.share, "share", default.share / best.share)
    yield Figure("dips", float(len(low)), "dips", 0.0)
    yield Figure("dips_explained", float(len(told)), "dips", float(len(low)))
    yield Figure("minutes_in_dips", sum(end - begin for begin, end in low) / 60.0, "min", 0.0)
    yield Figure("pushes", float(sum(record.pushed is not None for record in records)), "pushes")
    yield Figure("reverts", float(sum(record.action is Action.REVERT for record in records)), "reverts")
