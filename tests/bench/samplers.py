"""Bench ``samplers``: which sampler finds most with the same number of simulated steps on the three synthetic mixes?

TPE, a Gaussian process (where torch is installed) and random draws, each with the same start (the setting in force,
formula, knee and the best of a budget sweep), over the two knobs of a stock vLLM and over every knob. A figure is the
good share found, mean over seeds, beside the best that any of them found there; for random draws that is what the
start alone gives, and luck. ``ask_ms`` is the time of a proposal without its replay, on the machine it runs on.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from statistics import mean

from rooftune.policies.commands import Figure
from rooftune.policies.request import Setting
from rooftune.policies.slo import Slo
from rooftune.tuner.bench.mixes import BURSTS, DEFAULT, ENGINE, GIANTS, MODEL, SHOP, SLO, mix
from rooftune.tuner.search import baselines
from rooftune.tuner.search.arena import PARALLEL, Arena
from rooftune.tuner.search.evaluation import Case, Evaluation, Role
from rooftune.tuner.search.objective import evaluate
from rooftune.tuner.search.rank import rank, value
from rooftune.tuner.search.space import EVERYTHING, STOCK_VLLM, SearchSpace, search_space
from rooftune.tuner.search.study import SettingStudy
from rooftune.tuner.traffic.workload import Traffic

KNOBS = {"2 knobs": STOCK_VLLM, "every knob": EVERYTHING}
STEPS, SHORT_STEPS = 2_000_000, 200_000
SEEDS = 2
SWEPT = 3


@dataclass(frozen=True)
class Found:
    """What one search came to: the best good share, trials made, and seconds spent asking."""

    share: float
    trials: int
    asking_s: float


def search(
    space: SearchSpace, arena: Arena, starts: list[Setting], sampler: str, seed: int, steps: int, slo: Slo
) -> Found:
    """Trials until the distinct ones have taken ``steps`` simulated steps together."""
    study = SettingStudy(space, sampler=sampler, seed=seed)
    for setting in starts:
        study.enqueue(setting)
    seen: dict[Setting, Evaluation] = {}
    trials, asking_s = 0, 0.0
    # In an exhausted space trials cost nothing any more, so their number is bounded too.
    while sum(e.simulated_steps for e in seen.values()) < steps and trials < 1000:
        begun_s = time.perf_counter()
        tickets = [study.ask() for _ in range(PARALLEL)]
        asking_s += time.perf_counter() - begun_s
        for ticket, found in zip(tickets, arena.run([(t.setting, Role.SEARCH) for t in tickets]), strict=True):
            study.tell(ticket, found, value(found, slo))
            seen[ticket.setting] = found
            trials += 1
    return Found(min(seen.values(), key=lambda e: rank(e, slo)).attainment, trials, asking_s)


def compare(traffic: Traffic, knobs: frozenset[str], seeds: int, steps: int) -> dict[str, list[Found]]:
    """Every sampler that is installed, once for each seed."""
    space = search_space(ENGINE, DEFAULT, SLO, MODEL, knobs=knobs)
    case = Case(traffic, ENGINE, MODEL, SLO)
    arena = Arena(case)
    now = evaluate(case, DEFAULT, Role.CURRENT)[1]
    points = arena.run(baselines.starting_points(space, SLO, MODEL, now))
    named = [e.setting for e in points if e.role is not Role.SWEEP]
    swept = sorted((e for e in points if e.role is Role.SWEEP), key=lambda e: rank(e, SLO))
    starts = [DEFAULT, *named, *(e.setting for e in swept[:SWEPT])]
    samplers = ("tpe", "gp", "random") if find_spec("torch") else ("tpe", "random")
    return {
        sampler: [search(space, arena, starts, sampler, seed, steps, SLO) for seed in range(seeds)]
        for sampler in samplers
    }


def bench(short: bool) -> Iterator[Figure]:
    """good_share of each mix, knobs and sampler; trials; then each sampler's mean share of the best, and ask_ms."""
    shares: dict[tuple[str, str], list[float]] = {}
    ask_times_ms: dict[str, list[float]] = {}
    for name in (GIANTS,) if short else (SHOP, BURSTS, GIANTS):
        traffic = mix(name, 100.0 if short else 600.0)
        for label, knobs in KNOBS.items():
            found = compare(traffic, knobs, 1 if short else SEEDS, SHORT_STEPS if short else STEPS)
            best = max(one.share for each in found.values() for one in each)
            for sampler, each in found.items():
                share = mean(one.share for one in each)
                shares.setdefault((label, sampler), []).append(share / best)
                ask_times_ms.setdefault(sampler, []).append(1e3 * mean(one.asking_s / one.trials for one in each))
                yield Figure(f"good_share: {name}: {label}: {sampler}", share, "share", best)
                yield Figure(f"trials: {name}: {label}: {sampler}", mean(one.trials for one in each), "trials")
    for (label, sampler), each_share in shares.items():
        yield Figure(f"share_of_best: {label}: {sampler}", mean(each_share), "ratio", 1.0)
    for sampler, each_ms in ask_times_ms.items():
        yield Figure(f"ask_ms: {sampler}", mean(each_ms), "ms")
