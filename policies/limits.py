"""What the operator allows the guard to do."""

import math
from dataclasses import dataclass

from rooftune.policies.errors import bad_value

WEEK_MINUTES = 7 * 24 * 60


@dataclass(frozen=True)
class WeekSpan:
    """Minutes of the week (0 = Monday 00:00 in the operator's zone), end exclusive; may run over the week's end."""

    start_minute: int
    end_minute: int

    def __post_init__(self) -> None:
        for what, minute in (("start_minute", self.start_minute), ("end_minute", self.end_minute)):
            if not 0 <= minute < WEEK_MINUTES:
                raise bad_value(what, minute, f"within 0..{WEEK_MINUTES - 1}", "count from Monday 00:00")

    def holds(self, minute: int) -> bool:
        if self.start_minute <= self.end_minute:
            return self.start_minute <= minute < self.end_minute
        return minute >= self.start_minute or minute < self.end_minute


@dataclass(frozen=True)
class GuardLimits:
    """What the operator allows. Gains are shares of requests; exploration is paid in SLO-seconds.

    One SLO-second is a second in which every request misses its targets (or two in which half do).
    no_push: spans without pushes. push_only: when any are given, pushes happen inside them alone.
    """

    largest_ratio: float = 2.0
    dwell_s: float = 300.0
    min_gain: float = 0.01
    exploration_slo_s_per_day: float = 600.0
    max_metrics_age_s: float = 30.0
    max_inconclusive_s: float = 1800.0
    kv_full: float = 0.98
    min_shadow_s: float = 86_400.0
    no_push: tuple[WeekSpan, ...] = ()
    push_only: tuple[WeekSpan, ...] = ()

    def __post_init__(self) -> None:
        if not (math.isfinite(self.largest_ratio) and self.largest_ratio > 1.0):
            raise bad_value("largest_ratio", self.largest_ratio, "above 1 and finite", "give 2 to halve or double")
        if not 0.0 < self.kv_full <= 1.0:
            raise bad_value("kv_full", self.kv_full, "above 0 and at most 1", "give a fraction")
        amounts = ("dwell_s", "min_gain", "exploration_slo_s_per_day", "max_metrics_age_s", "max_inconclusive_s")
        for name in (*amounts, "min_shadow_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0.0):
                raise bad_value(name, value, "at least 0 and finite", "correct the guard limits")
