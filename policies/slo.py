"""Whether a run gave what the latency targets ask for.

Two readings of one target, never mixed. For one request (goodput, attainment): its value is within the bound.
For a run (margins, feasibility): the quantile of the metric over its requests is within the bound.

A request that failed or did not finish is never good and counts as +inf in every latency of a run. One-token
requests have no gaps and no TPOT: such targets hold for them and they add no sample. No samples: no margin (NaN).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import cast

import numpy as np
from rooftune.policies.errors import bad_value
from rooftune.policies.outcomes import BoolArray, FloatArray, IntArray, Outcomes
from rooftune.policies.quantiles import RELATIVE_SLACK, quantile, weighted_quantile
from rooftune.policies.targets import PROFILES, Condition, Metric, Objective, Override, Slo, Target

__all__ = [
    "PROFILES", "Condition", "MarginReason", "MarginRow", "Metric", "Objective", "Outcomes", "Override", "Slo",
    "Target", "attainment", "feasible", "good", "goodput_rps", "longest_wait_s", "margins", "missed_shares",
    "weighted_quantile",
]  # fmt: skip


class MarginReason(StrEnum):
    """How a margin came about."""

    MEASURED = "measured"
    BY_SHARE = "by_share"  # only counts above the bound are known: margin = share above / share allowed - 1
    NO_SAMPLES = "no_samples"


@dataclass(frozen=True)
class MarginRow:
    """One target over a run. margin = measured_s / bound_s - 1, met when <= 0; NaN without samples."""

    target: Target
    override_index: int | None
    measured_s: float
    margin: float
    samples: int
    reason: MarginReason


def _override_of(outcomes: Outcomes, slo: Slo) -> IntArray:
    """Index of the first override that matches each request, -1 for none."""
    chosen = np.full(len(outcomes), -1, dtype=np.int64)
    for index, override in enumerate(slo.overrides):
        chosen[(chosen < 0) & override.when.matches(outcomes)] = index
    return chosen


def _applies(slo: Slo, chosen: IntArray, target: Target, override_index: int | None) -> BoolArray:
    if override_index is not None:
        return np.equal(chosen, override_index)
    replaced = [index for index, override in enumerate(slo.overrides) if target.metric in override.metrics]
    return ~np.isin(chosen, replaced)


def _latency(outcomes: Outcomes, metric: Metric) -> tuple[FloatArray, BoolArray]:
    """Value of a per-request metric in seconds (+inf: never came), and which requests have it at all."""
    finished = outcomes.finished
    exists = np.ones(len(outcomes), dtype=np.bool_)
    if metric == "ttft":
        value = outcomes.first_token_s - outcomes.arrival_s
    elif metric == "queue":
        value = cast(FloatArray, outcomes.need("scheduled_s", "a queue target")) - outcomes.arrival_s
    elif metric == "e2e":
        value = outcomes.finish_s - outcomes.arrival_s
    elif metric == "tpot":
        exists = (outcomes.output_tokens > 1) | ~finished
        value = (outcomes.finish_s - outcomes.first_token_s) / np.maximum(outcomes.output_tokens - 1, 1)
    else:
        value = cast(FloatArray, outcomes.need("longest_gap_s", f"a {metric} target"))
        exists = (cast(IntArray, outcomes.need("gap_count", f"a {metric} target")) > 0) | ~finished
    lost = np.isnan(value) | (outcomes.failed if len(outcomes.failed) else False)
    if metric not in ("ttft", "queue"):
        lost = lost | ~finished
    return np.where(lost, np.inf, value), exists


def _gaps_over(outcomes: Outcomes, bound_s: float) -> IntArray:
    column = np.flatnonzero(np.isclose(outcomes.gap_bounds_s, bound_s, rtol=RELATIVE_SLACK, atol=0.0))
    if not column.size:
        known = ", ".join(f"{bound:g}" for bound in outcomes.gap_bounds_s) or "none"
        raise bad_value("gap bound_s", bound_s, f"one that the run counted ({known})", "count Slo.gap_bounds()")
    return outcomes.gap_over[:, column[0]]


def _request_meets(outcomes: Outcomes, target: Target) -> BoolArray:
    if target.metric != "gap" or target.quantile == 1.0:
        value, exists = _latency(outcomes, target.metric)
        return (value <= target.bound_s) | ~exists
    if not len(outcomes):
        return np.zeros(0, dtype=np.bool_)
    within = outcomes.gap_count - _gaps_over(outcomes, target.bound_s)
    return within >= (target.quantile - RELATIVE_SLACK) * outcomes.gap_count


def good(outcomes: Outcomes, slo: Slo) -> BoolArray:
    """Which requests finished and meet every target that applies to them, shape (n,).

    Raises InputError when a target needs a part that the run did not record.
    """
    chosen = _override_of(outcomes, slo)
    met = outcomes.finished.copy()
    for target, index in slo.all_targets():
        met &= _request_meets(outcomes, target) | ~_applies(slo, chosen, target, index)
    return met


def missed_shares(outcomes: Outcomes, slo: Slo) -> tuple[float, ...]:
    """For each row of ``margins`` the share of its requests that miss that target by themselves, 0..1.

    A request that did not finish misses every target; a target that applies to nobody is missed by nobody (0).
    """
    chosen = _override_of(outcomes, slo)
    shares = []
    for target, index in slo.all_targets():
        group = _applies(slo, chosen, target, index)
        missed = group & ~(_request_meets(outcomes, target) & outcomes.finished)
        shares.append(float(missed.sum()) / max(int(group.sum()), 1))
    return tuple(shares)


def attainment(outcomes: Outcomes, slo: Slo) -> float:
    """Share of the requests that are good, 0..1; NaN when there are no requests."""
    return float(good(outcomes, slo).mean()) if len(outcomes) else math.nan


def goodput_rps(outcomes: Outcomes, slo: Slo, span_s: float) -> float:
    """Good requests per second of ``span_s`` (above 0, finite); NaN when there are no requests."""
    if not (math.isfinite(span_s) and span_s > 0.0):
        raise bad_value("span_s", span_s, "above 0 and finite", "give the seconds that the run covers")
    return float(good(outcomes, slo).sum()) / span_s if len(outcomes) else math.nan


def _row(target: Target, index: int | None, measured_s: float, samples: int) -> MarginRow:
    if not samples:
        return MarginRow(target, index, math.nan, math.nan, 0, MarginReason.NO_SAMPLES)
    return MarginRow(target, index, measured_s, measured_s / target.bound_s - 1.0, samples, MarginReason.MEASURED)


def _gap_row(outcomes: Outcomes, target: Target, index: int | None, group: BoolArray) -> MarginRow:
    # Whoever never got the end of the answer still waits for a token: one gap without end each.
    endless = int((group & ~outcomes.finished).sum())
    if group.all() and len(outcomes.gap_values_s):
        values = np.append(outcomes.gap_values_s, np.inf)
        weights = np.append(outcomes.gap_weights, float(endless))
        measured_s = weighted_quantile(values, weights, target.quantile)
        return _row(target, index, measured_s, round(float(weights.sum())))
    if target.quantile == 1.0 or not group.any():
        value, exists = _latency(outcomes, "longest_gap")
        return _row(target, index, quantile(value[group & exists], 1.0), int((group & exists).sum()))
    counts = cast(IntArray, outcomes.need("gap_count", "a gap target"))
    samples = int(counts[group].sum()) + endless
    if not samples:
        return _row(target, index, math.nan, 0)
    over = int(_gaps_over(outcomes, target.bound_s)[group].sum()) + endless
    within_enough = samples - over >= (target.quantile - RELATIVE_SLACK) * samples
    margin = over / samples / (1.0 - target.quantile) - 1.0
    # One rule decides here and for single requests; rounding must not turn a met target into a missed one.
    margin = min(margin, 0.0) if within_enough else margin
    return MarginRow(target, index, math.nan, margin, samples, MarginReason.BY_SHARE)


def margins(outcomes: Outcomes, slo: Slo) -> tuple[MarginRow, ...]:
    """One row for each target: first the base targets, then those of each override, over the requests they are for.

    A gap target of all requests uses the exact distribution of the run's gaps. One of only some requests knows
    counts above the bound alone: its margin is share above / share allowed - 1 and its measured_s is NaN.
    """
    chosen = _override_of(outcomes, slo)
    rows: list[MarginRow] = []
    for target, index in slo.all_targets():
        group = _applies(slo, chosen, target, index)
        if target.metric == "gap":
            rows.append(_gap_row(outcomes, target, index, group))
            continue
        value, exists = _latency(outcomes, target.metric)
        kept = group & exists
        rows.append(_row(target, index, quantile(value[kept], target.quantile), int(kept.sum())))
    return tuple(rows)


def feasible(rows: Sequence[MarginRow]) -> bool:
    """Whether every target with samples is met. Targets, but samples for none of them: False, never by default."""
    judged = [row for row in rows if row.samples > 0]
    return not rows or (bool(judged) and all(row.margin <= 0.0 for row in judged))


def longest_wait_s(outcomes: Outcomes) -> float:
    """Longest wait from arrival to first token, in seconds; +inf when one never came, NaN without requests."""
    waits, _ = _latency(outcomes, "ttft")
    return float(waits.max()) if len(waits) else math.nan
