"""The figures of one side of a replay against the targets."""

import math

import numpy as np
from rooftune.policies.errors import InputError
from rooftune.policies.outcomes import FloatArray, Outcomes
from rooftune.policies.quantiles import quantile, weighted_quantile
from rooftune.policies.slo import MarginRow, Slo, attainment, goodput_rps, margins
from rooftune.tuner.record import MarginPart, Seconds, plain
from rooftune.tuner.replay.result_file import VerdictPart


def verdict(outcomes: Outcomes, slo: Slo, side: str) -> VerdictPart:
    """Judged by ``policies/slo.py``; a target that this side recorded nothing for is said, not guessed (not_judged)."""
    finished = outcomes.finished
    span_s = _span_s(outcomes)
    try:
        rows: tuple[MarginRow, ...] = margins(outcomes, slo)
        share, goodput, why = attainment(outcomes, slo), goodput_rps(outcomes, slo, span_s), None
    except InputError as error:
        rows, share, goodput, why = (), math.nan, math.nan, str(error)
    if not slo.targets and not slo.overrides:
        share, goodput = math.nan, math.nan
    ttft_s = np.where(np.isnan(outcomes.first_token_s), np.inf, outcomes.first_token_s - outcomes.arrival_s)
    several = outcomes.output_tokens > 1
    tpot_s = (outcomes.finish_s - outcomes.first_token_s)[several] / (outcomes.output_tokens[several] - 1)
    longest_s = np.where(finished, np.nan_to_num(outcomes.longest_gap_s), np.inf)[several]
    return VerdictPart.model_validate(
        {
            "side": side,
            "judged": len(outcomes),
            "failed": int((~finished).sum()),
            "span_s": span_s,
            "attainment": _known(share),
            "goodput_rps": _known(goodput),
            "tokens_per_s": float(outcomes.output_tokens[finished].sum()) / span_s,
            "ttft_p50_s": _seconds(ttft_s, 0.5),
            "ttft_p95_s": _seconds(ttft_s, 0.95),
            "ttft_p99_s": _seconds(ttft_s, 0.99),
            "gap_p50_s": _gap(outcomes, 0.5),
            "gap_p99_s": _gap(outcomes, 0.99),
            "longest_gap_p99_s": _seconds(longest_s, 0.99),
            "tpot_p95_s": _seconds(np.where(np.isnan(tpot_s), np.inf, tpot_s), 0.95),
            "margins": tuple(
                MarginPart(measured_s=plain(row.measured_s), margin=plain(row.margin), samples=row.samples)
                for row in rows
            ),
            "not_judged": why,
        }
    )


def _span_s(outcomes: Outcomes) -> float:
    """First arrival to last finish (or last arrival), above 0."""
    if not len(outcomes):
        return 1e-9
    last = np.append(outcomes.finish_s[outcomes.finished], outcomes.arrival_s.max()).max()
    return max(float(last - outcomes.arrival_s.min()), 1e-9)


def _seconds(values: FloatArray, q: float) -> Seconds:
    return plain(quantile(values, q)) if len(values) else None


def _gap(outcomes: Outcomes, q: float) -> Seconds:
    return plain(weighted_quantile(outcomes.gap_values_s, outcomes.gap_weights, q))


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None
