"""The bench of orders under overload: the published orders are what they say, ours are the product's."""

from dataclasses import replace

import numpy as np
import pytest

from rooftune.policies.request import DEADLINE, SHORTEST_FIRST
from rooftune.tuner.bench.mixes import ENGINE, MODEL, SLO
from rooftune.tuner.sim.twin import simulate
from rooftune.tuner.traffic.generate import document_mix
from tests.bench.policies_overload import (
    BASE,
    FAMILIES,
    OURS,
    PREFLOW,
    PUBLISHED,
    QOSERVE,
    SGLANG,
    Best,
    Case,
    headline,
    page,
    run,
)

pytestmark = pytest.mark.slow  # compiles a twin of its own
TRAFFIC = document_mix(3, 8.0, 30.0, 8, (16_000, 32_000))


@pytest.mark.parametrize("policy", [SHORTEST_FIRST, DEADLINE])
def test_our_orders_run_as_in_the_product(policy: int) -> None:
    setting = BASE._replace(order_policy=policy, aging_s=2.0, aged_share=0.2, wait_tokens_per_s=1_000.0)
    one = run(TRAFFIC, setting).outcomes
    other = simulate(TRAFFIC, ENGINE, setting, MODEL, gap_bounds_s=SLO.gap_bounds()).outcomes
    assert np.array_equal(one.first_token_s, other.first_token_s) and np.array_equal(one.finish_s, other.finish_s)


def test_published_orders_at_their_limits() -> None:
    """All wait at once: no rate and endless D are shortest first, an endless rate is first come, first served."""
    at_once = replace(TRAFFIC, arrival_s=np.linspace(0.0, 1e-6, len(TRAFFIC)))
    fcfs = run(at_once, BASE).outcomes.first_token_s
    shortest = run(at_once, BASE._replace(order_policy=SHORTEST_FIRST, aging_s=1e3)).outcomes.first_token_s
    half = len(at_once) // 2
    for setting in (
        BASE._replace(order_policy=SGLANG, aging_s=0.0),
        BASE._replace(order_policy=PREFLOW, aging_s=3600.0),
        BASE._replace(order_policy=QOSERVE, aging_s=32.0, ttft_target_s=3600.0),
    ):
        first = run(at_once, setting).outcomes.first_token_s
        assert np.median(first) == pytest.approx(np.median(shortest), rel=0.05)
        assert np.median(first) < 0.8 * np.median(fcfs)
    assert np.argsort(fcfs)[:half].mean() < 0.7 * half


def test_the_page_and_the_headline_compare_the_best_of_each_side() -> None:
    shares = dict.fromkeys(FAMILIES, 0.2) | dict.fromkeys(OURS, 0.6) | {PUBLISHED[1]: 0.5}
    best = {name: Best(BASE, share, 9.0, 1.0, 2.0) for name, share in shares.items()}
    found = [Case("documents", load, 4.0 * load, best) for load in (0.7, 1.3)]
    figures = {figure.name: figure.value for figure in headline(found)}
    assert figures["overload_best_over_published"] == pytest.approx(1.2)
    assert figures["overload_share_over_always_first"] == pytest.approx(3.0)
    text = page(found)
    assert "serves +20.0% good requests over the best published order" in text
    assert text.count("| documents |") == 2 and "60.0 %, 9 s" in text
