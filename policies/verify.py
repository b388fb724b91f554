"""The verdict on a push: operator thresholds first, then statistics; pure.

Gains are differences of attainment (share of good requests, -1..1) against the setting before the push.
"""

import math
from dataclasses import dataclass, fields
from enum import StrEnum

from rooftune.policies.errors import bad_value


@dataclass(frozen=True)
class RollbackThresholds:
    """Limits that an operator never accepts to be crossed, in the name's unit; +inf: no threshold."""

    gap_p99_s: float = math.inf
    queue_p99_s: float = math.inf
    preemptions_per_s: float = math.inf
    failed_share: float = math.inf

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if not value >= 0.0:
                raise bad_value(f"threshold {entry.name}", value, "at least 0", "correct it, or leave it out")


@dataclass(frozen=True)
class Observed:
    """The same quantities over the window after a push; NaN: unknown, crosses nothing."""

    gap_p99_s: float = math.nan
    queue_p99_s: float = math.nan
    preemptions_per_s: float = math.nan
    failed_share: float = math.nan


def crossed(thresholds: RollbackThresholds, observed: Observed) -> tuple[str, ...]:
    """Names of the crossed thresholds; an unknown quantity crosses none."""
    return tuple(e.name for e in fields(thresholds) if getattr(observed, e.name) > getattr(thresholds, e.name))


class Verdict(StrEnum):
    BETTER = "better"
    WORSE = "worse"
    INCONCLUSIVE = "inconclusive"


class VerdictReason(StrEnum):
    OPERATOR_THRESHOLD = "operator_threshold"
    TOO_FEW_REQUESTS = "too_few_requests"
    NOT_MEASURED = "not_measured"
    GAIN_SHOWN = "gain_shown"
    LOSS_SHOWN = "loss_shown"
    HARMFUL = "harmful"
    WITHIN_NOISE = "within_noise"


@dataclass(frozen=True)
class Comparison:
    """Prediction and observation of a push. half_width: half of the interval around observed_gain, >= 0; NaN: unknown.

    verdict: of the test alone; requests: that it judged.
    """

    predicted_gain: float
    twin_error: float
    observed_gain: float
    half_width: float
    verdict: Verdict
    requests: int
    crossed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Judgement:
    """prediction_held: the observation lies within noise and twin error of the prediction."""

    verdict: Verdict
    reason: VerdictReason
    prediction_held: bool


def judge(seen: Comparison, min_requests: int) -> Judgement:
    """The verdict. A crossed operator threshold is worse, whatever the statistics say."""
    miss = abs(seen.observed_gain - seen.predicted_gain)
    measured = math.isfinite(seen.observed_gain) and math.isfinite(seen.half_width)
    enough = measured and seen.requests >= min_requests
    # An unknown twin error excuses no miss.
    excused = seen.half_width + (seen.twin_error if math.isfinite(seen.twin_error) else 0.0)
    held = enough and miss <= excused

    def judgement(verdict: Verdict, reason: VerdictReason) -> Judgement:
        return Judgement(verdict, reason, held)

    if seen.crossed:
        return judgement(Verdict.WORSE, VerdictReason.OPERATOR_THRESHOLD)
    if not measured:
        return judgement(Verdict.INCONCLUSIVE, VerdictReason.NOT_MEASURED)
    if not enough:
        return judgement(Verdict.INCONCLUSIVE, VerdictReason.TOO_FEW_REQUESTS)
    return judgement(seen.verdict, REASON_OF[seen.verdict])


REASON_OF = {
    Verdict.BETTER: VerdictReason.GAIN_SHOWN,
    Verdict.WORSE: VerdictReason.LOSS_SHOWN,
    Verdict.INCONCLUSIVE: VerdictReason.WITHIN_NOISE,
}
