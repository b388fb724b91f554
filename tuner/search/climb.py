"""From one setting to one that carries more: each candidate is tried just above what the last one could carry."""

import math
from collections.abc import Sequence

from rooftune.policies.request import Setting
from rooftune.policies.slo import Slo
from rooftune.tuner.search.evaluation import Recommendation, Role
from rooftune.tuner.search.feasible_rate import FeasibleRate, Model, feasible_rate
from rooftune.tuner.search.objective import capped_margin, evaluate
from rooftune.tuner.search.space import MIN_CHUNK_CAP_TOKENS
from rooftune.tuner.sim.engine import Engine
from rooftune.tuner.sim.reshape import scale_rate
from rooftune.tuner.sim.workload import Traffic

MOST_CANDIDATES = 8
STRIDES_TOKENS = (128, 64, 32, 16, 8)


def climb(
    candidates: Sequence[Setting],
    chosen: Setting,
    rate: FeasibleRate,
    traffic: Traffic,
    engine: Engine,
    model: Model,
    slo: Slo,
) -> tuple[Setting, FeasibleRate, int]:
    """The candidate that carries most, where any carries more than what was chosen; and the replays that it took.

    What fails where the last one failed does not carry more, so most candidates cost one replay.
    """
    replays = 0
    for candidate in candidates:
        if math.isinf(rate.above_scale):
            break
        replays += 1
        bar = scale_rate(traffic, rate.above_scale)
        if evaluate(bar, engine, candidate, model, slo, Role.SEARCH)[0].feasible:
            chosen = candidate
            rate = feasible_rate(traffic, engine, model, slo, chosen, start_scale=rate.above_scale)
            replays += rate.replays
    return chosen, rate, replays


def beside(setting: Setting, stride: int, engine: Engine) -> list[Setting]:
    """Budgets up to one stride (tokens) to either side of a setting's, with chunk caps up to two, and with none."""
    budgets = [b for b in (setting.step_tokens + k * stride for k in (-1, 0, 1)) if b >= setting.max_running]
    cap = setting.chunk_cap_tokens or setting.step_tokens
    caps = [c for c in (cap + k * stride for k in (-2, -1, 0, 1, 2)) if c >= MIN_CHUNK_CAP_TOKENS]
    found = [
        setting._replace(step_tokens=b, chunk_cap_tokens=0 if c >= b else c)
        for b in budgets
        for c in (0, *caps)
        if b <= engine.boot.ceiling_tokens
    ]
    return [s for s in dict.fromkeys(found) if s != setting]


def candidates(found: Recommendation) -> list[Setting]:
    """The settings that meet every target at that rate, those with most to spare at their tightest target first."""
    met = [e for e in found.evaluations if e.whole_traffic and e.feasible]
    met.sort(key=lambda e: max(capped_margin(row) for row in e.margins))
    return list(dict.fromkeys([e.setting for e in met]))[:MOST_CANDIDATES]
