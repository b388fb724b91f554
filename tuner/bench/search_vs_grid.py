"""Bench ``search-vs-grid``: does the search find what an exhaustive grid of budgets and chunk caps finds?

Same twin, same traffic. Per traffic: the median over seeds of the search's good share, and of random search's, both
divided by the grid's. The grid's budgets below the sequence cap run with as many sequences as budget.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import numpy as np

from rooftune.policies.commands import Figure
from rooftune.policies.request import Setting
from rooftune.policies.slo import good
from rooftune.tuner.bench.mixes import BURSTS, DEFAULT, ENGINE, GIANTS, MODEL, SHOP, SLO, mix, traces
from rooftune.tuner.search.arena import PARALLEL, Arena
from rooftune.tuner.search.evaluation import Case, Evaluation, Role
from rooftune.tuner.search.objective import evaluate
from rooftune.tuner.search.rank import rank
from rooftune.tuner.search.recommend import recommend
from rooftune.tuner.sim.twin import Ends
from rooftune.tuner.traffic.workload import Traffic

BUDGETS = (*range(128, 2049, 32), 4096, 8192, 16_384)
CAPS = (0, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
BATCH = 16
SHORT_BUDGETS = (256, 384, 480, 512, 544, 576, 640, 768, 1024, 2048)
SHORT_CAPS = (0, 64, 96, 128, 256)


def grid_best(traffic: Traffic, budgets: tuple[int, ...], caps: tuple[int, ...]) -> Evaluation:
    """The point of the grid with the largest good share.

    Every point is replayed, but given up after a quarter of the steps when more requests have failed by then than fail
    under the best point so far: what has failed stays failed, so none of these is the best.
    """
    settings = [
        DEFAULT._replace(step_tokens=budget, chunk_cap_tokens=cap, max_running=min(DEFAULT.max_running, budget))
        for cap in caps
        for budget in budgets
        if cap < budget
    ]
    arena = Arena(Case(traffic, ENGINE, MODEL, SLO))
    best = arena.run([(DEFAULT, Role.SWEEP)])[0]
    look = best.simulated_steps // 4
    with ThreadPoolExecutor(PARALLEL) as pool:
        for first in range(0, len(settings), BATCH):
            batch = settings[first : first + BATCH]
            failed = pool.map(lambda setting: surely_failed(traffic, setting, look), batch)
            allowed = round((1.0 - best.attainment) * len(traffic))
            left = [(one, Role.SWEEP) for one, bad in zip(batch, failed, strict=True) if bad <= allowed]
            best = max([best, *arena.run(left)], key=lambda e: e.attainment)
    return best


def surely_failed(traffic: Traffic, setting: Setting, steps: int) -> int:
    """Requests that have missed a target for good after ``steps`` steps."""
    outcomes = evaluate(Case(traffic, ENGINE, MODEL, SLO), setting, Role.SWEEP, Ends(steps))[1].outcomes
    first_s, arrival_s = outcomes.first_token_s, outcomes.arrival_s
    now_s = np.nanmax(np.concatenate([first_s, outcomes.finish_s, [0.0]]))
    bound_s = min(target.bound_s for target in SLO.targets if target.metric == "ttft")
    waited_s = np.where(np.isnan(first_s), now_s, first_s) - arrival_s
    return int(((waited_s > bound_s) | (outcomes.finished & ~good(outcomes, SLO))).sum())


def bench(short: bool) -> Iterator[Figure]:
    """worst_share_of_grid, random_share_of_grid (worst traffic each), third_mix_good_share, and one share a traffic."""
    span_s, seeds, trials = (150.0, 1, 100) if short else (600.0, 5, 200)
    traffic = {name: mix(name, span_s) for name in ((GIANTS,) if short else (SHOP, BURSTS, GIANTS))}
    if not short:
        traffic.update(traces())
    shares, random_shares = {}, {}
    for name, requests in traffic.items():
        best = grid_best(requests, *((SHORT_BUDGETS, SHORT_CAPS) if short else (BUDGETS, CAPS)))
        case = Case(requests, ENGINE, MODEL, SLO)
        runs = [recommend(case, current=DEFAULT, trials=trials, seed=s) for s in range(seeds)]
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
