"""How a prediction of the CPU sweep is judged: five latency figures and two shares of good requests a setting.

Repeats of a setting count as their mean, and their spread (largest - smallest) is what no prediction can beat.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from rooftune.policies.outcomes import Outcomes
from rooftune.policies.quantiles import quantile, weighted_quantile
from rooftune.policies.slo import Slo, Target, attainment

LATENCIES = ("gap_p95", "gap_p99", "longest_gap_p99", "ttft_p50", "ttft_p95")
SHARES = ("good_s1", "good_s2")
TARGETS = {
    "good_s1": Slo((Target("ttft", 2.0, 0.99), Target("longest_gap", 0.04, 0.99))),
    "good_s2": Slo((Target("ttft", 0.5, 0.99), Target("longest_gap", 0.1, 0.99))),
}
LARGEST_ERROR = 0.25
SPREADS = 1.5
LARGEST_POINTS = 6.0

Values = Mapping[str, float]


def figures_of(outcomes: Outcomes) -> dict[str, float]:
    """Latencies in seconds, shares of good requests in points (0..100)."""
    ttft_s = outcomes.first_token_s - outcomes.arrival_s
    several = outcomes.output_tokens > 1
    latencies = {
        "gap_p95": weighted_quantile(outcomes.gap_values_s, outcomes.gap_weights, 0.95),
        "gap_p99": weighted_quantile(outcomes.gap_values_s, outcomes.gap_weights, 0.99),
        "longest_gap_p99": quantile(outcomes.longest_gap_s[several], 0.99),
        "ttft_p50": quantile(ttft_s, 0.5),
        "ttft_p95": quantile(ttft_s, 0.95),
    }
    return latencies | {name: 100.0 * attainment(outcomes, slo) for name, slo in TARGETS.items()}


@dataclass(frozen=True)
class Judged:
    """One figure of one setting on a list: predicted, mean of the repeats, and their spread, in the figure's unit."""

    traffic: str
    case: str
    name: str
    predicted: float
    measured: float
    spread: float

    @property
    def is_share(self) -> bool:
        return self.name in SHARES

    @property
    def error(self) -> float:
        """Relative for a latency, in points for a share."""
        off = self.predicted - self.measured
        return off if self.is_share else off / self.measured

    @property
    def out_of_bounds(self) -> bool:
        off = abs(self.predicted - self.measured)
        if self.is_share:
            return off > max(LARGEST_POINTS, self.spread)
        return off > max(LARGEST_ERROR * self.measured, SPREADS * self.spread)


def judge(traffic: str, case: str, predicted: Sequence[Values], measured: Sequence[Values]) -> Iterator[Judged]:
    """All figures of a setting; predictions (one a seed) and repeats count as their means."""
    for name in (*LATENCIES, *SHARES):
        repeats = [values[name] for values in measured]
        expected = float(np.mean([values[name] for values in predicted]))
        yield Judged(traffic, case, name, expected, float(np.mean(repeats)), max(repeats) - min(repeats))


def ranking(rows: Sequence[Judged], names: Sequence[str]) -> tuple[int, int]:
    """Pairs of settings of one list ranked wrongly, and pairs whose measured difference exceeds the figure's noise.

    The noise is the largest spread of the figure among all settings of all lists (relative to its mean for a
    latency): most settings ran only once, which does not make them exact.
    """
    wrong = judged = 0
    for name in names:
        mine = [row for row in rows if row.name == name]
        noise = max(row.spread if row.is_share else row.spread / row.measured for row in mine)
        for one, other in combinations(mine, 2):
            if one.traffic != other.traffic:
                continue
            unit = 1.0 if one.is_share else max(one.measured, other.measured)
            difference = one.measured - other.measured
            if abs(difference) > noise * unit:
                judged += 1
                wrong += (one.predicted - other.predicted) * difference <= 0.0
    return wrong, judged
