"""The families of settings that the bench ``policies`` compares, and the best of each on one traffic.

Each family is tuned by itself: same twin, traffic and sampler, started from the best of the plainer families.
The share of good requests is the only objective, so every family wants the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rooftune.policies.quantiles import quantile
from rooftune.policies.request import DEADLINE, PRESSURE, SHORTEST_FIRST, STEP_TIME_TARGET, FloatArray, Setting
from rooftune.policies.slo import longest_wait_s
from rooftune.tuner.bench.mixes import DEFAULT, ENGINE, MODEL, SLO
from rooftune.tuner.search.arena import PARALLEL, Arena, slices
from rooftune.tuner.search.evaluation import Case, Evaluation, Role
from rooftune.tuner.search.objective import evaluate
from rooftune.tuner.search.rank import noise
from rooftune.tuner.search.space import CAPS, EVERYTHING, STOCK_VLLM, SearchSpace, search_space
from rooftune.tuner.search.stages import Track
from rooftune.tuner.search.study import SettingStudy
from rooftune.tuner.sim.result import RunResult
from rooftune.tuner.traffic.workload import Traffic

BUDGET, CHUNK_CAP, JOINT = "budget alone", "chunk cap", "all together"
STEP_TIME, UNDER_PRESSURE, PARTIAL = "step-time budget", "pressure budget", "partial-prefill caps"
ORDERS = {SHORTEST_FIRST: "shortest first", DEADLINE: "deadline"}
AGING_S = (5, 10, 30)
BUDGETS = (*range(256, 2049, 32), 4096, 8192, 16_384)
# A trial on traffic of more steps than this runs on windows of it, leaders on all of it.
LONG_STEPS = 60_000
WINDOW_SHARE = 0.25
LEADERS = 4


def order_family(policy: int, aging_s: int) -> str:
    """The name of an order policy with that aging bound (seconds)."""
    return f"{ORDERS[policy]}, aging {aging_s} s"


@dataclass(frozen=True)
class Family:
    """name; the knobs to tune, within bounds; what the base fixes beside them; the number of trials."""

    name: str
    knobs: frozenset[str]
    bounds: tuple[tuple[str, float, float], ...] = ()
    fixed: tuple[tuple[str, float], ...] = ()
    trials: int = 80

    def space(self) -> SearchSpace:
        """Around the default setting; order policies know the TTFT target and the time that a prompt token takes."""
        whole = search_space(ENGINE, DEFAULT, SLO, MODEL, knobs=EVERYTHING)
        base = whole.base._replace(**{name: type(getattr(DEFAULT, name))(value) for name, value in self.fixed})
        return replace(whole, base=base, knobs=self.knobs, bounds=self.bounds)


def families(trials: int) -> list[Family]:
    """All but the budget alone, plain ones first; ``trials`` for each, three times that for the joint search."""
    budget_policy = STOCK_VLLM | {"budget_policy"}
    plain = [
        Family(CHUNK_CAP, STOCK_VLLM, trials=trials),
        Family(PARTIAL, STOCK_VLLM | CAPS, trials=trials),
        Family(STEP_TIME, budget_policy, (("budget_policy", STEP_TIME_TARGET, STEP_TIME_TARGET),), trials=trials),
        Family(UNDER_PRESSURE, budget_policy, (("budget_policy", PRESSURE, PRESSURE),), trials=trials),
    ]
    orders = [
        Family(
            order_family(policy, aging), STOCK_VLLM, fixed=(("order_policy", policy), ("aging_s", aging)), trials=trials
        )
        for policy in ORDERS
        for aging in AGING_S
    ]
    return [*plain, *orders, Family(JOINT, EVERYTHING, trials=3 * trials)]


@dataclass(frozen=True)
class Waits:
    """TTFT of a group of requests in seconds (+inf where there was none), and the size of the group."""

    requests: int
    p50_s: float
    p99_s: float


@dataclass(frozen=True)
class Row:
    """The best of one family. gain: good share minus that of the budget alone; noise: half-width of its 90 % interval.

    capped_gain, capped_noise: the same against the chunk cap.
    """

    family: str
    setting: Setting
    good_share: float
    every: Waits
    short: Waits
    long: Waits
    longest_wait_s: float
    gain: float
    noise: float
    capped_gain: float
    capped_noise: float

    @property
    def verdict(self) -> str:
        """Against the budget alone: beyond noise or not."""
        return _verdict(self.gain, self.noise)

    @property
    def capped_verdict(self) -> str:
        """The same against the chunk cap."""
        return _verdict(self.capped_gain, self.capped_noise)


def _verdict(gain: float, noise_of_it: float) -> str:
    return "won" if gain > noise_of_it else "lost" if gain < -noise_of_it else "equal"


def best_of_families(traffic: Traffic, long_tokens: int, wanted: Sequence[Family], seed: int = 0) -> list[Row]:
    """The best setting of every family on that traffic; prompts of at least ``long_tokens`` count as long."""
    case = Case(traffic, ENGINE, MODEL, SLO)
    first = evaluate(case, DEFAULT, Role.CURRENT)[0]
    windows = slices(traffic, WINDOW_SHARE) if first.simulated_steps > LONG_STEPS else None
    whole = Arena(case)
    track = Track(whole, None if windows is None else Arena(replace(case, traffic=windows), whole_traffic=False))
    swept = _swept(track)
    best: dict[str, Evaluation] = {BUDGET: swept[0]}
    starts = [e.setting for e in swept[:3]]
    for family in wanted:
        found = _tuned(family, track, starts, seed)
        best[family.name] = found
        starts.append(found.setting)
    runs = {name: evaluate(case, e.setting, e.role)[1] for name, e in best.items()}
    return [_row(name, best, runs, long_tokens) for name in best]


def _better(evaluation: Evaluation) -> tuple[float, float]:
    return -evaluation.attainment, evaluation.gap_p99_s


def _swept(track: Track) -> list[Evaluation]:
    """Every budget alone, best first."""
    return sorted(
        track.whole.run([(DEFAULT._replace(step_tokens=budget), Role.SWEEP) for budget in BUDGETS]), key=_better
    )


def _tuned(family: Family, track: Track, starts: Sequence[Setting], seed: int) -> Evaluation:
    study = SettingStudy(family.space(), sampler="tpe", seed=seed)
    for setting in reversed(starts[-LEADERS:]):
        # A budget policy starts where it changes nothing yet, or aims at the bound itself.
        study.enqueue(
            setting._replace(
                pressure_tokens=setting.pressure_tokens or setting.step_tokens,
                budget_target_s=setting.budget_target_s or SLO.targets[1].bound_s,
            )
        )
    looks: list[Evaluation] = []
    while len(looks) < family.trials:
        tickets = [study.ask() for _ in range(min(PARALLEL, family.trials - len(looks)))]
        batch = track.look([ticket.setting for ticket in tickets], Role.SEARCH)
        for ticket, evaluation in zip(tickets, batch, strict=True):
            # Without constraints: the good share is all that counts here.
            study.tell(ticket, replace(evaluation, margins=(), missed=()), evaluation.attainment)
        looks += batch
    best = list(dict.fromkeys(e.setting for e in sorted(looks, key=_better)))[:LEADERS]
    return min(track.whole.run([(setting, Role.SEARCH) for setting in best]), key=_better)


def _row(name: str, best: dict[str, Evaluation], runs: dict[str, RunResult], long_tokens: int) -> Row:
    mine, result = best[name], runs[name]
    outcomes = result.outcomes
    waits = np.where(np.isnan(outcomes.first_token_s), np.inf, outcomes.first_token_s - outcomes.arrival_s)
    is_long = outcomes.prompt_tokens >= long_tokens
    against = {other: (mine.attainment - best[other].attainment) for other in (BUDGET, CHUNK_CAP) if other in best}
    widths = {other: noise(runs[other], result, SLO, 0) for other in against}
    return Row(
        family=name,
        setting=mine.setting,
        good_share=mine.attainment,
        every=_waits(waits),
        short=_waits(waits[~is_long]),
        long=_waits(waits[is_long]),
        longest_wait_s=longest_wait_s(outcomes),
        gain=against[BUDGET],
        noise=widths[BUDGET],
        capped_gain=against.get(CHUNK_CAP, 0.0),
        capped_noise=widths.get(CHUNK_CAP, 0.0),
    )


def _waits(ttft_s: FloatArray) -> Waits:
    if not len(ttft_s):
        return Waits(0, float("nan"), float("nan"))
    return Waits(len(ttft_s), quantile(ttft_s, 0.5), quantile(ttft_s, 0.99))
