"""A replay's rows as ``Outcomes``, so that the targets judge a measured run exactly as they judge a simulated one."""

import math
from collections.abc import Sequence

import numpy as np

from rooftune.policies.errors import InputError
from rooftune.policies.outcomes import FloatArray, Outcomes
from rooftune.policies.quantiles import quantile, weighted_quantile
from rooftune.policies.slo import MarginRow, Slo, attainment, goodput_rps, margins
from rooftune.tuner.record import MarginPart, Seconds, plain
from rooftune.tuner.replay.result_file import INTERRUPTED, EnginePart, EngineRequestPart, RequestPart, VerdictPart

NAN = math.nan


def client_outcomes(rows: Sequence[RequestPart], gap_bounds_s: Sequence[float] = ()) -> Outcomes:
    """What the client saw. A request counts from its actual sending; those that were interrupted are left out."""
    kept = [row for row in rows if row.failure != INTERRUPTED]
    tenants = tuple(dict.fromkeys(row.tenant for row in kept)) or ("default",)
    gaps = [np.array(row.gaps_s, dtype=np.float64) for row in kept]
    ended = [gap for gap, row in zip(gaps, kept, strict=True) if row.failure is None]
    values, weights = np.unique(np.concatenate([np.zeros(0), *ended]), return_counts=True)
    known_cached = all(row.cached_tokens is not None for row in kept)
    first = _floats([NAN if row.ttft_s is None else row.sent_s + row.ttft_s for row in kept])
    finish = _floats([NAN if row.failure or row.finish_s is None else row.finish_s for row in kept])
    return Outcomes(
        arrival_s=_floats([row.sent_s for row in kept]),
        first_token_s=first,
        # One of the two instants is a sum: rounding must not let the last token precede the first.
        finish_s=np.maximum(finish, first),
        prompt_tokens=_ints([row.prompt_tokens for row in kept]),
        output_tokens=_ints([row.asked_tokens if row.failure else row.output_tokens for row in kept]),
        longest_gap_s=_floats([float(gap.max()) if len(gap) else NAN for gap in gaps]),
        gap_count=_ints([len(gap) for gap in gaps]),
        cached_tokens=_ints([row.cached_tokens or 0 for row in kept] if known_cached else []),
        tenant=_ints([tenants.index(row.tenant) for row in kept]),
        tenant_names=tenants,
        failed=np.array([row.failure is not None for row in kept], dtype=np.bool_),
        gap_bounds_s=_floats(gap_bounds_s),
        gap_over=_counts([[int((gap > bound).sum()) for bound in gap_bounds_s] for gap in gaps], gap_bounds_s),
        gap_values_s=values,
        gap_weights=weights.astype(np.float64),
    )


def engine_outcomes(engine: EnginePart, rows: Sequence[RequestPart]) -> Outcomes:
    """What the engine says of the requests it has a row for, and the client's failures; on the client's clock.

    Requests that the client saw finish without a row at the engine are in neither: nothing is known of them.
    """
    by_index = {row.index: row for row in engine.requests}
    kept = [row for row in rows if row.failure != INTERRUPTED and (row.failure is not None or row.index in by_index)]
    pairs: list[tuple[RequestPart, EngineRequestPart | None]] = [
        (row, None if row.failure is not None else by_index[row.index]) for row in kept
    ]
    tenants = tuple(dict.fromkeys(row.tenant for row in kept)) or ("default",)
    none = [0] * len(engine.gap_bounds_s)
    arrival = [row.sent_s if one is None else one.arrival_s - engine.clock_offset_s for row, one in pairs]
    first = _floats([NAN if one is None else at + one.ttft_s for at, (_, one) in zip(arrival, pairs, strict=True)])
    finish = _floats([NAN if one is None else one.finish_s - engine.clock_offset_s for _, one in pairs])
    return Outcomes(
        arrival_s=_floats(arrival),
        first_token_s=first,
        # As on the client's side, and here the two sums are on two clocks.
        finish_s=np.maximum(finish, first),
        scheduled_s=_floats(
            [
                NAN if one is None or one.scheduled_s is None else one.scheduled_s - engine.clock_offset_s
                for _, one in pairs
            ]
        ),
        prompt_tokens=_ints([row.prompt_tokens for row in kept]),
        output_tokens=_ints([row.asked_tokens if one is None else one.output_tokens for row, one in pairs]),
        longest_gap_s=_floats(
            [NAN if one is None or one.longest_gap_s is None else one.longest_gap_s for _, one in pairs]
        ),
        gap_count=_ints([0 if one is None else one.gap_count for _, one in pairs]),
        cached_tokens=_ints([0 if one is None else one.cached_tokens for _, one in pairs]),
        tenant=_ints([tenants.index(row.tenant) for row in kept]),
        tenant_names=tenants,
        failed=np.array([one is None for _, one in pairs], dtype=np.bool_),
        gap_bounds_s=_floats(engine.gap_bounds_s),
        gap_over=_counts([none if one is None else list(one.gap_over) for _, one in pairs], engine.gap_bounds_s),
    )


def _floats(values: Sequence[float]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.array(values, dtype=np.float64)


def _ints(values: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(values, dtype=np.int64)


def _counts(rows: Sequence[Sequence[int]], bounds: Sequence[float]) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    return np.array(rows, dtype=np.int64).reshape(len(rows), len(bounds))


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
