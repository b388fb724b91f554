"""Bench ``overload``: what the controller makes of constant load at 0.7 to 2 times what the default can carry.

Capacity is what the default serves per second when requests never run out. Each load is served for twenty minutes by
the default and under the controller, on the document mix and the same with targets that the default can meet. Two seeds
take about five minutes on two cores, and find no loss of a few points. azure-conv is left out: its many decodes make it
several times as dear (``compare`` serves it). goodput_ratio_to_default: good requests under the controller over the
default's (at least one), the least of the mixes. worst_share_lost_points: of any single run. minutes_below_default: of
all runs, ends of sliding windows of verify_s with fewer good requests than the default's beyond noise, after the first
two; minutes_below_default_most: of one run. ``short``: one mix, two loads, one seed, ten minutes.
"""

from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product

import numpy as np

from rooftune.policies.commands import Figure
from tests.bench.virtual import (
    DOCUMENTS,
    MILD,
    Progress,
    below,
    capacity_rps,
    controlled,
    fixed,
    mix_at,
    operator_options,
    targets,
    windows,
)

LOADS = (0.7, 0.9, 1.0, 1.2, 2.0)
SETTLED_WINDOWS = 2
OTHER_CHANCE = 1000  # added to a seed for the default's second run
WORKERS = 2


@dataclass(frozen=True)
class Form:
    """One form of the bench: of each mix every load with every seed for span_s."""

    mixes: tuple[str, ...]
    loads: tuple[float, ...]
    seeds: int
    span_s: float
    trials: int
    cadence: Mapping[str, float]


@dataclass(frozen=True)
class Compared:
    """One run: requests, how many were good by the default and under the controller, minutes below, pushes."""

    mix: str
    load: float
    seed: int
    requests: int
    default: int
    controlled: int
    minutes_below: float
    pushes: int

    @property
    def lost_points(self) -> float:
        return 100.0 * (self.default - self.controlled) / self.requests


SHORT = Form(
    (MILD,), (0.7, 1.2), 1, 600.0, 20,
    {"cycle_s": 10.0, "window_s": 180.0, "search_every_s": 180.0, "verify_s": 60.0, "lease_s": 60.0},
)  # fmt: skip
FULL_CADENCE = {"cycle_s": 10.0, "window_s": 300.0, "search_every_s": 300.0, "verify_s": 60.0, "lease_s": 60.0}


def compare(form: Form, mix: str, load: float, seed: int) -> Compared:
    """The same arrivals by the default, twice, and under the controller."""
    slo, span_s = targets(mix), form.span_s
    traffic = mix_at(mix, load * capacity_rps(mix), span_s, seed + 1)
    default, same = (fixed(traffic, span_s, slo, seed=one) for one in (seed, seed + OTHER_CHANCE))
    options = operator_options(slo, seed, form.trials, form.cadence)
    tuned = controlled(traffic, span_s, options, seed)
    by_window = partial(windows, length_s=options.verify_s, step_s=options.cycle_s, span_s=span_s)
    found = by_window(default, tuned)
    late = below(found, by_window(default, same)) & (found.end_s > SETTLED_WINDOWS * options.verify_s)
    return Compared(
        mix, load, seed, len(traffic), int(default.good.sum()), int(tuned.good.sum()),
        float(late.sum()) * options.cycle_s / 60.0, sum(record.pushed is not None for _, record in tuned.records),
    )  # fmt: skip


def bench(short: bool) -> Iterator[Figure]:
    """See the module."""
    form = SHORT if short else Form((MILD, DOCUMENTS), LOADS, 2, 1200.0, 40, FULL_CADENCE)
    for mix in form.mixes:
        yield Figure(f"capacity_rps: {mix}", capacity_rps(mix), "req/s")
    yield from figures(list(_compared(form, 1 if short else WORKERS)))


def _compared(form: Form, workers: int) -> Iterator[Compared]:
    cases = list(product(range(form.seeds), form.mixes, form.loads))
    progress = Progress("overload", len(cases))
    with ProcessPoolExecutor(workers) as pool:
        waiting = [pool.submit(compare, form, mix, load, seed) for seed, mix, load in cases]
        for one in waiting:
            found = one.result()
            progress.tell(
                f"{found.mix} at {found.load:g}, seed {found.seed}: default {found.default / found.requests:.3f} good, "
                f"controller {found.controlled / found.requests:.3f}, {found.minutes_below:.1f} min below"
            )
            yield found


def figures(runs: list[Compared]) -> Iterator[Figure]:
    """Of all runs; baselines are the default's."""
    for load in sorted({one.load for one in runs}):
        ratios = []
        for mix in dict.fromkeys(one.mix for one in runs):
            here = [one for one in runs if (one.mix, one.load) == (mix, load)]
            asked = sum(one.requests for one in here)
            was, now = sum(one.default for one in here), sum(one.controlled for one in here)
            ratios.append(now / max(was, 1))
            yield Figure(f"good_share_at_{round(load * 100):03d}: {mix}", now / asked, "share", was / asked)
        yield Figure(f"goodput_ratio_to_default_at_{round(load * 100):03d}", min(ratios), "ratio", 1.0)
    if max(one.seed for one in runs) > 0:
        yield Figure("loads_below_default", float(loads_below(runs)), "of mix and load", 0.0)
    yield Figure("worst_share_lost_points", max(0.0, *(one.lost_points for one in runs)), "points", 0.0)
    yield Figure("minutes_below_default", sum(one.minutes_below for one in runs), "min", 0.0)
    yield Figure("minutes_below_default_most", max(one.minutes_below for one in runs), "min", 0.0)


SIGMAS = 2.0


def loads_below(runs: list[Compared]) -> int:
    """Pairs of mix and load at which the share lost, a mean over seeds, is above 0 by two standard errors; at least
    two seeds."""
    found = 0
    for case in {(one.mix, one.load) for one in runs}:
        lost = np.array([one.lost_points for one in runs if (one.mix, one.load) == case])
        found += float(lost.mean()) > SIGMAS * float(lost.std(ddof=1)) / len(lost) ** 0.5
    return found
