"""A window's requests against the targets, for the cycle record."""

import math

import numpy as np

from rooftune.policies.outcomes import Outcomes
from rooftune.policies.quantiles import quantile
from rooftune.policies.slo import Override, Slo, Target, attainment
from rooftune.tuner.control.outcome import Figures
from rooftune.tuner.observe.rows import ABORTED, FINISHED, BoolArray, FloatArray, RequestRows
from rooftune.tuner.record import Seconds, plain


def judgeable(slo: Slo, gap_bounds_s: tuple[float, ...]) -> Slo:
    """Targets that this engine's request records can show.

    The engine counts gaps only above its own bounds. A gap target at another bound becomes one on the longest gap,
    which is never milder.
    """

    def seen(target: Target) -> Target:
        if target.metric != "gap" or any(math.isclose(target.bound_s, bound, rel_tol=1e-9) for bound in gap_bounds_s):
            return target
        return Target("longest_gap", target.bound_s, target.quantile)

    overrides = tuple(Override(o.when, _distinct(map(seen, o.targets))) for o in slo.overrides)
    return Slo(_distinct(map(seen, slo.targets)), overrides, slo.objective)


def _distinct(targets: "map[Target]") -> tuple[Target, ...]:
    """Of targets on one quantile of one metric the tightest stays."""
    kept: dict[tuple[str, float], Target] = {}
    for target in targets:
        key = (target.metric, target.quantile)
        if key not in kept or target.bound_s < kept[key].bound_s:
            kept[key] = target
    return tuple(kept.values())


def judged(requests: RequestRows) -> RequestRows:
    """Requests whose latencies depend on the setting: all but aborted ones."""
    return requests.select(requests.ended != ABORTED)


def figures(requests: RequestRows, slo: Slo, span_s: float) -> Figures:
    """Figures of the finished and failed requests; NaN and missing values become null, never 0."""
    rows = judged(requests)
    outcomes = rows.outcomes()
    share = attainment(outcomes, slo)
    finished = rows.ended == FINISHED
    several = finished & (rows.output_tokens > 1)
    answer_s = (rows.finish_s - rows.arrival_s - rows.ttft_s)[several]
    # When all tokens came in one step, rounding may give a value below 0.
    tpot_s = np.maximum(answer_s, 0.0) / (rows.output_tokens[several] - 1)
    gaps_s = rows.longest_gap_s[several]
    ttft_s = _came(rows.ttft_s, finished)

    def at(values: FloatArray, q: float) -> Seconds:
        return plain(quantile(values, q)) if len(values) else None

    return Figures(
        requests=len(rows),
        span_s=span_s,
        attainment=None if math.isnan(share) else share,
        goodput_rps=None if math.isnan(share) or span_s <= 0.0 else share * len(rows) / span_s,
        ttft_p50_s=at(ttft_s, 0.5),
        ttft_p95_s=at(ttft_s, 0.95),
        ttft_p99_s=at(ttft_s, 0.99),
        queue_p99_s=at(queue_s(rows.outcomes(), finished), 0.99),
        tpot_p95_s=at(tpot_s, 0.95),
        longest_gap_p50_s=at(gaps_s[~np.isnan(gaps_s)], 0.5),
        longest_gap_p99_s=at(gaps_s[~np.isnan(gaps_s)], 0.99),
        failed=int((~finished).sum()),
        preemptions=int(rows.preemptions.sum()),
    )


def _came(values: FloatArray, finished: BoolArray) -> FloatArray:
    """Latencies with +inf for failed requests."""
    return np.where(finished & ~np.isnan(values), values, np.inf)


def queue_s(outcomes: Outcomes, finished: BoolArray) -> FloatArray:
    """Seconds from arrival to first scheduling, +inf for failed requests."""
    return _came(outcomes.scheduled_s - outcomes.arrival_s, finished)
