"""One setting on the twin, judged: the single place where the search pays for simulated steps."""

import math

import numpy as np

from rooftune.policies.quantiles import quantile, weighted_quantile
from rooftune.policies.request import Setting
from rooftune.policies.slo import (
    MarginRow,
    Slo,
    attainment,
    feasible,
    goodput_rps,
    longest_wait_s,
    margins,
    missed_shares,
)
from rooftune.tuner.search.evaluation import Case, Evaluation, Role
from rooftune.tuner.sim.result import RunResult
from rooftune.tuner.sim.twin import TO_THE_END, Ends, simulate

# A margin beyond this says "far off" and nothing more: samplers add positive margins up.
MARGIN_CAP = 10.0


def capped_margin(row: MarginRow) -> float:
    """A margin for a sampler: finite, at most ``MARGIN_CAP``; a target without samples is as far off as can be."""
    if math.isnan(row.margin):
        return MARGIN_CAP
    return min(row.margin, MARGIN_CAP)


def constraint(row: MarginRow, missed: float) -> float:
    """A target as a sampler's constraint: met when <= 0.

    A sampler without any feasible trial minimises the sum of what is positive. Margins would make it fight for the few
    worst requests of a hopeless tail, so above zero the share of requests that miss the target counts, the same scale
    for every target, from 0 to MARGIN_CAP.
    """
    if row.margin <= 0.0:
        return row.margin
    return MARGIN_CAP * missed if missed > 0.0 else min(capped_margin(row), 1e-3)


def evaluate(case: Case, setting: Setting, role: Role, ends: Ends = TO_THE_END) -> tuple[Evaluation, RunResult]:
    """Replay the traffic under ``setting`` and judge it; what is unfinished where it ``ends`` has failed.

    Raises InputError for a setting outside the envelope.
    """
    bounds_s = case.slo.gap_bounds()
    result = simulate(
        case.traffic, case.engine, setting, case.model, gap_bounds_s=bounds_s, noise=case.noise, ends=ends
    )
    return judge(result, setting, case.slo, role), result


def judge(result: RunResult, setting: Setting, slo: Slo, role: Role) -> Evaluation:
    """The figures of one replay against the targets; goodput counts over the span of arrivals and service."""
    outcomes = result.outcomes
    rows = margins(outcomes, slo)
    finished = outcomes.finished
    unfinished = np.where(finished, 0.0, np.inf)
    ttft_s = np.where(np.isnan(outcomes.first_token_s), np.inf, outcomes.first_token_s - outcomes.arrival_s)
    several = outcomes.output_tokens > 1
    tpot_s = (outcomes.finish_s - outcomes.first_token_s)[several] / (outcomes.output_tokens[several] - 1)
    tpot_s = np.where(np.isnan(tpot_s), np.inf, tpot_s)
    longest_s = np.maximum(np.nan_to_num(outcomes.longest_gap_s), unfinished)[several]
    ttft_p50, ttft_p95, ttft_p99 = (quantile(ttft_s, q) for q in (0.5, 0.95, 0.99))
    gap_p50, gap_p99 = (weighted_quantile(outcomes.gap_values_s, outcomes.gap_weights, q) for q in (0.5, 0.99))
    return Evaluation(
        setting=setting,
        role=role,
        margins=rows,
        missed=missed_shares(outcomes, slo),
        feasible=feasible(rows) if rows else True,
        attainment=attainment(outcomes, slo),
        goodput_rps=goodput_rps(outcomes, slo, result.span_s),
        tokens_per_s=float(outcomes.output_tokens[finished].sum()) / result.span_s,
        violation=sum(max(capped_margin(row), 0.0) for row in rows),
        ttft_p50_s=ttft_p50,
        ttft_p95_s=ttft_p95,
        ttft_p99_s=ttft_p99,
        gap_p50_s=gap_p50,
        gap_p99_s=gap_p99,
        longest_gap_p99_s=quantile(longest_s, 0.99),
        tpot_p95_s=quantile(tpot_s, 0.95),
        longest_wait_s=longest_wait_s(outcomes),
        simulated_steps=result.steps,
        preempted=result.preempted,
        refused=result.refused,
        busy_share=result.busy_share,
    )
