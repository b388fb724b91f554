"""Bench ``search-vs-grid``: does the search find what an exhaustive grid of budgets and chunk caps finds?

Same twin, same traffic. Per traffic: the median over seeds of the search's good share, and of random search's, both
divided by the grid's. The grid's budgets below the sequence cap run with as many sequences as budget.
"""

from collections.abc import Iterator
from statistics import median

from policies.commands import Figure
from tuner.bench.mixes import BURSTS, DEFAULT, ENGINE, GIANTS, MODEL, SHOP, SLO, mix, traces
from tuner.search.arena import Arena
from tuner.search.evaluation import Evaluation, Role
from tuner.search.rank import rank
from tuner.search.recommend import recommend
from tuner.sim.workload import Traffic

BUDGETS = (*range(128, 2049, 32), 4096, 8192, 16_384)
CAPS = (0, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
SHORT_BUDGETS = (256, 384, 480, 512, 544, 576, 640, 768, 1024, 2048)
SHORT_CAPS = (0, 64, 96, 128, 256)


def grid_best(traffic: Traffic, budgets: tuple[int, ...], caps: tuple[int, ...]) -> Evaluation:
    """The best of the grid, by the search's own order."""
    settings = [
        DEFAULT._replace(step_tokens=budget, chunk_cap_tokens=cap, max_running=min(DEFAULT.max_running, budget))
        for budget in budgets
        for cap in caps
        if cap < budget
    ]
    found = Arena(traffic, ENGINE, MODEL, SLO).run([(setting, Role.SWEEP) for setting in settings])
    return min(found, key=lambda e: rank(e, SLO))


def bench(short: bool) -> Iterator[Figure]:
    """worst_share_of_grid, random_share_of_grid (worst traffic each), third_mix_good_share, and one share a traffic."""
    span_s, seeds, trials = (150.0, 1, 100) if short else (600.0, 5, 200)
    traffic = {name: mix(name, span_s) for name in ((GIANTS,) if short else (SHOP, BURSTS, GIANTS))}
    if not short:
        traffic.update(traces())
    shares, random_shares = {}, {}
    for name, requests in traffic.items():
        best = grid_best(requests, *((SHORT_BUDGETS, SHORT_CAPS) if short else (BUDGETS, CAPS)))
        runs = [recommend(requests, ENGINE, MODEL, SLO, current=DEFAULT, trials=trials, seed=s) for s in range(seeds)]
        # What the sampler found by itself: a recommendation also takes what random search happens to find.
        own = [[e for e in run.evaluations if e.whole_traffic and e.role is not Role.RANDOM] for run in runs]
        found = median(min(tried, key=lambda e: rank(e, SLO)).attainment for tried in own)
        shares[name] = found / best.attainment
        random_shares[name] = median(run.random_best.attainment for run in runs) / best.attainment
        yield Figure(f"good_share: {name}", found, "share", best.attainment)
        if name == GIANTS:
            yield Figure("third_mix_good_share", found, "share", best.attainment)
    yield Figure("worst_share_of_grid", min(shares.values()), "ratio", 1.0)
    yield Figure("random_share_of_grid", min(random_shares.values()), "ratio", 1.0)
