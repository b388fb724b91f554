"""Judges the twin: compares its quantiles with those observed in a window, with a verdict for each.

A controller may act only on ``good``. A quantile that is off by more than the bound is ``not_good`` only if the
sampling error of the window cannot explain it; otherwise the window is too small. Missing is not zero: a
metric without samples is ``too_few``, and the overall verdict is ``good`` only when every metric has a good quantile.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from rooftune.policies.errors import InputError
from rooftune.policies.outcomes import BoolArray, FloatArray, Outcomes
from rooftune.policies.quantiles import quantile


class Fidelity(StrEnum):
    """May the prediction be acted on?"""

    GOOD = "good"
    NOT_GOOD = "not_good"
    TOO_FEW = "too_few"


class Observed(StrEnum):
    """What is compared. Not the gaps of all requests together: a window holds only counts of those above bounds."""

    TTFT = "ttft"
    TPOT = "tpot"
    LONGEST_GAP = "longest_gap"


@dataclass(frozen=True)
class Quality:
    """The bounds of a good prediction.

    bound: largest relative error, above 0. floor_s: differences up to this never count (clock and host jitter).
    quantiles: those compared of every metric, each above 0 and below 1. min_requests: finished requests that a
    window needs; min_beyond: samples beyond a quantile that a judgement needs.
    """

    bound: float = 0.25
    floor_s: float = 0.001
    quantiles: tuple[float, ...] = (0.5, 0.95, 0.99)
    min_requests: int = 30
    min_beyond: int = 5


QUALITY = Quality()


@dataclass(frozen=True)
class QuantileError:
    """One quantile. error = predicted / observed - 1 (NaN without samples); samples: observed values of the metric."""

    metric: Observed
    quantile: float
    error: float
    samples: int
    verdict: Fidelity


@dataclass(frozen=True)
class Calibration:
    """All quantiles of a window, and the overall verdict."""

    rows: tuple[QuantileError, ...]
    verdict: Fidelity


def calibrate(predicted: Sequence[Outcomes], observed: Outcomes, quality: Quality = QUALITY) -> Calibration:
    """Judge the twin on a window.

    predicted: one replay of the same requests (same rows) for each seed of the noise; their quantiles are
    averaged. Only requests that finished in the window are compared, on both sides. Raises InputError when the rows
    are not the same requests.
    """
    if not predicted:
        raise InputError("no prediction to compare with; replay the window at least once")
    for replay in predicted:
        same = len(replay) == len(observed) and np.array_equal(replay.prompt_tokens, observed.prompt_tokens)
        if not same:
            raise InputError(
                f"the replay holds {len(replay)} requests, the window {len(observed)}, or different ones; "
                "replay the window's own requests in their order"
            )
    kept = observed.finished
    rows = tuple(_row(metric, q, predicted, observed, kept, quality) for metric in Observed for q in quality.quantiles)
    several = bool((kept & (observed.output_tokens > 1)).any())
    return Calibration(rows, _overall(rows, set(Observed) if several else {Observed.TTFT}))


def _overall(rows: Sequence[QuantileError], due: set[Observed]) -> Fidelity:
    """due: metrics that must be judged (requests of one token have no gaps)."""
    if any(row.verdict is Fidelity.NOT_GOOD for row in rows):
        return Fidelity.NOT_GOOD
    proven = {row.metric for row in rows if row.verdict is Fidelity.GOOD}
    return Fidelity.GOOD if due <= proven else Fidelity.TOO_FEW


def _row(
    metric: Observed, q: float, predicted: Sequence[Outcomes], observed: Outcomes, kept: BoolArray, quality: Quality
) -> QuantileError:
    values = samples_of(observed, metric, kept)
    count = len(values)
    if count == 0:
        return QuantileError(metric, q, math.nan, 0, Fidelity.TOO_FEW)
    observed_s = quantile(values, q)
    expected_s = float(np.mean([quantile(samples_of(replay, metric, kept), q) for replay in predicted]))
    # The sampling interval of the observed quantile: two standard errors of its rank.
    half = 2.0 * math.sqrt(q * (1.0 - q) / count)
    low_s, high_s = quantile(values, max(q - half, 1e-9)), quantile(values, min(q + half, 1.0))
    error = expected_s / observed_s - 1.0 if observed_s > 0.0 else math.nan
    verdict = _verdict(expected_s, observed_s, (low_s, high_s), quality)
    if int(kept.sum()) < quality.min_requests or count * (1.0 - q) < quality.min_beyond or math.isnan(expected_s):
        verdict = Fidelity.TOO_FEW
    return QuantileError(metric, q, error, count, verdict)


def _verdict(expected_s: float, observed_s: float, range_s: tuple[float, float], quality: Quality) -> Fidelity:
    if abs(expected_s - observed_s) <= max(quality.bound * observed_s, quality.floor_s):
        return Fidelity.GOOD
    low_s, high_s = range_s
    explained = low_s - quality.floor_s <= expected_s <= high_s + quality.floor_s
    return Fidelity.TOO_FEW if explained else Fidelity.NOT_GOOD


def samples_of(outcomes: Outcomes, metric: Observed, kept: BoolArray) -> FloatArray:
    """Values (s) of a metric over the requests ``kept``."""
    if metric is Observed.TTFT:
        values = (outcomes.first_token_s - outcomes.arrival_s)[kept]
    else:
        several = kept & (outcomes.output_tokens > 1)
        if metric is Observed.TPOT:
            values = ((outcomes.finish_s - outcomes.first_token_s) / np.maximum(outcomes.output_tokens - 1, 1))[several]
        elif len(outcomes.longest_gap_s):
            values = outcomes.longest_gap_s[several]
        else:
            values = np.zeros(0)
    return np.where(np.isnan(values), np.inf, values)  # the twin never got there
