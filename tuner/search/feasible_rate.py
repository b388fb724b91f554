"""The highest rate at which one setting meets every target, by bisection on the speed of the same arrivals.

Bisection takes "met at this rate" to stay met below it. Traffic is finite: at many times its rate a short file ends
before a queue has built up.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rooftune.policies.errors import InputError
from rooftune.policies.request import Setting
from rooftune.tuner.search.evaluation import Case, Evaluation, Recommendation, Role
from rooftune.tuner.search.objective import capped_margin, evaluate
from rooftune.tuner.search.space import MIN_CHUNK_CAP_TOKENS
from rooftune.tuner.sim.engine import Engine

TOLERANCE = 0.02
MOST_REPLAYS = 32
LOWEST_SCALE, HIGHEST_SCALE = 1.0 / 64.0, 64.0


@dataclass(frozen=True)
class FeasibleRate:
    """scale: highest speed of the arrivals tried that meets every target, NaN when none did; rate_rps at that scale.

    above_scale: lowest speed tried that does not, +inf when all did. at, above: the replays there. replays: how many.
    """

    scale: float
    rate_rps: float
    above_scale: float
    at: Evaluation | None
    above: Evaluation | None
    replays: int

    @property
    def width(self) -> float:
        """How far apart both ends are, relative to the lower one."""
        return self.above_scale / self.scale - 1.0


def feasible_rate(
    case: Case,
    setting: Setting,
    *,
    tolerance: float = TOLERANCE,
    start_scale: float = 1.0,
    most_replays: int = MOST_REPLAYS,
) -> FeasibleRate:
    """Doubling or halving from ``start_scale`` on until both ends are known, then bisection to ``tolerance``.

    Stops early after ``most_replays``; looks within 1/64 to 64 times the traffic's own rate. Raises InputError
    without targets, or for traffic that arrives all at once.
    """
    traffic = case.traffic
    if not case.slo.all_targets():
        raise InputError("capacity needs a target: without one every rate is feasible; give --ttft-p99 or --gap-p99")
    if traffic.span_s <= 0.0:
        raise InputError(f"{traffic.name} arrives all at once, so it has no rate; give traffic that spans a time")
    tried: dict[bool, Evaluation] = {}

    def meets(scale: float) -> bool:
        found, _ = evaluate(case.at_rate(scale), setting, Role.SEARCH)
        tried[found.feasible] = found  # each end moves only towards the other, so the latest is the one at that end
        return found.feasible

    low, high, replays = bracket(meets, start_scale, 2.0, tolerance, most_replays)
    at, above = tried.get(True), tried.get(False)
    return FeasibleRate(low, low * len(traffic) / traffic.span_s, high, at, above, replays)


def bracket(
    holds: Callable[[float], bool], start_scale: float, stride: float, tolerance: float, most_replays: int
) -> tuple[float, float, int]:
    """Highest rate scale tried that holds (NaN: none), lowest that does not (+inf: none), and how many were tried.

    Up or down from the start by ``stride``, then bisection until both ends are within ``tolerance``.
    """
    low, high = math.nan, math.inf
    scale, tried = min(max(start_scale, LOWEST_SCALE), HIGHEST_SCALE), 0
    while tried < most_replays:
        tried += 1
        if holds(scale):
            low = scale
        else:
            high = scale
        if high / low - 1.0 <= tolerance:
            break
        if math.isnan(low):
            if scale <= LOWEST_SCALE:
                break
            scale = max(scale / stride, LOWEST_SCALE)
        elif math.isinf(high):
            if scale >= HIGHEST_SCALE:
                break
            scale = min(scale * stride, HIGHEST_SCALE)
        else:
            scale = math.sqrt(low * high)
    return low, high, tried


MOST_CANDIDATES = 8
STRIDES_TOKENS = (128, 64, 32, 16, 8)


def climb(
    candidates: Sequence[Setting], chosen: Setting, rate: FeasibleRate, case: Case
) -> tuple[Setting, FeasibleRate, int]:
    """The candidate that carries most, where any carries more than what was chosen; and the replays that it took.

    What fails where the last one failed does not carry more, so most candidates cost one replay.
    """
    replays = 0
    for candidate in candidates:
        if math.isinf(rate.above_scale):
            break
        replays += 1
        if evaluate(case.at_rate(rate.above_scale), candidate, Role.SEARCH)[0].feasible:
            chosen = candidate
            rate = feasible_rate(case, chosen, start_scale=rate.above_scale)
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
