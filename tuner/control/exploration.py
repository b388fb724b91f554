"""What trials cost, in SLO-seconds: a second in which every request misses its targets, or two in which half do. Pure.

The account is kept by day, so that a wall clock that jumps to another day and back finds what was spent there.
"""

import math
from dataclasses import dataclass, replace

from rooftune.policies.errors import bad_value

DAYS_KEPT = 4


def predicted_cost_slo_s(attainment_now: float, error: float, trial_s: float) -> float:
    """What a trial of ``trial_s`` may cost before its verdict: the share of requests that the twin's own error
    (and noise) puts at risk, at most the share that is served well now. Unknown shares count as everything."""
    at_risk = error if math.isfinite(error) else 1.0
    served = attainment_now if math.isfinite(attainment_now) else 1.0
    return max(0.0, min(at_risk, served, 1.0)) * max(trial_s, 0.0)


def measured_cost_slo_s(observed_gain: float, elapsed_s: float) -> float:
    """What a trial has cost so far: attainment lost against the window before, times how long. Unknown: nothing."""
    return max(0.0, -observed_gain) * max(elapsed_s, 0.0) if math.isfinite(observed_gain) else 0.0


@dataclass(frozen=True)
class Account:
    """days: (date, SLO-seconds spent), each date once; the latest DAYS_KEPT that something was written to."""

    days: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        for day, spent in self.days:
            if not (math.isfinite(spent) and spent >= 0.0):
                raise bad_value(f"SLO-seconds of {day}", spent, "at least 0 and finite", "start a new account")

    def spent(self, day: str) -> float:
        return dict(self.days).get(day, 0.0)

    def with_spent(self, day: str, slo_s: float) -> "Account":
        """The account after ``slo_s`` more on that day."""
        days = dict(self.days)
        days[day] = days.pop(day, 0.0) + max(slo_s, 0.0)
        return replace(self, days=tuple(days.items())[-DAYS_KEPT:])
