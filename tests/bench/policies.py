"""Bench ``policies``: what budget policies, order policies and caps gain over the best budget, each family tuned.

Five traffics of ``mixes`` and a day. A figure is the share of requests that meet TTFT <= 2 s and have at most 1 % of
their gaps above 30 ms. Its baseline is the best budget alone on the same traffic; for the headline, what was
published for adaptive budgets over the best static setting (+26 % goodput), and for the joint search what a rough
prototype of the twin found. The page docs/policies.md (written by ``policies_page``) has the waits too.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np

from rooftune.policies.commands import Figure
from rooftune.tuner.bench.mixes import BURSTS, GIANTS, SHOP, mix, traces
from rooftune.tuner.search.arena import APART_S
from rooftune.tuner.traffic.generate import DAY_S, Day, Exponential, RequestClass, Uniform, generate
from rooftune.tuner.traffic.reshape import window
from rooftune.tuner.traffic.workload import Traffic
from tests.bench.policies_families import BUDGET, CHUNK_CAP, JOINT, Row, best_of_families, families

DAY = "a day, 1 to 4 req/s"
HOURS = 24
KEPT_S = 75.0
TRIALS, SHORT_TRIALS = 80, 12
DOCUMENT_TOKENS = 2_000
PUBLISHED_GAIN = 1.26
PROTOTYPE = {SHOP: 0.96, BURSTS: 0.95, "azure-code at 0.7x": 0.93}
MIXES = (SHOP, BURSTS, GIANTS)


def day(seed: int = 2) -> Traffic:
    """Chat with 1 in 8 documents over 24 hours, thinned: the first 75 s of every hour, the queue drained in between."""
    output = Exponential(200.0)
    classes = (
        RequestClass(7 / 8, Uniform(100, 1500), output),
        RequestClass(1 / 8, Uniform(16_000, 32_000), output),
    )
    whole = generate(Day(2.5, peak_to_trough=4.0), classes, DAY_S, seed, DAY)
    parts = [window(whole, hour * DAY_S / HOURS, KEPT_S) for hour in range(HOURS)]
    return Traffic(
        np.concatenate([part.arrival_s + place * APART_S for place, part in enumerate(parts)]),
        np.concatenate([part.prompt_tokens for part in parts]),
        np.concatenate([part.output_tokens for part in parts]),
        np.concatenate([part.cached_tokens for part in parts]),
        np.concatenate([part.tenant for part in parts]),
        name=DAY,
    )


@dataclass(frozen=True)
class Case:
    """One traffic, what counts as a long prompt on it (tokens), and the best of every family."""

    name: str
    requests: int
    long_tokens: int
    rows: tuple[Row, ...]

    def row(self, family: str) -> Row:
        """The row of that family."""
        return next(row for row in self.rows if row.family == family)

    @property
    def best_order(self) -> Row:
        """The best of the order policies."""
        return max((row for row in self.rows if "aging" in row.family), key=lambda row: row.good_share)


def cases(short: bool) -> Iterator[Case]:
    """Every traffic in turn; short: the first 100 s of the first one, and fewer trials."""
    if short:
        yield _case(SHOP, mix(SHOP, 100.0), DOCUMENT_TOKENS, SHORT_TRIALS)
        return
    for name in MIXES:
        yield _case(name, mix(name), DOCUMENT_TOKENS, TRIALS)
    yield _case(DAY, day(), DOCUMENT_TOKENS, TRIALS)
    for name, traffic in traces().items():
        yield _case(name, traffic, int(np.quantile(traffic.prompt_tokens, 0.9)), TRIALS)


def _case(name: str, traffic: Traffic, long_tokens: int, trials: int) -> Case:
    rows = best_of_families(traffic, long_tokens, families(trials))
    return Case(name, len(traffic), long_tokens, tuple(rows))


def headline(found: list[Case]) -> list[Figure]:
    """order_gain_mixes: good share of the best order policy over the best budget alone, mean over the synthetic
    mixes; the same over the best budget and chunk cap; and the number of order families that won or lost beyond
    noise, over all traffics.
    """
    mixes = [case for case in found if case.name in MIXES]
    over_budget = [case.best_order.good_share / case.row(BUDGET).good_share for case in mixes]
    over_cap = [case.best_order.good_share / case.row(CHUNK_CAP).good_share for case in mixes]
    verdicts = list(chain.from_iterable((row.verdict for row in case.rows if "aging" in row.family) for case in found))
    return [
        Figure("order_gain_mixes", float(np.mean(over_budget)), "ratio", PUBLISHED_GAIN),
        Figure("order_gain_over_chunk_cap_mixes", float(np.mean(over_cap)), "ratio", 1.0),
        Figure("order_families_won", float(verdicts.count("won")), "families", float(len(verdicts))),
        Figure("order_families_lost", float(verdicts.count("lost")), "families", float(len(verdicts))),
    ]


def bench(short: bool) -> Iterator[Figure]:
    """A figure for each traffic and family, joint_good_share of each traffic, and the headline."""
    found = []
    for case in cases(short):
        found.append(case)
        static = case.row(BUDGET).good_share
        for row in case.rows:
            yield Figure(f"good_share: {case.name}: {row.family}", row.good_share, "share", static)
        prototype = None if short else PROTOTYPE.get(case.name)
        yield Figure(f"joint_good_share: {case.name}", case.row(JOINT).good_share, "share", prototype)
    yield from headline(found)
